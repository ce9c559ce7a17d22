"""tools/bench_env.py: the ideal times by hand, and one small run of it."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "tools" / "bench_env.py"
    spec = importlib.util.spec_from_file_location("bench_env", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_env"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_env"]


def test_ideal_times_of_three_groups_of_two_episodes_of_two_turns(tool):
    times = np.array([[[1, 1], [2, 3]], [[9, 9], [1, 2]], [[1, 3], [4, 4]]], dtype=float)
    assert tool.ideal(times, (3, 2), barrier=True) == 9 + 9
    assert tool.ideal(times, (3, 2)) == 18  # the slowest episode of all
    assert tool.ideal(times, (2, 2)) == 8  # groups end at 5, 18, 8: the second
    assert tool.ideal(times, (3, 1)) == 4  # at 2, 3, 4 with one episode each


@pytest.mark.slow
def test_the_bench_compares_rounds(tool, tmp_path, capsys):
    out, picture = tmp_path / "env.json", tmp_path / "env.png"
    words = [
        "--groups",
        "2",
        "--turns",
        "2",
        "--scale",
        "0.01",
        "--rounds",
        "1",
        "--slow",
        "0.1",
    ]
    tool.main([*words, "--json", str(out), "--plot", str(picture)])
    rows = json.loads(out.read_text())
    assert [r["name"] for r in rows] == [
        "async",
        "36x8 slow 0.1",
        "32x9 slow 0.1",
        "36x9 slow 0.1",
        "36x12 slow 0.1",
    ]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["baseline"] / row["value"])
        assert row["value"] >= 0.99 * row["ideal"] > 0, "no round is faster than its environments"
    assert rows[0]["published_ratio"] == pytest.approx(2.46, abs=0.01)
    assert picture.stat().st_size > 10_000
