"""Formats in which model families write tool calls, and a reader for each.

    family         a call in the text of a turn
    qwen           <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    qwen3_coder    <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    llama3         {"name": "f", "parameters": {"a": 1}}, also after <|python_tag|>
    glm            <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    deepseek       (calls begin)(call begin)function(sep)f```json{"a": 1}```(call end)(calls end)
    deepseek_v31   (calls begin)(call begin)f(sep){"a": 1}(call end)(calls end)

A reader is a pure function of the text, the place of a marker and the tools. It returns a call or
the reason why the text there is none, and where to continue. `hf/tool_calls.py` parses whole turns.

Formats: chat templates of Qwen2.5, Qwen3 and Qwen3.5, Llama 3.1, GLM-4.5, DeepSeek-V3, R1 and V3.1.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Fault = Literal[
    "unknown_tool", "invalid_json", "no_name", "bad_arguments", "unclosed", "in_reasoning"
]
"""Kind of a malformed call, for counts."""

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of each tool, by the tool's name."""

_MOST_NAMES, _SHOWN = 20, 20
_SPACE = re.compile(r"\s*")
_JSON_TYPES: dict[type, frozenset[str]] = {
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    type(None): frozenset({"null"}),
}
_KINDS = sorted(frozenset().union(*_JSON_TYPES.values()))
_JSON_NAMES = {
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}

_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_GLM_NAME = re.compile(r"([^<]*)")
_ARG_KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_ARG_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))")

_PYTHON = "<|python_tag|>"
_NEXT_OBJECT = re.compile(r"\s*;?\s*\{")
_NAMED = re.compile(
    r"""\{\s*["'](?:name["']\s*:|parameters["']\s*:|type["']\s*:\s*["']function["'])"""
)
_BEGUN = "{'name':", "{'parameters':", "{'type':'function'"
_MOST_BEGUN = 64

_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
_DEEPSEEK_MARKERS = _CALLS, _CALL, _CALLS_END
_SEP = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK = re.compile(rf"[^<]*{_SEP}([^\n<]*)\n```json(?=\s)")
_DEEPSEEK_V31 = re.compile(rf"([^<]*){_SEP}")


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text:.40} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call of a known tool."""

    name: str
    arguments: Mapping[str, Any]
    text: str
    """JSON object of the arguments: as sampled, or built from tags by qwen3_coder and glm."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A call that cannot be made."""

    text: str
    """The sampled text of the call, tags included."""
    reason: str
    """One sentence for the model: what is wrong with the call."""
    fault: Fault


class Read(NamedTuple):
    """Result of a reader. `call` is None for a marker around calls, which has no content."""

    call: ToolCall | MalformedCall | None
    end: int


