"""Tool calls in sampled texts: what is a call, what is malformed and why, what may be streamed."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.hf.tool_calls import (
    ParsedTurn,
    Reasoning,
    assistant_message,
    family_of,
    parse,
    reasoning_of,
    split_calls,
    streamable,
)
from rlcore.hf.tool_formats import FAMILIES, MalformedCall

GROW = {
    "type": "object",
    "properties": {
        "by": {"type": "integer"},
        "name": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "some": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
        "one_of": {"enum": ["a", 1]},
        "free": {"$ref": "#/elsewhere"},
        "odd": {"type": "varchar"},
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "grow", "parameters": GROW}},
    {"name": "stop"},
]


def wide(word: str) -> str:
    return "<\uff5c" + word.replace(" ", "\u2581") + "\uff5c>"


BEGIN, SEP, END = wide("tool call begin"), wide("tool sep"), wide("tool call end")
CALLS = {
    "qwen": '<tool_call>\n{"name": "grow", "arguments": {"by": 1}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=grow>\n<parameter=by>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
    "llama3": '{"name": "grow", "parameters": {"by": 1}}',
    "glm": "<tool_call>grow\n<arg_key>by</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "deepseek": f'{BEGIN}function{SEP}grow\n```json\n{{"by": 1}}\n```{END}',
    "deepseek_v31": f'{BEGIN}grow{SEP}{{"by": 1}}{END}',
}
PIECES = [
    *CALLS.values(),
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<think>\n", "\n</think>\n\n", "\n"),
    *("<function=grow>", "<function=", "<parameter=by>", "</parameter>", "</function>", "```"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "grow", "by", "1", "<|im_end|>"),
    *('{"name": "grow"', '{"name": "grow", "arguments": {}}', "{", "}", '"', ":", "[", "NaN"),
    *("<|python_tag|>", "<|eot_id|>", ";", "\\ud800", '{"a": 1}', "{'name': 'x'}", " ", "text"),
    *(
        BEGIN,
        SEP,
        END,
        wide("tool calls begin"),
        wide("tool calls end"),
        "\n```json\n",
        "<",
        "\n\n",
    ),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12).map("".join)
every_family = pytest.mark.parametrize("family", FAMILIES)
every_place = st.sampled_from(["none", "tagged", "open"])


def parts(turn: ParsedTurn) -> tuple[str, str]:
    return turn.reasoning or "", turn.content


@every_family
@settings(max_examples=300)
@given(text=TEXTS, reasoning=every_place, cut=st.integers(0, 60))
def test_what_may_be_streamed_of_any_text_is_never_taken_back(
    family: str, text: str, reasoning: Reasoning, cut: int
) -> None:
    final = parse(family, text, TOOLS, reasoning)  # no text raises
    for call in final.calls:
        assert call.name in ("grow", "stop") and json.loads(call.text) == call.arguments
    assert all(bad.reason and bad.text for bad in final.malformed)
    early, late = (streamable(family, text[:end], reasoning) for end in (cut, cut + 1))
    for old, new, whole in zip(early, late, parts(final), strict=True):
        assert new.startswith(old) and whole.startswith(new)


@every_family
@settings(max_examples=200)
@given(text=TEXTS, reasoning=every_place)
def test_no_character_of_a_text_is_lost(family: str, text: str, reasoning: Reasoning) -> None:
    turn = parse(family, text, TOOLS, reasoning)
    if turn.calls:  # those are compared with templates: tests/contracts/test_tool_calls.py
        return
    pieces = [turn.content, turn.reasoning or "", turn.rest]
    pieces += [bad.text for bad in turn.malformed if bad.fault != "in_reasoning"]
    lost = Counter(text) - Counter("".join(pieces))
    tags = "<think></think>", "<|im_end|>", "<|eot_id|>", ";", wide("tool calls begin end")
    assert {sign for sign in lost if sign.strip()} <= set("".join(tags))


@every_family
def test_a_call_that_is_cut_is_malformed(family: str) -> None:
    call = CALLS[family]
    whole = parse(family, "Well." + call if family != "llama3" else call, TOOLS)
    assert [dict(c.arguments) for c in whole.calls] == [{"by": 1}] and not whole.malformed
    begun = min(call.find(sign) for sign in (">", ":") if sign in call) + 1
    for end in range(begun, len(call)):
        turn = parse(family, call[:end], TOOLS)
        (bad,) = turn.malformed
        assert (
            not turn.calls and bad.text == call[:end] and bad.fault in ("unclosed", "invalid_json")
        )


MALFORMED = [
    ("qwen", "<tool_call>{}</tool_call>", "no_name", 'the call has no "name"'),
    ("qwen", '<tool_call>{"name": ""}</tool_call>', "no_name", 'the call has no "name"'),
    (
        "qwen",
        '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
        "unknown_tool",
        "there is no tool fly; the tools are: grow, stop",
    ),
    (
        "qwen",
        '<tool_call>{"name": "grow", "arguments": "by 1"}</tool_call>',
        "bad_arguments",
        "the arguments of grow are a string; they must be an object",
    ),
    (
        "qwen",
        '<tool_call>{"name": "grow", "arguments": {"by": 1,}}</tool_call>',
        "invalid_json",
        "the call is not valid JSON: ",
    ),
    (
        "qwen",
        '<tool_call>{"name" "grow"}</tool_call>',
        "invalid_json",
        "the call is not valid JSON: ':' is missing, before '\"grow\"}</tool_call>'",
    ),
    (
        "qwen",
        '<tool_call>{"name": "stop"}}</tool_call>',
        "invalid_json",
        "the call goes on after its arguments, without </tool_call>",
    ),
    (
        "qwen",
        '<tool_call>{"name": "grow", "arguments": {"name": "\\ud800"}}</tool_call>',
        "invalid_json",
        "a string has half of a surrogate pair",
    ),
    ("qwen", "<tool_call>" + '{"a":' * 99_999 + "</tool_call>", "invalid_json", "too deeply"),
    ("qwen", f'<tool_call>{{"a": {"9" * 5000}}}</tool_call>', "invalid_json", "digits"),
    ("qwen", '<tool_call>{"a": 1e999}</tool_call>', "invalid_json", "1e999 is too large"),
    ("qwen", '<tool_call>{"name": "stop"}', "unclosed", "the call has no </tool_call>"),
    ("qwen3_coder", "<tool_call>stop</tool_call>", "no_name", "the call has no <function=NAME>"),
    (
        "qwen3_coder",
        "<tool_call><function=grow><parameter=by>x</parameter></function></tool_call>",
        "bad_arguments",
        "argument 'by' of grow must be JSON of type integer",
    ),
    (
        "qwen3_coder",
        "<tool_call><function=grow><parameter=name>x</function></tool_call>",
        "unclosed",
        "argument 'name' has no </parameter>",
    ),
    (
        "glm",
        "<tool_call>grow" + "<arg_key>by</arg_key><arg_value>1</arg_value>" * 2 + "</tool_call>",
        "bad_arguments",
        "argument 'by' of grow is given twice",
    ),
    ("glm", "<tool_call></tool_call>", "no_name", "the call has no name"),
    ("llama3", "<|python_tag|>print(1)", "invalid_json", "it is not an object"),
    ("deepseek", f"{BEGIN}function{SEP}stop{END}", "no_name", "no name before a block ```json"),
    ("deepseek_v31", f"{BEGIN}stop{END}", "no_name", "no name before the separator"),
]


@pytest.mark.parametrize(("family", "text", "fault", "reason"), MALFORMED)
def test_a_malformed_call_has_a_reason(family: str, text: str, fault: str, reason: str) -> None:
    turn = parse(family, text, TOOLS)
    (bad,) = turn.malformed
    assert not turn.calls and not turn.content and bad.text == text
    assert bad.fault == fault and reason in bad.reason and len(bad.reason) < 200


def test_calls_around_a_malformed_one_are_kept_in_order() -> None:
    one, two = CALLS["qwen"], CALLS["qwen"].replace("1", "2")
    turn = parse("qwen", f"Well.\n{one}\n<tool_call>{{\n{two} and\n<tool_call>x", TOOLS)
    assert [call.arguments for call in turn.calls] == [{"by": 1}, {"by": 2}]
    assert [bad.fault for bad in turn.malformed] == ["unclosed", "unclosed"]
    assert [call in turn.calls for call in turn.attempts] == [True, False, True, False]
    assert (turn.content, turn.rest) == ("Well.", " and\n")


VALUES = [
    ("name", "5", "5"),
    ("name", '"x"', '"x"'),
    ("maybe", "null", None),
    ("maybe", "5", "5"),
    ("some", "5.5", 5.5),
    ("some", "true", True),
    ("some", "True", True),
    ("one_of", "a", "a"),
    ("one_of", "1", 1),
]


@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_a_schema_decides_what_an_untyped_text_is(key: str, text: str, value: Any) -> None:
    glm = f"<tool_call>grow<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
    coder = f"<tool_call><function=grow><parameter={key}>{text}</parameter></function></tool_call>"
    for family, call in (("glm", glm), ("qwen3_coder", coder)):
        (found,) = parse(family, call, TOOLS).calls
        assert found.arguments == {key: value} and type(found.arguments[key]) is type(value)


@pytest.mark.parametrize("key", ["free", "odd", "unknown"])
def test_without_a_type_glm_reads_json_and_qwen3_coder_text(key: str) -> None:
    for text, of_glm in (("[1]", [1]), ("x", "x"), ('"x"', '"x"'), ("True", "True")):
        glm = f"<tool_call>grow<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
        coder = f"<tool_call><function=grow><parameter={key}>{text}</parameter></function>"
        assert parse("glm", glm, TOOLS).calls[0].arguments == {key: of_glm}
        assert parse("qwen3_coder", coder + "</tool_call>", TOOLS).calls[0].arguments == {key: text}


def test_a_call_in_reasoning_is_text_and_malformed_only_if_the_reasoning_has_no_end() -> None:
    call = CALLS["qwen"]
    turn = parse("qwen", f"<think>\nMaybe {call}\n</think>\n\nNo.", TOOLS, "tagged")
    assert turn == ParsedTurn("No.", f"Maybe {call}")
    (bad,) = parse("qwen", f"Maybe {call}", TOOLS, "open").malformed
    assert bad.text == call and bad.reason == "the call is within reasoning that has no </think>"
    assert parse("qwen", "<think>\nMaybe", TOOLS, "tagged") == ParsedTurn("", "Maybe")
    assert parse("qwen", "<think> is a tag", TOOLS).content == "<think> is a tag"


def test_a_token_at_the_end_of_the_turn_is_dropped() -> None:
    for family, end in (
        ("qwen", "<|im_end|>"),
        ("glm", "<|observation|>"),
        ("llama3", "<|eom_id|>"),
    ):
        assert parse(family, f"Yes.{end}", TOOLS).content == "Yes."
        assert streamable(family, f"Yes.{end}").content == "Yes."
        assert streamable(family, f"Yes.{end[:4]}").content == "Yes."
    assert streamable("llama3", "{").content == streamable("llama3", ' {\n"name').content == ""
    assert streamable("llama3", '{"nice": ').content == '{"nice": '


def test_a_message_numbers_its_calls_unless_they_have_ids() -> None:
    turn = parse("qwen", CALLS["qwen"] * 2, TOOLS)
    message = assistant_message(turn)
    assert [call["id"] for call in message["tool_calls"]] == ["call_0", "call_1"]
    assert message["tool_calls"][0]["function"] == {"name": "grow", "arguments": '{"by": 1}'}
    assert "reasoning_content" not in message and message["content"] == ""
    again = assistant_message(turn, ["a", "b"])
    assert [call["id"] for call in again["tool_calls"]] == ["a", "b"]
    assert assistant_message(ParsedTurn("x", "y")) == {
        "role": "assistant",
        "content": "x",
        "reasoning_content": "y",
    }


def test_a_template_without_tool_calls_and_a_strange_family_are_refused() -> None:
    with pytest.raises(ValueError, match="writes no tool calls in a format that rlcore reads"):
        family_of("{{ messages[0].content }}<|eot_id|>")
    with pytest.raises(ValueError, match="tool calls 'gpt': must be one of qwen, "):
        parse("gpt", "", TOOLS)
    with pytest.raises(ValueError, match="has no name; give OpenAI's form of a function"):
        parse("qwen", "", [{"type": "function"}])
    assert reasoning_of("{{ x }}", "<think>") == "none"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_pieces_of_a_turn_are_its_calls_and_its_text(family: str) -> None:
    call, end = CALLS[family], FAMILIES[family].ends[0]
    opened = "" if family == "llama3" else "hello\n"
    text = f"{opened}{call}{end}"
    pieces = [(False, opened), (True, call), (False, end)]
    assert split_calls(family, text) == [piece for piece in pieces if piece[1]]
    hidden = f"<think>\n{call}\n</think>\n\n"
    assert split_calls(family, hidden + text, "tagged")[0] == (False, hidden + opened)
    assert split_calls(family, hidden[:-10], "tagged") == [(False, hidden[:-10])]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=8))
def test_the_pieces_of_any_text_lose_nothing(family: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    found = split_calls(family, text, "tagged")
    assert "".join(piece for _, piece in found) == text and all(piece for _, piece in found)
    attempts = parse(family, text, TOOLS, "tagged").attempts
    hidden = [a for a in attempts if isinstance(a, MalformedCall) and a.fault == "in_reasoning"]
    if any(is_call for is_call, _ in found):
        assert attempts or family.startswith("deepseek")  # a marker alone is no call
    else:
        assert len(attempts) == len(hidden)
