"""Which tokens of a row `rlcore sft` learns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.config.schema import DataConfig
from rlcore.data import conversations
from rlcore.hf.tokenizer import Tokenizer, load_tokenizer, make_char_tokenizer
from rlcore.utils.errors import ConfigError

CHARS = [chr(i) for i in range(32, 127)] + ["\n"]
THINKS = """{% for m in messages %}[{{ m.role[0] }}]{% if m.role == 'assistant' and not loop.last
%}{{ m.content.split('/')[-1] }}{% else %}{{ m.content }}{% endif %}<eos>
{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"""
"""As Qwen3's template: without the thoughts (before /) of all answers but the last."""
PLAIN = THINKS.replace(".split('/')[-1]", "")


def tokenizer(folder: Path, template: str = PLAIN) -> Tokenizer:
    make_char_tokenizer(folder, CHARS)
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]


def marked(row: Any, tokens: Tokenizer, **data: Any) -> list[str]:
    """The texts of a row's demonstrations; what is learned stands in braces."""
    texts = []
    for found in conversations.demonstrations(row, DataConfig(**data), tokens):
        assert found.prompt.dtype == found.response.dtype == np.int32 and len(found.prompt)
        assert found.learn[0] and found.learn[-1]
        text = tokens.decode(found.prompt, skip_special_tokens=False)
        for token, learn in zip(found.response.tolist(), found.learn, strict=True):
            piece = tokens.decode([token], skip_special_tokens=False)
            text += f"{{{piece}}}" if learn else piece
        texts.append(text.replace("}{", ""))
    return texts


def test_an_answer_is_learned_with_its_end_behind_the_engines_prompt(tmp_path: Path) -> None:
    row = {"question": "2+2?", "answer": 4}
    assert marked(row, tokenizer(tmp_path)) == ["[u]2+2?<eos>\n[a]{4<eos>}"]
    assert marked(row, tokenizer(tmp_path), system="Add.", suffix=" =") == [
        "[s]Add.<eos>\n[u]2+2? =<eos>\n[a]{4<eos>}"
    ]
    assert marked(row, tokenizer(tmp_path), template="none", suffix="=") == ["2+2?={4<eos>}"]


def test_every_message_of_the_assistant_is_learned_and_nothing_else(tmp_path: Path) -> None:
    row = {"messages": said("a", "b", "c", "d")}
    found = marked(row, tokenizer(tmp_path), prompt_field="messages", suffix="!")
    assert found == ["[u]a<eos>\n[a]{b<eos>}\n[u]c!<eos>\n[a]{d<eos>}"]


def test_a_template_that_rewrites_earlier_answers_gives_one_row_for_each(tmp_path: Path) -> None:
    row = {"messages": said("a", "hm/b", "c", "so/d")}
    found = marked(row, tokenizer(tmp_path, THINKS), prompt_field="messages")
    assert found == ["[u]a<eos>\n[a]{hm/b<eos>}", "[u]a<eos>\n[a]b<eos>\n[u]c<eos>\n[a]{so/d<eos>}"]


def test_an_answer_without_an_end_gets_one_which_stands_in_no_later_prompt(tmp_path: Path) -> None:
    tokens = tokenizer(tmp_path, PLAIN.replace("<eos>", "."))
    assert marked({"question": "a", "answer": "b"}, tokens) == ["[u]a.\n[a]{b.\n<eos>}"]
    found = marked({"messages": said("a", "b", "c", "d")}, tokens, prompt_field="messages")
    assert found == ["[u]a.\n[a]{b.\n<eos>}", "[u]a.\n[a]b.\n[u]c.\n[a]{d.\n<eos>}"]


def test_thoughts_and_calls_of_the_last_message_reach_the_template(tmp_path: Path) -> None:
    call = "{{ m.thought }}{{ m.content }}{% for c in m.tool_calls %}!{{ c.name }}{% endfor %}"
    template = PLAIN.replace("{{ m.content }}{% endif %}", call + "{% endif %}")
    last = {"role": "assistant", "content": None, "thought": "hm ", "tool_calls": [{"name": "f"}]}
    found = marked({"question": [*said("a"), last]}, tokenizer(tmp_path, template))
    assert found == ["[u]a<eos>\n[a]{hm !f<eos>}"]


