"""Damaged and hostile files of users, models and earlier runs: every one is answered with a
sentence, never with another error, and in bounded time and memory."""

import contextlib
import gzip
import json
import os
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rlcore.config import rules
from rlcore.config.schema import Config, DataConfig, RunConfig
from rlcore.data import prompts
from rlcore.hf import template, tokenizer
from rlcore.hf.config import HFConfig
from rlcore.hf.names import expected
from rlcore.hf.template import Template
from rlcore.hf.tokenizer import Tokenizer, load_tokenizer, make_char_tokenizer
from rlcore.hf.weights import WeightReader
from rlcore.metrics.jsonl import JsonLines, read_lines
from rlcore.mux.profile import Profile
from rlcore.records import Prompt
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.judge.rubric import Rubric
from rlcore.rollout.histospec import HistoryStore
from rlcore.rollout.replay import EventLog
from rlcore.rollout.round_log import Log
from rlcore.sched.completion_order import ReplayMismatch
from rlcore.sim import lengths
from rlcore.sim import profile as engine_profile
from rlcore.sim.lengths import read_lengths
from rlcore.sim.user import read_model
from rlcore.utils import files
from rlcore.utils.errors import ConfigError, LimitError
from tests.kit import tiny_config

DEEP = "[" * 100_000
CHARS = "abcdefghijklmnopqrstuvwxyz 0123456789"
CONTENTS = {
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "cut": b'{"a": [1, ',
    "a list": b"[]",
    "null": b"null",
    "deep": DEEP.encode(),
    "deep inside": b'{"x": ' + DEEP.encode(),
    "many digits": b'{"x": ' + b"1" * 5000 + b"}",
    "surrogate": b'{"x": "\\ud800"}',
    "repeated key": b'{"x": 1, "x": 2, "x": 3}',
    "a mark": b"\xef\xbb\xbf{}",
    "zeros": bytes(100),
}


def model(folder: Path) -> Path:
    """A tiny model with random weights and a tokenizer."""
    make_char_tokenizer(folder, CHARS)
    raw = tiny_config(vocab_size=len(CHARS) + 2, num_hidden_layers=1)
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = expected(HFConfig.from_dict(raw))
    save({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, folder)
    return folder


def save(tensors: dict[str, np.ndarray], folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, folder / "model.safetensors")


def load_weights(file: Path) -> None:
    hf = HFConfig.from_folder(file.parent)
    reader = WeightReader(file.parent)
    reader.check(expected(hf))
    for name in expected(hf):
        reader.get(name)


@cache
def chars() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return make_char_tokenizer(folder, CHARS)


def load_rows(file: Path, **keys: object) -> list[Prompt]:
    config = replace(DataConfig(train=(str(file),), template="none"), **keys)
    found = prompts.load(config, "train", chars(), 0)
    return [found[i] for i in range(len(found))]


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": lambda file: HFConfig.from_folder(file.parent),
    "tokenizer.json": lambda file: load_tokenizer(file.parent),
    "tokenizer_config.json": lambda file: load_tokenizer(file.parent),
    "special_tokens_map.json": lambda file: load_tokenizer(file.parent),
    "generation_config.json": lambda file: load_tokenizer(file.parent),
    "chat_template.json": lambda file: load_tokenizer(file.parent),
    "chat_template.jinja": lambda file: load_tokenizer(file.parent),
    "model.safetensors": load_weights,
    "model.safetensors.index.json": load_weights,
    "rows.jsonl": load_rows,
    "rows.parquet": load_rows,
    "rounds.jsonl": Log,
    "record/step_000001.events.msgpack": lambda file: EventLog(file.parent.parent, 0).step(0),
    "profile.json": Profile.read,
    "engine.json": engine_profile.read,
    "sizes.json": lambda file: read_model(str(file)),
    "lengths.csv": read_lengths,
    "lengths.jsonl": read_lengths,
    "lengths.jsonl.gz": read_lengths,
    "rubric.jinja": lambda file: Rubric(JudgeRewardConfig(rubric=str(file))),
    "histories.npz": HistoryStore(max_tokens=1).load,
}
"""What reads each file."""
OPTIONAL = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
]
"""Files that a folder may lack."""
REFUSED = (ConfigError, ReplayMismatch)


