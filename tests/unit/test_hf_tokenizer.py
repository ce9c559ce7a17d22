"""Tokenizers and chat templates, compared with transformers' own."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlcore.hf.tokenizer import Tokenizer, load_tokenizer, make_char_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CHARS = "0123456789+=;>abc"
TEXTS = [
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n\nHow many?",
    "  two  spaces, tabs\t\tand\r\nlines ",
    "Zürich, 東京, naïve, 🙂 1234567",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
# Uses what real templates use: globals of the environment, special tokens, loop controls, tojson.
TEMPLATE = """\
{%- if messages[0].role == 'tool' %}{{ raise_exception('no tool may begin') }}{% endif %}
{% for m in messages %}
{% if m.role == 'system' %}{% continue %}{% endif %}
[{{ m.role }}] {{ m.content | tojson }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}{% generation %}[assistant]{% endgeneration %}{% endif %}"""


@pytest.fixture
def qwen_folder(real_data: Path) -> Path:
    return real_data / "tokenizer_qwen"


def test_the_qwen_tokenizer_gives_the_ids_of_transformers(qwen_folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(qwen_folder), AutoTokenizer.from_pretrained(qwen_folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ours.encode(TEXTS[2])) == TEXTS[2]
    assert ours.eos_ids == (151645,)


def test_special_tokens_and_ids_outside_the_vocabulary_are_left_out(qwen_folder: Path) -> None:
    tokenizer = load_tokenizer(qwen_folder)
    ids = np.array([*tokenizer.encode("fine"), 151645, 151700, 151935], dtype=np.int32)
    assert tokenizer.decode(ids) == "fine"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "fine<|im_end|>"


def test_the_pieces_of_a_text_are_what_each_token_adds(qwen_folder: Path) -> None:
    tokenizer = load_tokenizer(qwen_folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        pieces = tokenizer.pieces(ids)
        assert len(pieces) == len(ids) and "".join(pieces) == text
    smile = tokenizer.encode("a\U0001fae0b")
    assert len(smile) > 3  # the character is several tokens
    assert [p for p in tokenizer.pieces(smile) if p] == ["a", "\U0001fae0", "b"]
    broken = smile[1:2] * 12  # bytes that make no character
    assert "".join(tokenizer.pieces([*broken, 151645])).endswith("<|im_end|>")


def test_a_tokenizer_without_a_template_says_so_once_and_uses_chatml(
    qwen_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("rlcore"), "propagate", True)
    caplog.set_level(logging.INFO, "rlcore")
    tokenizer = load_tokenizer(qwen_folder)
    assert not tokenizer.has_chat_template
    for _ in range(2):
        assert tokenizer.render_chat(MESSAGES) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
    assert [record.message for record in caplog.records] == [
        f"chat template: tokenizer {qwen_folder} has none, using ChatML"
    ]


def with_template(folder: Path, template: object, file: bool = False) -> Tokenizer:
    make_char_tokenizer(folder, CHARS)
    if file:
        (folder / "chat_template.jinja").write_text(str(template))
    else:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


@pytest.mark.parametrize("file", [True, False])
def test_a_template_renders_as_in_transformers(tmp_path: Path, file: bool) -> None:
    from transformers import AutoTokenizer

    ours = with_template(tmp_path, TEMPLATE, file)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for prompt in (True, False):
        expect = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
        assert ours.render_chat(MESSAGES, add_generation_prompt=prompt) == expect
    assert '[user] "1+1?"<eos>' in expect


def test_the_default_of_several_named_templates_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ x }} yes"}]
    assert with_template(tmp_path, named).render_chat(MESSAGES, x=3) == "3 yes"


def test_a_template_that_refuses_is_quoted(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TEMPLATE)
    with pytest.raises(ValueError, match="chat template: no tool may begin"):
        tokenizer.render_chat([{"role": "tool", "content": ""}])


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="access to attribute '__class__'"):
        with_template(tmp_path, escape).render_chat(MESSAGES)


def test_a_char_tokenizer_has_one_token_per_character(tmp_path: Path) -> None:
    tokenizer = make_char_tokenizer(tmp_path, CHARS)
    ids = tokenizer.encode("a7+5=")
    assert ids == [2 + CHARS.index(char) for char in "a7+5="]
    assert tokenizer.decode([*ids, 1, 0]) == "a7+5="
    assert tokenizer.decode_batch([ids, [1], ids[:2]]) == ["a7+5=", "", "a7"]
    assert tokenizer.eos_ids == (1,)
    for text in ("a7\n", "A"):
        with pytest.raises(ValueError, match="cannot encode .*use another tokenizer"):
            tokenizer.encode(text)


def test_transformers_loads_a_char_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = make_char_tokenizer(tmp_path, CHARS), AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("a7+5=").input_ids == ours.encode("a7+5=")
    assert (theirs.pad_token_id, theirs.eos_token_id, len(theirs)) == (0, 1, 19)


def test_ends_of_a_response_come_from_every_file(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path, CHARS)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 1]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 6}')
    assert load_tokenizer(tmp_path, eos_ids=[7, 5]).eos_ids == (1, 5, 6, 7)


def test_tokens_that_only_the_settings_name_are_added(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path, CHARS)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {"19": {"content": "<think>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a<think>7")[1] == 19
    assert tokenizer.decode(tokenizer.encode("a<think>7")) == "a7"


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gone: no such folder"):
        load_tokenizer(tmp_path / "gone")
    with pytest.raises(ValueError, match="no tokenizer.json in it"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json: not a tokenizer"):
        load_tokenizer(tmp_path)


def test_neither_torch_nor_transformers_is_imported_for_a_tokenizer(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path, CHARS)
    code = (
        "import sys; from rlcore.hf.tokenizer import load_tokenizer as f;"
        f"f({str(tmp_path)!r}).render_chat([dict(role='user', content='1')]);"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=60)
    assert out.stdout.decode().strip() == "[]", out.stderr.decode()
