"""tools/bench_learner.py: its count of FLOPs by hand, and one small run of it."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "tools" / "bench_learner.py"
    spec = importlib.util.spec_from_file_location("bench_learner", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_learner"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_learner"]


def test_flops_of_a_row(tool):
    hidden, wide, layers, heads, groups, size, vocab = tool.TINY
    layer = hidden * size * (2 * heads + 2 * groups) + 3 * hidden * wide
    norms = layers * (2 * hidden + 2 * size) + hidden
    products = 6 * (layers * layer + norms + vocab * hidden) * 10
    attention = layers * heads * size * (4 + 8) * 10 * 10 / 2
    assert tool.flops(tool.config_of("tiny"), [10]) == products + attention


def test_all_arms_compute_the_same_log_probs(tool, tmp_path, capsys):
    out = tmp_path / "learner.json"
    words = ["--tokens", "200", "--length", "50", "--micro", "400", "--rounds", "1"]
    tool.main([*words, "--dtype", "float32", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["arm"] for row in rows] == list(tool.ARMS)
    assert all(row["update_s"] > 0 and row["logprobs_s"] > 0 for row in rows)
    assert rows[1]["differs"] == 0 and rows[2]["differs"] < 1e-5
    assert "transformers" in capsys.readouterr().out