class _BadCallError(ValueError):
    """A call is malformed; the message is the reason."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault


class ToolFamily(NamedTuple):
    """How the models of a family write calls."""

    read: Callable[[str, int, Schemas], Read]
    """Read the call at a place that `first` or `following` returned."""
    first: Callable[[str, int], int]
    """Find the first call of a turn from a position: its place, or -1."""
    following: Callable[[str, int], int]
    """Find the next call, from the end of the one before it: its place, or -1."""
    markers: tuple[str, ...]
    """Texts that begin calls."""
    gaps: tuple[str, ...]
    """What templates write between content and the first call, the longest first."""
    ends: tuple[str, ...]
    """Tokens that end a turn."""
    lead: str = ""
    """What the template writes before the content."""
    may_be_call: Callable[[str], bool] = lambda text: False
    """Return whether the beginning of a turn, without a marker, may be that of a call."""


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the parameter schemas by name of tools in OpenAI's form, `{"type": "function",
    "function": {"name", "parameters"}}` or only the inner object. Raises ValueError for a tool
    without a name."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"tool {tool!r:.80}: has no name; give OpenAI's form of a function")
        schema = function.get("parameters")
        found[name] = schema if isinstance(schema, Mapping) else {}
    return found


def members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """Read the JSON object at `at`. Return value and text of each member, and the object's end.
    Raises ValueError for invalid JSON, NaN and Infinity included, and for lone surrogates."""
    found: dict[str, tuple[Any, str]] = {}
    if not text.startswith("{", at):
        raise ValueError("it is not an object")
    at, is_first = at + 1, True
    while not text.startswith("}", at := _skip(text, at)):
        if not is_first:
            at = _skip(text, _after(text, at, ","))
        _after(text, at, '"')
        key, at = _value(text, at)
        begin = _skip(text, _after(text, _skip(text, at), ":"))
        value, at = _value(text, begin)
        found[key] = value, text[begin:at]
        is_first = False
    return found, at + 1


def read_qwen(text: str, at: int, schemas: Schemas) -> Read:
    """Read `<tool_call>`, a JSON object with `name` and `arguments`, `</tool_call>`."""

    def body(begin: int) -> tuple[ToolCall, int]:
        found, end = _members(text, _skip(text, begin))
        return _call(found, schemas), end

    return _within(text, at, "<tool_call>", "</tool_call>", body)


def read_qwen3_coder(text: str, at: int, schemas: Schemas) -> Read:
    """Read `<tool_call>`, `<function=NAME>`, a `<parameter=KEY>` for each argument, and their
    closing tags. A value ends at the first `</parameter>` that a tag of this format follows. The
    schema of the tool decides whether a value is text or JSON; without a type it is text."""

    def body(begin: int) -> tuple[ToolCall, int]:
        opened = _FUNCTION.match(text, begin)
        if opened is None:
            raise _BadCallError("no_name", "the call has no <function=NAME>")
        name, end = opened[1].strip(), opened.end()
        schema = _schema(name, schemas)
        pairs = []
        while parameter := _PARAMETER.match(text, end):
            closed = _PARAMETER_END.search(text, parameter.end())
            if closed is None:
                raise _BadCallError("unclosed", f"argument {parameter[1]!r} has no </parameter>")
            value = text[parameter.end() : closed.start()].removeprefix("\n").removesuffix("\n")
            pairs.append((parameter[1], value))
            end = closed.end()
        return _call_of_pairs(name, pairs, schema, "string"), _after_tag(text, end, "</function>")

    return _within(text, at, "<tool_call>", "</tool_call>", body)


def read_glm(text: str, at: int, schemas: Schemas) -> Read:
    """Read `<tool_call>NAME`, pairs of `<arg_key>` and `<arg_value>`, `</tool_call>`. A value ends
    at the first `</arg_value>` that a tag of this format follows. The schema of the tool decides
    whether a value is text or JSON; without a type it is JSON if it can be."""

    def body(begin: int) -> tuple[ToolCall, int]:
        opened = _GLM_NAME.match(text, begin)
        name, end = (opened[1].strip(), opened.end()) if opened else ("", begin)
        schema = _schema(name, schemas)
        pairs = []
        while key := _ARG_KEY.match(text, end):
            closed = _ARG_END.search(text, key.end())
            if closed is None:
                raise _BadCallError("unclosed", f"argument {key[1]!r} has no </arg_value>")
            pairs.append((key[1].strip(), text[key.end() : closed.start()]))
            end = closed.end()
        return _call_of_pairs(name, pairs, schema, "any"), end

    return _within(text, at, "<tool_call>", "</tool_call>", body)


def read_llama3(text: str, at: int, schemas: Schemas) -> Read:
    """Read a JSON object with `name` and `parameters`, maybe after `<|python_tag|>`."""
    begin = _skip(text, at + len(_PYTHON) if text.startswith(_PYTHON, at) else at)
    try:
        found, end = _members(text, begin)
    except _BadCallError as error:
        end = text.find(_PYTHON, begin)
        end = len(text) if end < 0 else end
        return Read(MalformedCall(text[at:end], str(error), error.fault), end)
    try:
        return Read(_call(found, schemas), end)
    except _BadCallError as error:
        return Read(MalformedCall(text[at:end], str(error), error.fault), end)


def read_deepseek(text: str, at: int, schemas: Schemas) -> Read:
    """Read a call of V3 and R1: type, name, and the arguments as a block of JSON."""

    def body(begin: int) -> tuple[ToolCall, int]:
        opened = _DEEPSEEK.match(text, begin)
        if opened is None:
            raise _BadCallError("no_name", "the call has no name before a block ```json")
        return _deepseek_call(text, opened, schemas, "```")

    return _read_deepseek(text, at, body)


def read_deepseek_v31(text: str, at: int, schemas: Schemas) -> Read:
    """Read a call of V3.1: name and arguments, with a separator between them."""

    def body(begin: int) -> tuple[ToolCall, int]:
        opened = _DEEPSEEK_V31.match(text, begin)
        if opened is None:
            raise _BadCallError("no_name", "the call has no name before the separator")
        return _deepseek_call(text, opened, schemas, "")

    return _read_deepseek(text, at, body)


def _deepseek_call(
    text: str, opened: re.Match[str], schemas: Schemas, fence: str
) -> tuple[ToolCall, int]:
    name = opened[1].strip()
    _schema(name, schemas)
    begin = _skip(text, opened.end())
    found, end = _members(text, begin)
    arguments = {key: value for key, (value, _) in found.items()}
    return ToolCall(name, arguments, text[begin:end]), _after_tag(text, end, fence)


def _read_deepseek(text: str, at: int, body: Callable[[int], tuple[ToolCall, int]]) -> Read:
    for marker in (_CALLS, _CALLS_END):
        if text.startswith(marker, at):
            return Read(None, at + len(marker))
    return _within(text, at, _CALL, _CALL_END, body)


def _within(
    text: str, at: int, opening: str, closing: str, body: Callable[[int], tuple[ToolCall, int]]
) -> Read:
    """Read a call between two tags. A malformed one ends at its closing tag, or before the next
    opening one."""
    begin = at + len(opening)
    fault: Fault
    try:
        call, end = body(begin)
        end = _skip(text, end)
        if text.startswith(closing, end):
            return Read(call, end + len(closing))
        fault, reason = "invalid_json", f"the call goes on after its arguments, without {closing}"
    except _BadCallError as error:
        fault, reason = error.fault, str(error)
    after = text.find(opening, begin)
    after = len(text) if after < 0 else after
    end = text.find(closing, begin, after)
    if end < 0:
        return Read(MalformedCall(text[at:after], f"the call has no {closing}", "unclosed"), after)
    return Read(MalformedCall(text[at : end + len(closing)], reason, fault), end + len(closing))


def _call(found: Mapping[str, tuple[Any, str]], schemas: Schemas) -> ToolCall:
    """Return the call of a JSON object with a name and arguments; without arguments they are {}."""
    name, _ = found.get("name", (None, ""))
    if not isinstance(name, str) or not name:
        raise _BadCallError("no_name", 'the call has no "name"')
    _schema(name, schemas)
    arguments, text = found.get("arguments", found.get("parameters", ({}, "{}")))
    if not isinstance(arguments, dict):
        kind = _JSON_NAMES[type(arguments)]
        raise _BadCallError(
            "bad_arguments", f"the arguments of {name} are {kind}; they must be an object"
        )
    return ToolCall(name, arguments, text)


def _call_of_pairs(
    name: str, pairs: Sequence[tuple[str, str]], schema: Mapping[str, Any], untyped: str
) -> ToolCall:
    """Return the call of arguments given as pairs of key and text."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, Any] = {}
    for key, text in pairs:
        if key in arguments:
            raise _BadCallError("bad_arguments", f"argument {key!r} of {name} is given twice")
        kinds = _kinds(properties.get(key)) or {untyped}
        try:
            arguments[key] = _typed(text, kinds)
        except ValueError as error:
            allowed = " or ".join(sorted(kinds))
            raise _BadCallError(
                "bad_arguments", f"argument {key!r} of {name} must be JSON of type {allowed}"
            ) from error
    return ToolCall(name, arguments, json.dumps(arguments, ensure_ascii=False))


