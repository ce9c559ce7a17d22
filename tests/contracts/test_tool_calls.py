"""Tool calls against SGLang's parsers and against the chat templates of the models.

`tool_calls.json` has texts and what SGLang makes of them; `record_tool_calls.py` writes it.
"""

import importlib.util
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.envs.dialogue import Dialogue, replies
from rlcore.hf.messages import split_messages
from rlcore.hf.tokenizer import Tokenizer, load_tokenizer, make_char_tokenizer
from rlcore.hf.tool_calls import (
    Reasoning,
    assistant_message,
    family_of,
    parse,
    reasoning_of,
    streamable,
)
from tests.contracts import record_tool_calls as texts
from tests.kit import ROOT

RECORD = json.loads(texts.FILE.read_text())
TOOLS = texts.TOOLS
TEMPLATES = Path(__file__).with_name("templates")

MALFORMED = "SGLang makes a call of it; here the model is told what is wrong"
KEPT = "SGLang shows the call as content, or drops it; here the model is told what is wrong"
DIFFERS = {
    ("qwen", "reasoning without end before a call"): MALFORMED,
    ("qwen", "arguments are text"): MALFORMED,
    ("qwen", "arguments are a list"): MALFORMED,
    ("qwen", "list of calls"): MALFORMED,
    ("qwen", "nan"): MALFORMED,
    ("qwen", "on one line"): "SGLang wants a newline after the tag; a call is one without it too",
    ("qwen3_coder", "tags in a string"): "SGLang ends the call at a tag within a string",
    ("qwen3_coder", "null for text"): "SGLang turns the string null into None",
    ("qwen3_coder", "text for an integer"): MALFORMED,
    ("qwen3_coder", "unknown tool"): MALFORMED,
    ("qwen3_coder", "no closing tag"): MALFORMED,
    ("qwen3_coder", "parameter without end"): MALFORMED,
    ("llama3", "answer in json"): "SGLang drops an answer that is JSON; it is content",
    ("llama3", "answer with a name"): "SGLang drops an answer that is JSON; it is content",
    ("llama3", "text after"): "SGLang appends text after calls to the content; it is the rest",
    ("llama3", "cut"): KEPT,
    ("llama3", "dict of Python"): MALFORMED,
    ("llama3", "program"): KEPT,
    ("glm", "reasoning"): "SGLang keeps <think> after a newline in the reasoning",
    ("glm", "empty reasoning"): "SGLang keeps <think> after a newline in the reasoning",
    ("glm", "text that is json"): "SGLang rewrites a string that looks like a number",
    ("glm", "text that is true"): "SGLang rewrites a string that looks like a boolean",
    ("glm", "null or text"): "SGLang turns null into a string",
    ("glm", "tags in a string"): "SGLang ends the call at a tag within a string",
    ("glm", "text for an integer"): MALFORMED,
    ("glm", "value without end"): MALFORMED,
    ("deepseek", "invalid json"): KEPT,
    ("deepseek", "arguments are a list"): MALFORMED,
    ("deepseek", "no block"): KEPT,
    ("deepseek_v31", "invalid json"): KEPT,
}
"""Recorded texts that SGLang reads differently, and why."""

CASES = [pytest.param(case, id=f"{case['family']}: {case['name']}") for case in RECORD["cases"]]


def thinks(family: str) -> Reasoning:
    return "none" if family == "llama3" else "tagged"


def test_the_record_is_of_the_pinned_sglang_and_of_these_texts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"sglang=={RECORD['sglang']}" in project["optional-dependencies"]["sglang"]
    recorded = {(case["family"], case["name"]): case["text"] for case in RECORD["cases"]}
    assert recorded == {
        (family, name): text for family, of in texts.TEXTS.items() for name, text in of.items()
    }
    assert RECORD["tools"] == TOOLS and DIFFERS.keys() <= recorded.keys()


@pytest.mark.ranks(1)
@pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="needs SGLang: bash tools/setup.sh --sglang",
)
def test_sglang_reads_the_texts_as_recorded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.contracts.record_tool_calls", tmp_path / "now.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "now.json").read_text()) == RECORD


