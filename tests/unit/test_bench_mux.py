"""tools/bench_mux.py: its figures from turns that were made up."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "tools" / "bench_mux.py"
    spec = importlib.util.spec_from_file_location("bench_mux", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_mux"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_mux"]


def a_run(folder: Path, loss: float, first: float = 0.0, wrong: int = 0) -> Path:
    """Rollouts of 1 s and trainings of 0.8 s, a turn each; an iteration every 2.4 s, of which each
    turn takes 0.1 s to load and 0.1 s to store. Step `wrong` has learned something else."""
    folder.mkdir(parents=True)
    rows, turns = [], [turn("start", first - 20, 8.0)]
    for step in range(1, STEPS + 1):
        begin = first + 2.4 * step
        rows.append(
            {
                "step": step,
                "timing_s/step": 1.8,
                "timing_s/gen": 1.0,
                "actor/loss": loss * step + (step == wrong),
                "perf/rollout_node_gb": 2.0,
                "perf/train_node_gb": 3.0,
            }
            | {f"mux/load_s/{pool}": 0.1 for pool in ("rollout", "train")}
            | {f"mux/resident_gb/{pool}": 0.5 for pool in ("rollout", "train")}
        )
        turns += [turn("rollout", begin, 1.0), turn("train", begin + 1.2, 0.8)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "permits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turns))
    return folder


def turn(phase: str, granted: float, seconds: float) -> dict[str, object]:
    began = granted + 0.1
    ended = began + seconds
    times = {"asked": granted, "granted": granted, "began": began, "ended": ended}
    return {"phase": phase, **times, "left": ended + 0.1}


def test_what_turns_are_worth_and_what_they_cost(tool, tmp_path: Path):
    jobs = [tool.Job(f"a{i}", "A", i, 1.0) for i in range(2)]
    solo = {j.name: a_run(tmp_path / f"{j.name}_alone", loss=0.5 + j.seed) for j in jobs}
    a_run(tmp_path / "a0_mux", loss=0.5)
    a_run(tmp_path / "a1_mux", loss=1.5, first=1.2, wrong=4)
    status = {"nodes": {"rollout": {"used": 1}, "train": {"used": 1}}}
    a = SimpleNamespace(dir=tmp_path, steps=STEPS)
    rows = {r["name"]: r for r in tool.figures("A+A", jobs, solo, a, status)}
    worth = rows["A+A: cost efficiency"]
    assert worth["value"] == pytest.approx(2 * 1.8 / 2.4)
    assert worth["baseline"] == pytest.approx(2 * 1.8 / 2.0)  # two rollouts of 1 s, one node
    assert rows["A+A: iteration of a0"]["ratio"] == pytest.approx(2.4 / 1.8)
    assert rows["A+A: iteration against permits at no cost"]["value"] == pytest.approx(2.4 / 2.0)
    assert rows["A+A: idle train nodes"]["baseline"] == pytest.approx(1.0 / 1.8)
    assert 0 < rows["A+A: idle train nodes"]["value"] < 0.4
    assert rows["A+A: equal steps of a0"]["value"] == STEPS
    assert rows["A+A: equal steps of a1"]["value"] == STEPS - 1
    assert rows["A+A: warm start of rollout"]["ratio"] == pytest.approx(0.1 / 8.0)
    assert rows["A+A: overlaps on the train node"]["value"] == 1  # both start at once here
    tool.draw(a, {"A+A": jobs}, list(rows.values()), tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5_000
