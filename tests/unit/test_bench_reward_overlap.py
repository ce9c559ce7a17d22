"""tools/bench_reward_overlap.py: one small run of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_bench_compares_whole_runs_with_and_without_overlap(tmp_path: Path) -> None:
    out = tmp_path / "overlap.json"
    words = ["--ratios", "1", "--steps", "3", "--floor-ms", "4", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench_reward_overlap.py"), *words],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())
    assert row["name"] == "step_reward_1" and row["unit"] == "s"
    assert row["ratio"] == pytest.approx(row["baseline"] / row["value"])
    assert 1 < row["bound"] <= 2, "the shorter of two equal times is hidden at most"
    print(done.stdout)