@pytest.mark.parametrize("case", CASES)
def test_a_text_is_read_as_by_sglang_or_differs_by_name(case: dict[str, Any]) -> None:
    found = parse(case["family"], case["text"], TOOLS, thinks(case["family"]))
    theirs = case["sglang"]
    equal = (
        (found.reasoning or "").strip() == (theirs["reasoning"] or "").strip()
        and found.content.strip() == theirs["content"].strip()
        and [(call.name, dict(call.arguments)) for call in found.calls]
        == [(call["name"], json.loads(call["arguments"])) for call in theirs["calls"]]
    )
    why = DIFFERS.get((case["family"], case["name"]), "")
    assert equal == (not why)
    if why in (MALFORMED, KEPT):
        assert found.malformed


@pytest.mark.parametrize("case", CASES)
def test_streamed_reasoning_and_content_are_a_beginning_of_the_final_ones(
    case: dict[str, Any],
) -> None:
    text, family = case["text"], case["family"]
    final = parse(family, text, TOOLS, thinks(family))
    sent = ["", ""]
    for end in range(len(text) + 1):
        for i, new in enumerate(streamable(family, text[:end], thinks(family))):
            assert new.startswith(sent[i])  # nothing that was sent is taken back
            sent[i] = new
    assert (final.reasoning or "").startswith(sent[0]) and final.content.startswith(sent[1])
    if final.calls and "<tool_call>" in text:
        assert sent == [final.reasoning or "", final.content]  # nothing waits for the calls


class Model(NamedTuple):
    """A chat template, and what it writes around a turn."""

    template: str
    family: str
    opening: str
    closing: str
    thinks: bool = False

    @property
    def many_calls(self) -> bool:
        return self.family != "llama3"

    @property
    def shows_content(self) -> bool:
        """Whether the template shows content beside a call."""
        return self.family != "llama3"


CHATML = "<|im_start|>assistant\n", "<|im_end|>\n"
END = texts.wide("end of sentence")
MODELS = [
    Model("qwen2_5", "qwen", *CHATML),
    Model("qwen3", "qwen", *CHATML, thinks=True),
    Model("qwen3_5_think", "qwen3_coder", *CHATML, thinks=True),
    Model("glm4moe", "glm", "<|assistant|>", "", thinks=True),
    Model("deepseekv3", "deepseek", texts.wide("Assistant"), END),
    Model("deepseek_v31_stand_in", "deepseek_v31", texts.wide("Assistant") + "</think>", END),
    Model(
        "llama3_stand_in",
        "llama3",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
]
every_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.template)
USER = {"role": "user", "content": "How is it?"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Model], Tokenizer]:
    """Tokenizers with the templates; each has a child process, so they are made once."""
    made: dict[str, Tokenizer] = {}

    def of(model: Model) -> Tokenizer:
        if model.template not in made:
            folder = tmp_path_factory.mktemp(model.template)
            make_char_tokenizer(folder, "abc")
            source = (TEMPLATES / f"{model.template}.jinja").read_text()
            (folder / "chat_template.jinja").write_text(source)
            made[model.template] = load_tokenizer(folder)
        return made[model.template]

    return of


def turn_of(model: Model, tokenizer: Tokenizer, message: dict[str, Any]) -> str:
    """Render a turn of the assistant and return what the model would have sampled."""
    before = tokenizer.render_chat([USER], add_generation_prompt=False)
    text = tokenizer.render_chat([USER, message], add_generation_prompt=False)
    assert text.startswith(before + model.opening) and text.endswith(model.closing)
    return text[len(before + model.opening) : len(text) - len(model.closing)]