def check(name: str, folder: Path) -> str:
    """Read a file of a model's folder. Return the error's sentence, or "" if there is none."""
    try:
        READERS[name](folder / name)
    except REFUSED as error:
        said = str(error)
        assert said.strip() and len(said.splitlines()) == 1 and "Traceback" not in said
        return said
    return ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "record").mkdir()
    return model(tmp_path)


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_any_contents_is_answered_with_a_sentence(folder: Path, name: str) -> None:
    refused = 0
    for data in CONTENTS.values():
        (folder / name).write_bytes(data)
        refused += bool(check(name, folder))
    assert refused >= (0 if name.endswith(".jinja") else 3), refused


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """Without the rights of root, which may read everything."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(mine)


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_readable_file_is_named_and_never_waited_for(name: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = model(Path(root) / "model")
        (folder / "record").mkdir()
        for path in (Path(root), folder, folder / "record"):
            path.chmod(0o755)
        file = folder / name

        def made(make: Callable[[Path], object]) -> str:
            if file.is_dir() and not file.is_symlink():
                file.rmdir()
            file.unlink(missing_ok=True)
            make(file)
            return check(name, folder)

        assert "named pipe" in made(os.mkfifo)
        assert "device" in made(lambda path: path.symlink_to("/dev/zero"))
        assert ("no such file" if name == "rounds.jsonl" else "is a folder") in made(Path.mkdir)
        assert "symbolic links" in made(lambda path: path.symlink_to(path.name))
        assert made(lambda path: path.symlink_to("nowhere")) or name in OPTIONAL
        file.unlink()
        file.write_text("{}")
        file.chmod(0)
        with as_another_user():
            assert "permission denied" in check(name, folder)


def said_of(folder: Path, name: str, change: dict) -> str:
    """Read a JSON file of a model with some keys changed. Return the error's sentence."""
    file = folder / name
    before = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(before | change))
    return check(name, folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", 32.0),
        ("vocab_size", -1),
        ("vocab_size", True),
        ("num_hidden_layers", 10**7),
        ("num_attention_heads", 0),
        ("head_dim", 15),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", "1e-6"),
        ("initializer_range", float("inf")),
        ("rope_theta", 0),
        ("rope_parameters", {"rope_theta": -1}),
        ("rope_parameters", "llama3"),
        ("tie_word_embeddings", "false"),
        ("eos_token_id", ["1"]),
        ("architectures", [{}]),
        ("architectures", "Qwen3ForCausalLM"),
        ("layer_types", 5),
        ("dtype", {}),
        ("max_position_embeddings", 10**400),
    ],
)
def test_a_wrong_value_in_a_config_is_named(folder: Path, key: str, value: object) -> None:
    said = said_of(folder, "config.json", {key: value})
    assert (key if key != "rope_parameters" or value == "llama3" else "rope_theta") in said


@pytest.mark.parametrize(
    "change",
    [
        {"eos_token": 5},
        {"eos_token": {"text": "x"}},
        {"eos_token": "no such token"},
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": {"content": "y"}}},
        {"added_tokens_decoder": {"5": "y"}},
        {"added_tokens_decoder": {"999": {"content": "new"}}},
        {"chat_template": 5},
        {"chat_template": [{"template": "no name"}]},
    ],
)
def test_wrong_settings_of_a_tokenizer_are_named(folder: Path, change: dict) -> None:
    assert "token" in said_of(folder, "tokenizer_config.json", change)


@pytest.mark.parametrize(
    "value", [5, [], {"a": 5}, {"a": "../x"}, {"a": "/etc/passwd"}, {"a": ".."}, {"a": ""}]
)
def test_an_index_names_only_files_of_its_folder(folder: Path, value: object) -> None:
    said = said_of(folder, "model.safetensors.index.json", {"weight_map": value})
    assert "index.json" in said
    if isinstance(value, dict) and value["a"] != 5:
        assert "is not a file of this folder" in said


def header(**tensors: object) -> bytes:
    """A safetensors file of this header with 8 bytes of data."""
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


