"""Messages with tool calls, as chat templates read them."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.hf.tokenizer import Tokenizer, load_tokenizer, make_char_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A template that reads arguments in every way that templates do."""
    folder = tmp_path_factory.mktemp("template")
    make_char_tokenizer(folder, "abc")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "{% set a = c.function.arguments %}{{ c.type }} {{ a | tojson }} {{ a }} "
        "{{ 'x' + a + 'y' }} {{ a is string }} {{ a.by }} {{ a._text }}"
        "{% for k, v in a | items %} {{ k }}={{ v }}{% endfor %}"
        "{{ a | tojson(indent=1) }}{% endfor %}{% else %}[{{ m.content }}]{% endif %}"
        "{{ 'tool_calls' in m }}{% endfor %}"
    )
    return load_tokenizer(folder)


def test_arguments_are_an_object_and_their_text_at_once(tokenizer: Tokenizer) -> None:
    for arguments in ('{"by":1.50}', {"by": 1.5}):
        call = {"name": "grow", "arguments": arguments}
        text = tokenizer.render_chat([{"role": "assistant", "tool_calls": [call]}])
        shown = arguments if isinstance(arguments, str) else '{"by": 1.5}'
        assert text == f'function {shown} {shown} x{shown}y False 1.5  by=1.5{{\n "by": 1.5\n}}True'


def test_parts_of_text_become_one_text_and_empty_calls_no_calls(tokenizer: Tokenizer) -> None:
    parts_of_text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "tool", "content": parts_of_text, "tool_calls": []}]
    assert tokenizer.render_chat(chat) == "[ab]False"
    picture = [{"type": "image"}]
    assert "image" in tokenizer.render_chat([{"role": "user", "content": picture}])


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ("x", "tool_calls 'x': must be a list of calls"),
        ([{"function": {}}], "has no name; give OpenAI's form of a call"),
        ([5], "has no name; give OpenAI's form of a call"),
        ([{"name": "f", "arguments": "{"}], "tool call of f: the arguments are not JSON"),
        ([{"name": "f", "arguments": [1]}], "tool call of f: the arguments are not a JSON object"),
        ([{"name": "f", "arguments": {"a": {1}}}], "tool call of f: the arguments are not JSON"),
    ],
)
def test_a_call_that_no_template_can_use_is_refused(
    tokenizer: Tokenizer, calls: Any, why: str
) -> None:
    good = [{"role": "user", "content": "a"}]
    bad = [{"role": "assistant", "content": "", "tool_calls": calls}]
    first, second, third = tokenizer.render_chats([good, bad, good])
    assert first == third == "[a]False"
    assert isinstance(second, ValueError) and why in str(second)


def test_tools_that_a_template_does_not_show_are_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for other in (tokenizer, make_char_tokenizer(tmp_path, "abc")):
        with pytest.raises(ValueError, match="the chat template does not show tools to the model"):
            other.render_chat([{"role": "user", "content": "a"}], tools=[{"name": "f"}])
