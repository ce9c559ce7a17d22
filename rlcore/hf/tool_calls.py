"""Tool calls and reasoning in the text of a turn, by the format of the model.

    family = family_of(template)
    parsed = parse(family, text, tools, reasoning_of(template, prompt))

All functions are pure. `text` is a turn as sampled, decoded with its special tokens, since some
formats are made of them. A token that ends the turn may stand at the end of the text. Tools have
OpenAI's form. `hf/tool_formats.py` has the formats.

Nothing of a text is lost: its parts are reasoning, content, calls, malformed calls and rest. Only
white space between the parts is dropped. The chat template renders `assistant_message` to the same
text, if the model wrote its calls as the template does.

Differs from SGLang's parsers: a malformed call is kept with its reason instead of being dropped,
content keeps its white space, and a text in a string argument is never read as another type.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rlcore.hf.tool_formats import (
    FAMILIES,
    NO_CALLS,
    MalformedCall,
    ToolCall,
    ToolFamily,
    schemas_of,
)
from rlcore.utils.errors import ConfigError

Reasoning = Literal["none", "tagged", "open"]
"""Where a turn has reasoning. `none`: nowhere. `tagged`: between <think> and </think>, if the turn
begins so. `open`: up to </think>, since the prompt ends with <think>."""

_OPEN = re.compile(r"\s*<think>\n?")
_CLOSE = "</think>"
_MOST_AFTER_CLOSE = 2  # newlines that templates write between reasoning and content


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """Parts of a turn."""

    content: str
    """Text before the first call."""
    reasoning: str | None = None
    """Text between the reasoning tags; None if the turn has no reasoning."""
    attempts: tuple[ToolCall | MalformedCall, ...] = ()
    """Calls in the order of the text, malformed ones included."""
    rest: str = ""
    """Text between and after the calls. No template renders it at its place."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(call for call in self.attempts if isinstance(call, ToolCall))

    @property
    def malformed(self) -> tuple[MalformedCall, ...]:
        return tuple(call for call in self.attempts if isinstance(call, MalformedCall))


class Streamable(NamedTuple):
    """Beginnings of reasoning and content that no continuation of the turn changes."""

    reasoning: str
    content: str


class _Parts(NamedTuple):
    """A turn, cut before its first call."""

    reasoning: str | None
    content: str
    end: int
    """Place of the first call in the text, or the length of the text."""
    is_open: bool
    """The reasoning has no end."""


def family_of(template: str) -> str:
    """Return the family that a chat template writes calls for, a key of `FAMILIES`. Raises
    ConfigError if it is none of them."""
    if "<\uff5ctool\u2581calls\u2581begin\uff5c>" in template:
        return "deepseek" if "```json" in template else "deepseek_v31"
    if "<tool_call>" in template:
        if "<arg_key>" in template:
            return "glm"
        return "qwen3_coder" if "<function=" in template else "qwen"
    if "<|eot_id|>" in template and '"parameters"' in template:
        return "llama3"
    raise ConfigError(
        "the chat template writes no tool calls in a format that rlcore reads "
        f"({', '.join(FAMILIES)}); use a model trained for tool calls"
    )


OPENING_TOKENS = 16
"""More tokens than the text that opens reasoning has, at the end of a rendered prompt."""


def reasoning_of(template: str, prompt: str) -> Reasoning:
    """Return where turns of a model have reasoning, from its chat template and the rendered prompt
    of the turn."""
    if _CLOSE not in template:
        return "none"
    return "open" if prompt.rstrip().endswith("<think>") else "tagged"


def parse(
    family: str, text: str, tools: Sequence[Mapping[str, Any]], reasoning: Reasoning = "none"
) -> ParsedTurn:
    """Return the parts of a turn. A call that cannot be made is among the malformed ones. A call
    within reasoning is text; if that reasoning has no end, its first call is malformed. With the
    family "" nothing is a call. Raises ConfigError for another family that is not in `FAMILIES` and
    ValueError for a tool without a name, but nothing for any text."""
    form, schemas = _form(family), schemas_of(tools)
    text = _without_end(text, form)
    parts = _parts(text, form, reasoning)
    if parts.is_open:
        return ParsedTurn("", parts.reasoning, _hidden_call(parts.reasoning or "", form))
    attempts: list[ToolCall | MalformedCall] = []
    rest: list[str] = []
    at = parts.end
    while at < len(text):
        call, end = form.read(text, at, schemas)
        if call is not None:
            attempts.append(call)
        at = form.following(text, end)
        at = len(text) if at < 0 else at
        rest.append(text[end:at])
    kept = "".join(piece for piece in rest if piece.strip(" \t\r\n;"))
    return ParsedTurn(parts.content, parts.reasoning, tuple(attempts), kept)


