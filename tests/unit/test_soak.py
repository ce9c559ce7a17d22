"""tools/soak.py: its figures from looks that were made up; the soak itself is slow."""

import importlib.util
import os
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("soak", ROOT / "tools" / "soak.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak"]


def looks(tool, **per_step: float) -> list[dict[str, float]]:
    """A hundred steps of a tree of 1,000 MB and 100 handles, with a warm-up that grows."""
    found = []
    for step in range(1, 101):
        start = {"memory": 1000.0, "shm": 0.0, "files": 100.0, "threads": 40.0, "processes": 8.0}
        grown = {name: value + per_step.get(name, 0.0) * step for name, value in start.items()}
        if step <= 20:
            grown["memory"] += 20 * step
        found.append(grown | {"step": float(step)})
    return found


def test_what_grows_is_told_from_what_is_flat_and_the_warm_up_does_not_count(tool):
    assert all(flat for _, _, flat in tool.slopes(looks(tool), 100).values())
    found = tool.slopes(looks(tool, memory=1.5, files=0.1), 100)
    assert found["memory"][1] == pytest.approx(150) and not found["memory"][2]
    assert found["files"][1] == pytest.approx(10) and not found["files"][2]
    assert found["threads"][2] and found["processes"][2]
    rows = tool.rows_of("sync", looks(tool, memory=1.5), 100, 0.9)
    assert rows[0]["name"] == "sync: memory" and rows[0]["flat"] is False
    assert rows[-1] == {"name": "sync: speed", "value": 0.9, "unit": "x", "baseline": 1,
                        "ratio": 0.9}  # fmt: skip
    with pytest.raises(ValueError, match="raise --steps"):
        tool.slopes(looks(tool)[:21], 100)


def test_a_look_sees_this_process_and_what_it_holds(tool, tmp_path):
    before = tool.look(psutil.Process(os.getpid()), 1)
    files = [open(tmp_path / str(i), "w") for i in range(5)]  # noqa: SIM115 - they stay open
    after = tool.look(psutil.Process(os.getpid()), 1)
    for file in files:
        file.close()
    assert after["files"] == before["files"] + 5
    assert before["memory"] > 1 and before["processes"] >= 1


def test_steps_are_read_from_whole_lines(tool, tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert tool.steps_done(path) == 0
    path.write_text('{"step": 3, "x": 1}\n{"step": 4, "x"')
    assert tool.steps_done(path) == 3


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("mode", ["sync", "colocated", "stream", "async", "tail"])
def test_five_hundred_steps_hold_no_more_than_fifty(tool, mode, tmp_path):
    assert tool.main(["--steps", "500", "--modes", mode, "--dir", str(tmp_path)]) == 0