THOUGHTS = {
    "qwen": "<think>\nA.\n\nB.\n</think>\n\n",
    "qwen3_coder": "<think>\nA.\n\nB.\n</think>\n\n",
    "glm": "\n<think>A.\n\nB.</think>",
}
NAMES = ["one", "one with content", "two", "nested", "escapes", "lines", "boolean of Python"]
RAW = '{"city":"\\u4eac\\/" ,  "share" : 1.50, "days":1000000000000000000000, "where":{ }}'
SPACED = {  # JSON that no library would write so
    "qwen": [texts.qwen(f'{{"name": "weather", "arguments": {RAW}}}')],
    "llama3": [f'{{"name": "weather", "parameters": {RAW}}}'],
    "deepseek": [texts.deepseek(texts.v3("weather", RAW))],
    "deepseek_v31": [texts.deepseek(texts.v31("weather", RAW))],
}


@every_model
def test_a_sampled_text_is_rendered_again_to_the_last_character(
    model: Model, tokenizer: Callable[[Model], Tokenizer]
) -> None:
    of_family = texts.TEXTS[model.family]
    names = [name for name in NAMES if name in of_family and (name != "two" or model.many_calls)]
    for text in [*(of_family[name] for name in names), *SPACED.get(model.family, ())]:
        text = THOUGHTS[model.family] + text if model.thinks else text
        found = parse(model.family, text, TOOLS, "tagged" if model.thinks else "none")
        assert found.calls and not found.malformed and not found.rest
        assert turn_of(model, tokenizer(model), assistant_message(found)) == text


HARD = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "{",
            "}",
            '"',
            "\\",
            "\n",
            "```",
            ";",
        ]
        + ["<|python_tag|>", texts.wide("tool call end"), "<|im_end|>", "\u6771", "\U0001f600"]
        + ["null", "5", "'", " ", "\t", "<arg_key>", "<parameter=a>", "\x7f", "\u2028"]
    )
    | st.text(max_size=5),
    max_size=5,
).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HARD, inner, max_size=3),
    max_leaves=8,
)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "string": HARD,
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(JSON | HARD, max_size=3),
    "object": st.dictionaries(HARD, JSON | HARD, max_size=3),
}
NAME = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
CONTENT = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"])).map(str.strip)


@st.composite
def tools_and_calls(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[tuple[str, Any]]]:
    """Draw tools with typed parameters, and calls with arguments of those types."""
    tools, calls = [], []
    for name in draw(st.lists(NAME, min_size=1, max_size=3, unique=True)):
        kinds = draw(st.dictionaries(NAME, st.sampled_from(sorted(KINDS)), max_size=4))
        properties = {key: {"type": kind} for key, kind in kinds.items()}
        schema = {"type": "object", "properties": properties}
        tools.append({"type": "function", "function": {"name": name, "parameters": schema}})
        calls.append((name, {key: draw(KINDS[kind]) for key, kind in kinds.items()}))
    return tools, calls


@every_model
@settings(max_examples=60)
@given(drawn=tools_and_calls(), content=CONTENT, thought=CONTENT, as_text=st.booleans())
def test_a_rendered_call_is_read_again(
    model: Model,
    tokenizer: Callable[[Model], Tokenizer],
    drawn: tuple[list[dict[str, Any]], list[tuple[str, Any]]],
    content: str,
    thought: str,
    as_text: bool,
) -> None:
    tools, calls = drawn
    calls = calls if model.many_calls else calls[:1]
    message: dict[str, Any] = {"role": "assistant", "content": content * model.shows_content}
    if model.thinks:
        message["reasoning_content"] = thought
    message["tool_calls"] = [
        {"type": "function", "function": {"name": n, "arguments": json.dumps(a) if as_text else a}}
        for n, a in calls
    ]
    text = turn_of(model, tokenizer(model), message)
    found = parse(model.family, text, tools, "tagged" if model.thinks else "none")
    assert [(call.name, call.arguments) for call in found.calls] == calls
    assert not found.malformed and not found.rest
    assert found.content == message["content"]
    if model.thinks:
        assert found.reasoning == thought
    again = assistant_message(found)
    assert turn_of(model, tokenizer(model), again) == text


@every_model
def test_a_template_names_its_family(model: Model) -> None:
    source = (TEMPLATES / f"{model.template}.jinja").read_text()
    assert family_of(source) == model.family