def _typed(text: str, kinds: set[str]) -> Any:
    """Return the value that a text stands for, if it may have the types `kinds` or "any". Templates
    write strings without quotes. Raises ValueError if the text must be JSON and is none."""
    if kinds == {"string"}:
        return text
    is_text = bool(kinds & {"string", "any"})
    try:
        value = _json(text)
    except ValueError:
        if is_text:
            return text
        if text.strip() in _PYTHON_WORDS:
            return _PYTHON_WORDS[text.strip()]
        raise
    if isinstance(value, str):
        return text if is_text else value
    return text if "string" in kinds and _JSON_TYPES[type(value)].isdisjoint(kinds) else value


def _kinds(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; an empty set if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            parts = [_kinds(part) for part in schema[word]]
            return set().union(*parts) if all(parts) else set()
    if isinstance(schema.get("enum"), list):
        return {kind for value in schema["enum"] for kind in _JSON_TYPES.get(type(value), ())}
    named = schema.get("type")
    kinds = [named] if isinstance(named, str) else named
    if not isinstance(kinds, list) or not all(kind in _KINDS for kind in kinds):
        return set()
    return set(kinds)


def _schema(name: str, schemas: Schemas) -> Mapping[str, Any]:
    """Return the schema of a tool. Raises _BadCallError if there is no such tool."""
    if not name:
        raise _BadCallError("no_name", "the call has no name")
    if name not in schemas:
        names = ", ".join(list(schemas)[:_MOST_NAMES]) or "none"
        raise _BadCallError("unknown_tool", f"there is no tool {name:.80}; the tools are: {names}")
    return schemas[name]


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    try:
        return members(text, at)
    except ValueError as error:
        raise _BadCallError("invalid_json", f"the call is not valid JSON: {error}") from error


def _value(text: str, at: int) -> tuple[Any, int]:
    """Read the JSON value at `at`; return it and its end. Raises ValueError."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        if "\\u" in text[at:end]:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg}, {_place(text, error.pos)}") from error
    except UnicodeEncodeError as error:
        raise ValueError("a string has half of a surrogate pair") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value, end


def _place(text: str, at: int) -> str:
    return f"before {text[at : at + _SHOWN]!r}" if at < len(text) else "at the end"


def _json(text: str) -> Any:
    value, end = _value(text, _skip(text, 0))
    if text[end:].strip():
        raise ValueError("text follows the value")
    return value


def _skip(text: str, at: int) -> int:
    """Return the end of the white space at `at`."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _after(text: str, at: int, sign: str) -> int:
    if not text.startswith(sign, at):
        raise ValueError(f"{sign!r} is missing, {_place(text, at)}")
    return at + len(sign)


def _after_tag(text: str, at: int, tag: str) -> int:
    """Return the end of a tag, with white space before it. Raises _BadCallError."""
    at = _skip(text, at)
    if not text.startswith(tag, at):
        raise _BadCallError("unclosed", f"the call has no {tag} after its arguments")
    return at + len(tag)


def _first_of(*markers: str) -> Callable[[str, int], int]:
    pattern = re.compile("|".join(map(re.escape, markers)))

    def find(text: str, at: int) -> int:
        found = pattern.search(text, at)
        return found.start() if found else -1

    return find


def _first_llama3(text: str, at: int) -> int:
    """Find `<|python_tag|>`, or an object at the start of the turn that is meant as a call."""
    begin = _skip(text, at)
    return begin if _is_bare_call(text, begin) else text.find(_PYTHON, at)


def _following_llama3(text: str, at: int) -> int:
    """Find an object directly after a call, or `<|python_tag|>`."""
    found = _NEXT_OBJECT.match(text, at)
    return found.end() - 1 if found else text.find(_PYTHON, at)


def _is_bare_call(text: str, at: int) -> bool:
    """Return whether the object at `at` is meant as a call. An answer in JSON is none."""
    if not _NAMED.match(text, at):
        return False
    try:
        found, _ = members(text, at)
    except ValueError:
        return True
    return "name" in found and ("parameters" in found or "arguments" in found)


def _may_be_bare_call(text: str) -> bool:
    begun = "".join(text.lstrip()[:_MOST_BEGUN].split()).replace('"', "'")
    return any(word.startswith(begun) or begun.startswith(word) for word in _BEGUN)


_find_tag = _first_of("<tool_call>")
_find_deepseek = _first_of(_CALLS, _CALL, _CALLS_END)
_QWEN_ENDS = "<|im_end|>", "<|endoftext|>"
_DEEPSEEK_ENDS = ("<\uff5cend\u2581of\u2581sentence\uff5c>",)

FAMILIES: dict[str, ToolFamily] = {
    "qwen": ToolFamily(read_qwen, _find_tag, _find_tag, ("<tool_call>",), ("\n",), ends=_QWEN_ENDS),
    "qwen3_coder": ToolFamily(
        read_qwen3_coder, _find_tag, _find_tag, ("<tool_call>",), ("\n\n", "\n"), ends=_QWEN_ENDS
    ),
    "llama3": ToolFamily(
        read_llama3,
        _first_llama3,
        _following_llama3,
        (_PYTHON,),
        gaps=(),
        ends=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        may_be_call=_may_be_bare_call,
    ),
    "glm": ToolFamily(
        read_glm,
        _find_tag,
        _find_tag,
        ("<tool_call>",),
        gaps=("\n",),
        ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
        lead="\n",
    ),
    "deepseek": ToolFamily(
        read_deepseek, _find_deepseek, _find_deepseek, _DEEPSEEK_MARKERS, (), _DEEPSEEK_ENDS
    ),
    "deepseek_v31": ToolFamily(
        read_deepseek_v31, _find_deepseek, _find_deepseek, _DEEPSEEK_MARKERS, (), _DEEPSEEK_ENDS
    ),
}
"""Families by name."""

NO_CALLS = FAMILIES["qwen"]._replace(first=lambda text, at: -1, markers=(), gaps=(), ends=())
"""Texts of a model whose format of calls is unknown: no text is a call."""