def entry(dtype: str, shape: list[int], *offsets: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 1 << 62) + b"{}",
        header(a=entry("F32", [2], 0, 1 << 40)),
        header(a=entry("F32", [3], 0, 8)),
        header(a=entry("F32", [1], 0, 4), b=entry("F32", [1], 2, 6)),
        header(a=entry("F32", [1 << 62, 1 << 62], 0, 8)),
        header(a=entry("X9", [2], 0, 8)),
        header(a=entry("F32", [2], -8, 0)),
        header(**{"model.layers.0.mlp.experts.down_proj": entry("F32", [1 << 40, 0, 1], 0, 0)}),
        header(**{"model.layers.0.mlp.experts.down_proj": entry("F32", [2], 0, 8)}),
    ],
)
def test_a_damaged_header_of_weights_is_named(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    assert "fetch the model again" in check("model.safetensors", folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 7])
def test_weights_that_are_no_finite_floats_are_named(folder: Path, value: float) -> None:
    shapes = expected(HFConfig.from_folder(folder))
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    name = list(shapes)[-1]
    if value == 7:
        tensors[name] = tensors[name].astype(np.int32)
    else:
        tensors[name].flat[-1] = value
    save(tensors, folder)
    words = "has dtype I32" if value == 7 else "NaN or infinite"
    assert f"tensor {name} has" in (said := check("model.safetensors", folder)) and words in said


def test_a_row_is_read_up_to_a_limit_and_the_next_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prompts, "MOST_ROW_BYTES", 1000)
    rows = [{"question": "a" * n, "answer": "1"} for n in (1, 5000, 969, 968, 967, 2)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n" + '{"question": "' + "a" * 5000)
    with caplog.at_level("WARNING", logger="rlcore"):
        assert [len(p.text) for p in load_rows(file)] == [1, 968, 967, 2]
    assert caplog.text.count("longer than 0 MiB") == 3


@pytest.mark.parametrize(
    "column",
    [
        [1, 2],
        [b"\xff", b"x"],
        [None, None],
        [[["a"]], []],
        [{"a": 1}, {"a": 2}],
        [1e300, 2.0],
        [True, False],
    ],
)
def test_a_column_of_another_type_is_named(tmp_path: Path, column: list) -> None:
    file = tmp_path / "rows.parquet"
    table = pyarrow.table({"question": pyarrow.array(column), "answer": ["1", "2"]})
    pyarrow.parquet.write_table(table, file)
    with pytest.raises(ConfigError, match="no usable row; .*'question'"):
        load_rows(file)


@pytest.mark.parametrize("answer", ["NaN", "Infinity", "[1]", "1e999", "1" * 5000, "{}"])
def test_an_answer_that_is_no_number_is_a_bad_row(tmp_path: Path, answer: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"question": "a", "answer": {answer}}}\n{{"question": "b", "answer": 1}}')
    assert [p.text for p in load_rows(file)] == ["b"]


FAILING = {
    "OverflowError: Range too big": "{% for i in range(10**9) %}x{% endfor %}",
    "MemoryError": "{{ ('x' * 1500000000) | length }}",
    "ZeroDivisionError": "{{ 1 / 0 }}",
    "TypeError: Object of type Undefined": "{{ messages[0].tool | tojson }}",
    "'int' object is not iterable": "{% for t in messages[0].tool_calls %}{% endfor %}",
    "RecursionError": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "more than 1 MiB": "{{ 'x' * 2000000 }}",
    "unexpected 'end of template'": "{% if",
}
ENDLESS = (
    "{% if messages[0].content == 'x' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)


def chats(*contents: str) -> list[dict]:
    return [{"messages": [{"content": c, "tool_calls": 5}]} for c in contents]


@pytest.mark.parametrize("words", FAILING)
def test_a_template_that_fails_is_an_error_of_one_rendering(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "TEXT_BYTES", 1 << 20)
    first, second = Template(FAILING[words]).render(chats("a", "b"))
    assert words in str(first) and words in str(second)


def test_a_template_without_end_loses_one_row_and_ends_a_file_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template, "CPU_S", 0)  # rounded up to one second
    renderer = Template(ENDLESS)
    before, stopped, after = renderer.render(chats("a", "x", "b"))
    assert (before, after) == ("a", "b") and "SIGXCPU" in str(stopped)
    with pytest.raises(LimitError, match="3 renderings were stopped"):
        renderer.render(chats("x", "x", "c"))


