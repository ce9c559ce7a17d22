"""tools/bench_growth.py and tools/bench_prompts.py, in small: what a run holds does not grow."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from rlcore.sched import tail_batching
from rlcore.utils.log import log

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(scope="module")
def growth() -> Iterator[ModuleType]:
    yield from load("bench_growth")


@pytest.fixture(scope="module")
def prompts() -> Iterator[ModuleType]:
    yield from load("bench_prompts")


@pytest.fixture
def quiet() -> Iterator[None]:
    """The logger as it was: a run gives it handlers of its own."""
    before = log.handlers[:], log.propagate, log.level
    yield
    for handler in set(log.handlers) - set(before[0]):
        handler.close()
    log.handlers[:], log.propagate = before[0], before[1]
    log.setLevel(before[2])


def test_no_container_handle_or_state_grows_with_the_steps(growth, tmp_path, monkeypatch, quiet):
    """Once each of 60 prompts was seen often enough for its history to be full."""
    monkeypatch.setattr(tail_batching, "_EPOCHS", 2)
    monkeypatch.setattr(growth, "TRACED", -1)
    books, looks = growth.Books(tmp_path, steps=1000, rows=60, seed=0), []
    me = psutil.Process()
    for step in range(1, 37):
        books.step()
        if step in (*range(14, 19), *range(32, 37)):
            looks.append((books.held(), books.state_bytes(), me.num_fds(), me.num_threads()))
    books.close()
    middle, last = looks[:5], looks[5:]
    for name in last[-1][0]:
        least = min(held.get(name, 0) for held, *_ in last)
        most = max(held.get(name, 0) for held, *_ in middle)
        if name == "History.tokens":  # as many histories as before, of other lengths
            most *= 1.1
        assert least <= most, f"{name} grew from {most} to {least} items"
    for i, what in ((2, "descriptors"), (3, "threads")):
        assert {look[i] for look in last} == {look[i] for look in middle}, what
    assert max(look[1] for look in last) < 1.05 * max(look[1] for look in middle)


@pytest.mark.slow
def test_the_bench_of_steps_reads_the_files_again(growth, tmp_path, capsys, quiet):
    file = tmp_path / "out.json"
    assert growth.main(["--steps", "30", "--rows", "40", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    last = {(r["name"], r["unit"]): r["value"] for r in found["rows"] if r["step"] == 30}
    for name in ("memory of rank 0", "descriptors", "threads", "file metrics.jsonl"):
        assert any(key[0] == name and value > 0 for key, value in last.items()), name
    for name in growth.AGAIN:
        assert last[name, "s"] > 0 and last[name, "MB"] >= 0
    assert "CPU of a step" in capsys.readouterr().out


@pytest.mark.slow
def test_the_bench_of_prompts_loads_each_type_of_file(prompts, tmp_path, capsys):
    file = tmp_path / "out.json"
    assert prompts.main(["--prompts", "300", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {(r["file"], r["prompts"]) for r in rows} == {("jsonl", 300), ("parquet", 300)}
    assert all(r["value"] > 0 for r in rows if r["name"] in ("load", "peak", "random", "file"))
    assert "aim 1: met" in capsys.readouterr().out


def test_the_same_seed_writes_the_same_rows(prompts):
    one, again, other = (list(prompts.texts(20, seed)) for seed in (1, 1, 2))
    assert one == again != other
    low, high = prompts.CHARS
    assert all(low / 2 < len(text) <= high for row in one for text in row.values())