def streamable(family: str, text: str, reasoning: Reasoning = "none") -> Streamable:
    """Return how much reasoning and content of a turn is certain, given its text so far. For every
    continuation, `parse` returns reasoning and content that begin with these. Calls are not read,
    so a call per token is cheap. Raises ConfigError for a family that is not in `FAMILIES`."""
    form = _form(family)
    if reasoning == "tagged" and "<think>".startswith(text.lstrip()):
        return Streamable("", "")
    parts = _parts(text, form, reasoning, is_whole=False)
    thought = parts.reasoning or ""
    if parts.is_open:
        return Streamable(_released(thought, ("\n" + _CLOSE, _CLOSE, *form.ends)), "")
    content = parts.content
    if parts.end == len(text):
        markers = [gap + marker for gap in ("", *form.gaps) for marker in form.markers]
        content = _released(content, (*markers, *form.ends))
    return Streamable(thought, content)


def split_calls(family: str, text: str, reasoning: Reasoning = "none") -> list[tuple[bool, str]]:
    """Split a turn into pieces, each with whether it is calls, and lose nothing. Calls of unknown
    tools and malformed ones are calls too. Raises ConfigError for an unknown family."""
    form = _form(family)
    body = _without_end(text, form)
    at, done = _parts(body, form, reasoning).end, 0
    found: list[tuple[bool, str]] = []
    while 0 <= at < len(body):
        _, end = form.read(body, at, {})
        if found and done == at:
            found[-1] = True, found[-1][1] + body[at:end]
        else:
            found += [(False, body[done:at]), (True, body[at:end])]
        done, at = end, form.following(body, end)
    return [piece for piece in [*found, (False, text[done:])] if piece[1]]


def assistant_message(parsed: ParsedTurn, ids: Sequence[str] = ()) -> dict[str, Any]:
    """Return a turn as a message in OpenAI's form. `ids` are those of the calls; by default they
    are numbered. The text of malformed calls and the rest are not in it."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        names = ids or [f"call_{i}" for i in range(len(parsed.calls))]
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for i, call in zip(names, parsed.calls, strict=True)
        ]
    return message


def _form(family: str) -> ToolFamily:
    if not family:
        return NO_CALLS
    if family not in FAMILIES:
        raise ConfigError(f"tool calls {family!r}: must be one of {', '.join(FAMILIES)}")
    return FAMILIES[family]


def _parts(text: str, form: ToolFamily, reasoning: Reasoning, is_whole: bool = True) -> _Parts:
    """Cut a turn. If it is not whole, a text that may become a call is not content."""
    thought, start = None, 0
    opened = _OPEN.match(text) if reasoning == "tagged" else None
    if opened is not None or reasoning == "open":
        begin = opened.end() if opened else 0
        close = text.find(_CLOSE, begin)
        if close < 0:
            return _Parts(text[begin:], "", len(text), True)
        thought = text[begin:close].removesuffix("\n")
        start = close + len(_CLOSE)
        after = text[start : start + _MOST_AFTER_CLOSE]
        start += len(after) - len(after.lstrip("\n"))
    elif text.startswith(form.lead):
        start = len(form.lead)
    if not is_whole and form.may_be_call(text[start:]):
        return _Parts(thought, "", start, False)
    end = form.first(text, start)
    if end < 0:
        return _Parts(thought, text[start:], len(text), False)
    content = text[start:end]
    gap = next((gap for gap in form.gaps if content.endswith(gap)), "")
    return _Parts(thought, content.removesuffix(gap), end, False)


def _without_end(text: str, form: ToolFamily) -> str:
    """Return the text without a token at its end that ends the turn."""
    end = next((end for end in form.ends if text.endswith(end)), "")
    return text.removesuffix(end)


def _released(text: str, words: Sequence[str]) -> str:
    """Return the text without the longest end of it that begins one of the words."""
    longest = min(len(text), max(map(len, words), default=0))
    for size in range(longest, 0, -1):
        if any(word.startswith(text[-size:]) for word in words):
            return text[:-size]
    return text


def _hidden_call(reasoning: str, form: ToolFamily) -> tuple[MalformedCall, ...]:
    at = form.first(reasoning, 0)
    if at < 0:
        return ()
    reason = f"the call is within reasoning that has no {_CLOSE}"
    return (MalformedCall(reasoning[at:], reason, "in_reasoning"),)