def test_an_answer_is_cut_out_of_the_tokens_of_the_whole_text(tmp_path: Path) -> None:
    """As with SentencePiece, where a text alone begins with a space."""

    class Spaced:
        eos_ids = (0,)

        def encode(self, text: str) -> list[int]:
            return [1, *(ord(c) for c in text)]

    tokens = conversations._Tokens(Spaced())  # type: ignore[arg-type]
    tokens.add("", "ab", False)
    assert tokens.rest("ab", "abc") == [ord("c")]
    assert tokens.rest("ab", "xbc") == [1, ord("c")]


def test_a_list_of_messages_needs_a_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a list of messages needs --data.template chat"):
        marked({"question": said("a", "b")}, tokenizer(tmp_path), template="none")
    plain = marked(
        {"question": "a", "answer": "b"}, tokenizer(tmp_path), template="none", system="s"
    )
    assert plain == ["a{b<eos>}"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([1], "the row is a list"),
        ({"answer": "b"}, "no field 'question'"),
        ({"question": "a"}, "no field 'answer'"),
        ({"question": "a", "answer": " "}, "the answer is empty"),
        ({"question": "", "answer": "b"}, "field 'question' is empty"),
        ({"question": said("a", "b")[1:]}, "has only messages of the assistant"),
        ({"question": [*said("a"), {"role": "assistant"}]}, "the answer is empty"),
        ({"question": [*said("a"), {"role": "assistant", "content": 3}]}, "content as text"),
        ({"question": "\u00e9", "answer": "b"}, "cannot encode"),
    ],
)
def test_an_invalid_row_says_why(tmp_path: Path, row: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        marked(row, tokenizer(tmp_path))


def test_a_template_that_ignores_its_own_generation_prompt_is_refused(tmp_path: Path) -> None:
    tokens = tokenizer(tmp_path, PLAIN.replace("%}[a]{%", "%}[bot]{%"))
    with pytest.raises(ValueError, match="its own generation prompt"):
        marked({"question": "a", "answer": "b"}, tokens)


def test_a_file_leaves_out_bad_and_long_rows_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlcore.utils import log

    monkeypatch.setattr(log.log, "propagate", True)
    tokens, file = tokenizer(tmp_path), tmp_path / "rows.jsonl"
    rows = [{"question": "a" * n, "answer": "b"} for n in (1, 60, 2, 3)] + [{"question": "a"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(max_prompt_tokens=40)
    assert [len(row.prompt) for row in conversations.read(file, data, tokens)] == [9, 10, 11]
    assert "rows.jsonl:5: no field 'answer'; row skipped" in caplog.text
    assert "dropped 1 prompts longer than --data.max_prompt_tokens 40" in caplog.text
    assert len(conversations.read(file, data, tokens, 2)) == 2
    assert "ends an answer with" not in caplog.text
    other = tokenizer(tmp_path, PLAIN.replace("<eos>", "."))
    conversations.read(file, data, other)
    assert "ends an answer with '[u]a.\\n[a]b.\\n', which is no end" in caplog.text
    with pytest.raises(ConfigError, match="rows.jsonl:5: no field 'answer'; fix the row"):
        conversations.read(file, DataConfig(max_prompt_tokens=40, bad_rows="refuse"), tokens)


def test_the_same_conversation_is_read_once_and_another_answer_stays(tmp_path: Path) -> None:
    tokens, file = tokenizer(tmp_path), tmp_path / "rows.jsonl"
    rows = [{"question": "a", "answer": answer} for answer in "bcb"]
    file.write_text("\n".join(map(json.dumps, rows)))
    seen: set[bytes] = set()
    assert len(conversations.read(file, DataConfig(), tokens)) == 3
    assert len(conversations.read(file, DataConfig(), tokens, 0, seen)) == 2
    with pytest.raises(ConfigError, match="duplicate"):
        conversations.read(file, DataConfig(drop_duplicates=True), tokens, 0, seen)