@every_model
def test_tools_and_their_results_reach_the_prompt(
    model: Model, tokenizer: Callable[[Model], Tokenizer]
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    chat = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Noon."}]},
    ]
    assert "Noon." in tokenizer(model).render_chat(chat)
    if model.family.startswith("deepseek"):
        with pytest.raises(ValueError, match="the chat template does not show tools to the model"):
            tokenizer(model).render_chat(chat, tools=TOOLS)
    else:
        text = tokenizer(model).render_chat(chat, tools=TOOLS)
        assert "Weather of a city." in text and "None" not in text


class Letters:
    """A tokenizer with the letters of a text as tokens, so that every template can be encoded."""

    def __init__(self, inner: Tokenizer) -> None:
        self.defused, self.render_chat = inner.defused, inner.render_chat

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


@every_model
def test_results_are_appended_as_the_template_writes_them(
    model: Model, tokenizer: Callable[[Model], Tokenizer]
) -> None:
    calls = texts.TEXTS[model.family]["two" if model.many_calls else "one"]
    text = THOUGHTS[model.family] + calls if model.thinks else calls
    turn = parse(model.family, text, TOOLS, "tagged" if model.thinks else "none")
    results = ["Noon.", "Rain."][: len(turn.calls)]
    chat = [USER, assistant_message(turn), *({"role": "tool", "content": r} for r in results)]
    shown = Dialogue(Letters(tokenizer(model)), is_chat=True).tool_results(results, last=0)
    added = "".join(map(chr, shown))
    assert tokenizer(model).render_chat(chat).endswith(text + added) and results[-1] in added


def test_a_malformed_call_is_answered_with_its_reason() -> None:
    turn = parse("qwen", texts.TEXTS["qwen"]["unknown tool"], TOOLS)
    assert replies(turn, ["Noon."]) == [
        "error: there is no tool fly; the tools are: weather, now",
        "Noon.",
    ]
    with pytest.raises(ValueError, match="2 results for 1 calls: give one for each"):
        replies(turn, ["Noon.", "Rain."])


def test_reasoning_is_open_where_the_prompt_begins_it(
    tokenizer: Callable[[Model], Tokenizer],
) -> None:
    def found(name: str, **variables: Any) -> tuple[Reasoning, str]:
        (model,) = (model for model in MODELS if model.template == name)
        source = (TEMPLATES / f"{name}.jinja").read_text()
        prompt = tokenizer(model).render_chat([USER], **variables)
        return reasoning_of(source, prompt), prompt

    assert found("qwen2_5")[0] == "none"
    assert found("qwen3")[0] == "tagged"
    assert found("deepseekv3")[0] == "open"
    kind, prompt = found("qwen3_5_think")
    text = "A.\n\nB.\n</think>\n\nI look.\n\n" + texts.coder("now")
    turn = parse("qwen3_coder", text + "<|im_end|>", TOOLS, kind)
    assert (kind, turn.reasoning, turn.content) == ("open", "A.\n\nB.", "I look.")
    (model,) = (model for model in MODELS if model.template == "qwen3_5_think")
    again = [USER, assistant_message(turn)]
    assert tokenizer(model).render_chat(again, add_generation_prompt=False) == (
        prompt + text + "<|im_end|>\n"
    )


@every_model
def test_a_rendered_conversation_is_split_into_its_roles(
    model: Model, tokenizer: Callable[[Model], Tokenizer]
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    chat = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Wait."},
        {"role": "user", "content": "Now?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Noon."},
        {"role": "user", "content": "Thanks."},
    ]
    found = split_messages(tokenizer(model).render_chat(chat))
    role_of = {}
    for role, text in found:
        assert "<|im" not in text and "_id|>" not in text and END not in text
        role_of |= {m["content"]: role for m in chat if m["content"] and m["content"] in text}
    wanted = {m["content"]: m["role"] for m in chat if m["content"]}
    if model.family.startswith("deepseek"):  # its system prompt has no header, or is not shown
        assert wanted.pop("Be brief.") and not role_of.pop("Be brief.", "")
    assert role_of == wanted
    assert all(text for _, text in found)
