"""Prompt files: templates, junk rows, long rows, real data."""

import dataclasses
import json
import logging
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlcore.cli.builders.prompts import load_data
from rlcore.cli.settings import parse
from rlcore.config.schema import DataConfig
from rlcore.data import label_task
from rlcore.data.prompts import load, overlap
from rlcore.records import Sampling

DATA = Path(os.environ.get("RLCORE_DATA", Path(__file__).parents[3] / "shared" / "data"))
real = pytest.mark.skipif(not DATA.exists(), reason="no real data: set RLCORE_DATA")


class Bytes:
    """A tokenizer of UTF-8 bytes with a template that is easy to read."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens.tolist()).decode()

    def render_chat(self, messages):
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"

    def render_chats(self, chats):
        return list(map(self.render_chat, chats))

    def min_tokens(self, text):
        return 0


TOKENIZER = Bytes()


@pytest.fixture
def write(tmp_path):
    def make(name, *rows):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows]
        path.write_bytes(b"\n".join(lines) + b"\n")
        return str(path)

    return make


def _train(*files, **keys):
    return load(DataConfig(train=files, **keys), "train", TOKENIZER, 0)


BOXED = " Put the final answer within \\boxed{}."


@pytest.mark.parametrize(
    ("asked", "suffix", "is_added"),
    [
        ("2 + 3?", BOXED, True),
        ("2 + 3?\nReason step by step, and put your final answer within \\boxed{}.", BOXED, False),
        ('2 + 3?\nLet\'s think and output the final answer after "####".', BOXED, False),
        ("The last line should be of the form Answer: $Answer (without quotes).\n2?", BOXED, False),
        ("2 + 3? Return the result in <answer> </answer> tags.", BOXED, False),
        (
            [
                {"role": "system", "content": "Answer in $\\boxed{x}$."},
                {"role": "user", "content": "2?"},
            ],
            BOXED,
            False,
        ),
        ("Let $\\boxed{N}$ be the number of divisors of N.", BOXED, True),  # the question's own
        ("4x = 12 - \\boxed{\\phantom{2}}? The answer: one number.", BOXED, True),
        ("2 + 3? Answer in \\boxed{}.", " Think first.", True),
        ("2 + 3?", "", True),
    ],
)
def test_no_prompt_asks_twice_how_to_mark_the_answer(write, caplog, asked, suffix, is_added):
    caplog.set_level(logging.INFO)
    rows = _train(write("a.jsonl", {"question": asked, "answer": "5"}), suffix=suffix)
    text = asked if isinstance(asked, str) else asked[-1]["content"]
    assert rows[0].text == text + suffix * is_added
    assert ("1 prompts say themselves how to mark" in caplog.text) == (not is_added)


def _row(question, answer="1", **more):
    return {"question": question, "answer": answer, **more}


def test_a_row_becomes_a_prompt_with_its_template_answer_and_other_columns(write):
    file = write("math.jsonl", _row("How many?", 7, level="easy", tags=[1, 2]))
    (prompt,) = _train(file)
    assert TOKENIZER.decode(prompt.tokens) == "[user]How many?[assistant]"
    assert prompt.tokens.dtype == "int32"
    assert (prompt.index, prompt.dataset, prompt.answer) == (0, "math", "7")
    assert prompt.text == "How many?"
    assert prompt.fields == {"level": "easy", "tags": [1, 2]}


def test_system_suffix_and_template_settings(write):
    file = write("math.jsonl", _row("How many?"))
    (prompt,) = _train(file, system="Be brief.", suffix=" Box it.")
    rendered = "[system]Be brief.[user]How many? Box it.[assistant]"
    assert TOKENIZER.decode(prompt.tokens) == rendered
    assert prompt.text == "How many? Box it."
    (prompt,) = _train(file, template="none", suffix="!")
    assert TOKENIZER.decode(prompt.tokens) == "How many?!"


def test_a_list_of_messages_is_a_chat(write):
    asked = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "C"},
    ]
    file = write("chat.jsonl", {"prompt": asked, "gold": 2.5})
    keys = {"prompt_field": "prompt", "answer_field": "gold", "system": "ignored", "suffix": "!"}
    (prompt,) = _train(file, **keys)
    rendered = "[system]S[user]A[assistant]B[user]C![assistant]"
    assert TOKENIZER.decode(prompt.tokens) == rendered
    assert (prompt.text, prompt.answer) == ("A\n\nB\n\nC!", "2.5")
    with pytest.raises(ValueError, match="a list of messages needs --data.template chat"):
        _train(file, template="none", **keys)


def _chat(*turns):
    return [{"role": role, "content": text} for role, text in turns]


def test_the_messages_of_the_assistant_at_the_end_are_not_part_of_the_prompt(write):
    turns = [("user", "A"), ("assistant", "B"), ("user", "C")]
    ends = [(), (("assistant", "D"),), (("assistant", "x"), ("assistant", "D"))]
    file = write("chat.jsonl", *[{"messages": _chat(*turns, *end), "gold": "1"} for end in ends])
    rows = _train(file, prompt_field="messages", answer_field="gold", suffix="!")
    assert [TOKENIZER.decode(row.tokens) for row in rows] == [
        "[user]A[assistant]B[user]C![assistant]"
    ] * 3
    assert {(row.text, row.answer) for row in rows} == {("A\n\nB\n\nC!", "1")}


def test_the_last_message_of_the_assistant_can_be_the_answer(write, caplog):
    chats = [
        _chat(("user", "A"), ("assistant", "x"), ("assistant", "B")),
        _chat(("user", "A")),
        "A",
        _chat(("assistant", "B")),
        _chat(("user", "A"), ("assistant", None)),
    ]
    file = write("chat.jsonl", *[{"messages": chat} for chat in chats])
    (row,) = _train(file, prompt_field="messages", answer_field="messages")
    assert (row.text, row.answer, row.fields) == ("A", "B", {})
    for line, reason in (
        (2, "field 'messages' does not end with the assistant's message, its answer"),
        (3, "field 'messages' does not end with the assistant's message, its answer"),
        (4, "field 'messages' has only messages of the assistant"),
        (5, "field 'content' is null"),
    ):
        assert f"{file}:{line}: {reason}; row skipped" in caplog.messages


JUNK = [
    (b"{broken", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    ([1, 2], "the row is a list, not a JSON object"),
    ({"answer": "1"}, "no field 'question'"),
    (_row(None), "field 'question' is null"),
    ({"question": "a"}, "no field 'answer'"),
    (_row("  "), "field 'question' is empty"),
    (_row(3), "field 'question' is neither text nor a list of messages"),
    (_row([]), "field 'question' is neither text nor a list of messages"),
    (_row([{"role": "user"}]), "a message lacks role or content as text"),
    (_row("a", ["1"]), "field 'answer' is a list, not text or a number"),
    (b'{"question": "\\ud800", "answer": "1"}', "codec can't encode"),
    (_row("a", id=2**70), "holds a value that cannot be sent"),
]


@pytest.mark.parametrize(("junk", "reason"), JUNK, ids=range(len(JUNK)))
def test_a_junk_row_is_named_by_line_skipped_or_refused(write, caplog, junk, reason):
    file = write("x.jsonl", _row("one"), b"", junk, _row("two"))
    with caplog.at_level(logging.INFO, logger="rlcore"):
        rows = _train(file)
    assert [(r.text, r.index) for r in rows] == [("one", 0), ("two", 1)]
    said = [m for m in caplog.messages if m.startswith(f"{file}:3: ")]
    assert len(said) == 1 and reason in said[0]
    assert f"{file}: 2 prompts" in caplog.messages
    with pytest.raises(ValueError, match=r"x.jsonl:3: .*; fix the row, or skip"):
        _train(file, bad_rows="refuse")


def test_much_junk_is_counted_not_listed(write, caplog):
    file = write("x.jsonl", *[b"junk"] * 30, _row("one"))
    assert len(_train(file)) == 1
    assert len([m for m in caplog.messages if "row skipped" in m]) == 5
    assert f"{file}: skipped 30 bad rows in total" in caplog.messages


def test_a_file_without_a_usable_row_says_which_fields_it_has(write):
    file = write("x.jsonl", *[{"problem": "a", "solution": "b"}] * 3)
    sentence = "3 of 3: no field 'question'. The fields of the rows are problem, solution; set"
    with pytest.raises(ValueError, match=sentence):
        _train(file)
    with pytest.raises(ValueError, match="has no rows"):
        _train(write("empty.jsonl"))


def test_long_prompts_are_left_out_with_a_report(write, caplog):
    file = write("x.jsonl", _row("a" * 50), _row("short"), _row("b" * 70))
    rows = _train(file, template="none", max_prompt_tokens=10)
    assert [(r.text, r.index) for r in rows] == [("short", 0)]
    assert (
        f"{file}: dropped 2 prompts longer than --data.max_prompt_tokens 10; the longest has 70 "
        f"tokens ({file}:3)"
    ) in caplog.messages
    with pytest.raises(ValueError, match="every prompt is longer than --data.max_prompt_tokens 3"):
        _train(file, template="none", max_prompt_tokens=3)


def test_several_files_are_one_training_set_and_each_keeps_its_name(write):
    one = write("a/train.jsonl", _row("1"), _row("2"))
    two = write("b/train.jsonl", _row("3"), _row("4"))
    rows = _train(one, two)
    assert [(r.index, r.dataset, r.text) for r in rows] == [
        (0, "a/train", "1"),
        (1, "a/train", "2"),
        (2, "b/train", "3"),
        (3, "b/train", "4"),
    ]
    assert [r.text for r in _train(one, two, num_prompts=1)] == ["1", "3"]
    sets = load(DataConfig(val=(one, two), num_val_prompts=1), "val", TOKENIZER, 0)
    assert [(name, [r.text for r in rows]) for name, rows in sets] == [
        ("a/train", ["1"]),
        ("b/train", ["3"]),
    ]


def test_duplicates_are_left_out_over_all_files(write, caplog):
    one = write("a.jsonl", _row("One, two?"), _row("one two"), _row("x" * 70), _row("three"))
    two = write("b.jsonl", _row("ONE TWO!"), _row("four"), _row("four?"), _row("five"))
    keys = {"template": "none", "max_prompt_tokens": 10, "drop_duplicates": True}
    with caplog.at_level(logging.INFO, logger="rlcore"):
        rows = _train(one, two, **keys)
    assert [row.text for row in rows] == ["One, two?", "three", "four", "five"]
    assert f"{one}: 2 prompts, 1 duplicates left out" in caplog.messages
    assert f"{two}: 2 prompts, 2 duplicates left out" in caplog.messages
    rows = _train(one, two, num_prompts=2, **keys)
    assert [row.text for row in rows] == ["One, two?", "three", "four", "five"]
    assert len(_train(one, two)) == 8
    ((_, val),) = load(DataConfig(val=(one,), **keys), "val", TOKENIZER, 0)
    assert len(val) == 3, "validation data is as it is"
    with pytest.raises(ValueError, match=r"c.jsonl: every prompt is one of an earlier row; leave"):
        _train(one, write("c.jsonl", _row("three!")), **keys)


def test_weights_mix_the_files_and_a_task_has_none(write):
    one = write("a.jsonl", b"junk", _row("a"))
    two = write("b.jsonl", _row("b"), _row("c"), _row("d"))
    words = ["--model.path", "m", "--data.no_shuffle", "--data.train", one, two]

    def order(*more):
        found = load_data(parse([*words, *more]), TOKENIZER, eval_sets=[])
        work = found.source.issue(8, Sampling())
        return "".join(todo.prompt.text for todo in work), found.order.state()["num_rows"]

    assert order() == ("abcdabcd", 4)
    assert order("--data.weights", "1", "3") == ("bcadbcad", 4)
    with pytest.raises(ValueError, match=r"--data.weights 2: has no effect on the generated task"):
        _train("label", weights=(2.0,))


@pytest.mark.parametrize("template", ["chat", "none"])
def test_a_training_row_may_have_a_prompt_for_the_teacher(write, caplog, template):
    """Validation rows need none."""
    keys = {"teacher_prompt_field": "shown", "suffix": " Say it.", "template": template}
    file = write("x.jsonl", _row("How many?", shown="How many? It is 7."), _row("no", shown=None))
    (prompt,) = _train(file, **keys)
    begin, end = ("[user]", "[assistant]") if template == "chat" else ("", "")
    assert TOKENIZER.decode(prompt.tokens) == f"{begin}How many? Say it.{end}"
    assert TOKENIZER.decode(prompt.teacher_tokens) == f"{begin}How many? It is 7. Say it.{end}"
    assert prompt.fields == {}
    assert "field 'shown' is null; row skipped" in caplog.text
    ((_, rows),) = load(DataConfig(val=(file,), **keys), "val", TOKENIZER, 0)
    assert len(rows) == 2 and rows[0].teacher_tokens is None
    with pytest.raises(ValueError, match="teacher_prompt_field shown: the generated task label"):
        _train("label", **keys)


def test_parquet_rows_are_as_jsonl_rows(tmp_path, write, caplog):
    rows = [_row("one", "1", n=1), _row("two", "2", n=2), _row(None, "3", n=3)]
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    got, want = _train(str(path)), _train(write("x.jsonl", *rows))
    assert [(r.text, r.answer, r.fields) for r in got] == [
        (r.text, r.answer, r.fields) for r in want
    ]
    assert f"{path}:3: field 'question' is null; row skipped" in caplog.messages
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="x.parquet: cannot be read after row 0"):
        _train(str(path))


@pytest.mark.parametrize("kind", [pyarrow.timestamp, pyarrow.duration])
def test_parquet_rows_may_have_times_in_nanoseconds(tmp_path, kind):
    columns = {"question": ["one", "two"], "answer": ["1", "2"]}
    times = pyarrow.array([10**15, None], kind("ns"))
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({**columns, "created": times}), path)
    assert [r.answer for r in _train(str(path))] == ["1", "2"]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ((), "--data.train: is empty; give"),
        (("no_such.jsonl",), "data file no_such.jsonl: no such file"),
        (("labell",), "data file labell: must end in .jsonl or .parquet, or be a task"),
        (("label", "x.jsonl"), "a generated task cannot be combined; give either label"),
        (("x.jsonl", "./x.jsonl"), "two files have this name"),
    ],
)
def test_wrong_files_are_refused(files, sentence):
    with pytest.raises(ValueError, match=sentence):
        _train(*files)


def test_a_validation_prompt_that_is_trained_on_is_told(write, caplog):
    train = _train(write("t.jsonl", _row("One, two?"), _row("three")))
    val = load(DataConfig(val=(write("v.jsonl", _row("x"), _row("one two")),)), "val", TOKENIZER, 0)
    assert overlap(train, val) == 1
    assert "data.val v: 1 of 2 prompts are also in data.train" in caplog.text
    caplog.clear()
    assert overlap(_train(write("u.jsonl", _row("other"))), val) == 0
    assert caplog.text == ""


def test_the_label_task_is_endless_or_a_finite_seeded_set_with_a_fixed_validation_set():
    endless = _train("label")
    assert not endless.is_finite
    assert endless[10**9].text == label_task.make("train", 0, 10**9).prompt
    with pytest.raises(TypeError, match="endless"):
        len(endless)
    finite = _train("label", num_prompts=20)
    assert finite.is_finite and len(finite) == 20
    assert [r.text for r in finite] == [endless[i].text for i in range(20)]
    prompt = finite[3]
    assert TOKENIZER.decode(prompt.tokens) == prompt.text, "no chat template unless asked"
    assert prompt.answer == label_task.make("train", 0, 3).answer
    ((name, val),) = load(DataConfig(val=("label",)), "val", TOKENIZER, 0)
    ((_, other),) = load(DataConfig(val=("label",)), "val", TOKENIZER, 7)
    assert (name, len(val)) == ("label", 1024)
    assert [r.text for r in val] == [r.text for r in other]
    config = dataclasses.replace(DataConfig(val=("label",)), num_val_prompts=5, template="chat")
    ((_, few),) = load(config, "val", TOKENIZER, 0)
    assert len(few) == 5
    assert TOKENIZER.decode(few[0].tokens) == f"[user]{few[0].text}[assistant]"


@real
def test_real_rows_with_the_real_tokenizer():
    from rlcore.hf.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(DATA / "tokenizer_qwen")
    files = tuple(str(DATA / "math" / f"{n}.jsonl") for n in ("gsm8k_train", "math_half"))
    config = DataConfig(train=files, num_prompts=300, suffix=" Box it.")
    rows = load(config, "train", tokenizer, 0)
    assert len(rows) == 600
    first = rows[0]
    assert tokenizer.decode(first.tokens.tolist(), skip_special_tokens=False) == (
        f"<|im_start|>user\n{first.text}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert first.text.startswith("Natalia sold clips") and first.text.endswith("Box it.")
    assert (first.answer, first.dataset) == ("72", "gsm8k_train")
    assert set(first.fields) == {"id", "solution"}
    assert max(len(r.tokens) for r in rows) <= 1024