def test_a_template_process_that_is_stopped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Template("x")
    assert renderer.render(chats("a")) == ["x"]
    assert renderer._child is not None
    monkeypatch.setattr(template, "ANSWER_S", 0.2)
    os.kill(renderer._child.process.pid, signal.SIGSTOP)
    with pytest.raises(LimitError, match="has not answered for 0.2 s"):
        renderer.render(chats("a"))


def test_a_row_that_a_template_cannot_render_is_left_out(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path, CHARS)
    text = "{% for m in messages %}{% for t in m.tool_calls %}{% endfor %}{% endfor %}a"
    (tmp_path / "chat_template.jinja").write_text(text)
    tokens = load_tokenizer(tmp_path)
    rows = [[{"role": "user", "content": "a", "tool_calls": calls}] for calls in ([], 5, [])]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"question": r, "answer": "1"}) for r in rows))
    assert len(prompts.load(DataConfig(train=(str(file),)), "train", tokens, 0)) == 2


def byte_level(widest: str) -> Tokenizer:
    """A byte-level tokenizer as Qwen's, with one long token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    merges = []
    for length in range(2, len(widest) + 1):
        vocabulary[widest[:length]] = len(vocabulary)
        merges.append((widest[: length - 1], widest[length - 1]))
    backend = Backend(models.BPE(vocabulary, merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<|end|>", lstrip=True, rstrip=True)])
    backend.add_tokens([AddedToken("\u1f82" * 8, normalized=True)])
    return Tokenizer(backend, {}, None)


PIECES = ["a", "aaaaaaaa", "  ", "\n", "<|end|>", "\u00e9", "e\u0301", "\u1112\u1161\u11ab"]
PIECES += ["\u03b1\u0313\u0300\u0345", "\u212a\u0327", "\u3000", "\U0001fae0", "\x1c", "\u2028"]


@settings(max_examples=150, deadline=None)
@example([("<|end|>", 1), ("  ", 400)])
@example([("\u03b1\u0313\u0300\u0345", 80)])
@given(st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 40)), max_size=30))
def test_the_bound_of_a_prompts_length_never_exceeds_it(parts: list[tuple[str, int]]) -> None:
    text = "".join(piece * count for piece, count in parts)
    tokens = byte_level("aaaaaaaa")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_LONG_CHARS", 0)
        assert tokens._widest_token == 8
        assert tokens.min_tokens(text) <= len(tokens.encode(text))


def test_a_huge_prompt_is_dropped_before_it_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = byte_level("aaaaaaaa")
    encoded: list[int] = []
    encode = tokens.encode
    monkeypatch.setattr(tokens, "encode", lambda text: (encoded.append(len(text)), encode(text))[1])
    file = tmp_path / "rows.jsonl"
    rows = [{"question": "ab" * n, "answer": "1"} for n in (3, 500_000)]
    file.write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(train=(str(file),), template="none", max_prompt_tokens=1024)
    assert len(prompts.load(config, "train", tokens, 0)) == 1 and encoded == [6]


@pytest.mark.parametrize(
    ("name", "good"),
    [("a", True), ("", True), ("a b-c.1", True), ("\u00e9", True)]
    + [(n, False) for n in ("../x", "/x", "a/b", "..", ".", "a\nb", "\udcff", "a" * 201)],
)
def test_the_name_of_a_run_is_the_name_of_one_folder(name: str, good: bool) -> None:
    found = rules.broken(replace(Config(), run=RunConfig(name=name)))
    assert good != any(line.startswith("--run.name") for line in found)


def test_a_log_with_damaged_lines_can_be_continued(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', '{"step": "x"}', DEEP, '{"step": 2}', '{"step": 3}', '{"ste']
    file.write_text("\n".join(lines))
    JsonLines(file, 3).close()
    assert [row["step"] for row in read_lines(file)] == [1, "x", 2]


def test_a_packed_trace_is_unpacked_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "MOST_BYTES", 1 << 20)
    file = tmp_path / "lengths.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"n_tokens": 5}\n' * 100_000))
    with pytest.raises(ConfigError, match="has more than 1 MiB"):
        read_lengths(file)


def test_json_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_TEXT_BYTES", 1 << 20)
    file = tmp_path / "x.json"
    file.write_bytes(b"{" + b" " * (1 << 20) + b"}")
    with pytest.raises(ConfigError, match="has more than 1 MiB"):
        files.read_json(file)
