"""tools/studies/bench_vs_trl.py apart from the runs themselves: its comparison, and that the
recipe's keys which it sets exist."""

import importlib.util
import sys
from pathlib import Path

import pytest

from rlcore.cli import settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench():
    path = ROOT / "tools" / "studies" / "bench_vs_trl.py"
    spec = importlib.util.spec_from_file_location("bench", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _report(step_s, gen_s):
    return {
        "median_step_s": step_s,
        "median_gen_s": gen_s,
        "accuracy_start": 0.5,
        "accuracy_end": 0.6,
        "rewards": [0.4, 0.6],
        "completion_length": [20.0, 30.0],
    }


def test_the_ratio_says_how_many_times_faster_each_part_is(bench):
    rows = bench.compare(_report(4.0, 1.5), {"keep": _report(1.0, 0.5)})
    ratios = {row["name"]: row["ratio"] for row in rows}
    assert ratios["median_step_s/keep"] == 4.0
    assert ratios["median_gen_s/keep"] == 3.0
    assert ratios["rest_of_step_s/keep"] == 5.0
    assert ratios["accuracy_end/keep"] is None
    assert any(
        line.startswith("median_step_s/keep") and "4.00x" in line for line in bench.table(rows)
    )


def test_without_trls_private_hook_only_the_split_is_missing(bench):
    rows = bench.compare(_report(4.0, None), {"keep": _report(1.0, 0.5)})
    assert [row["ratio"] for row in rows[:2]] == [4.0, None]
    assert not any(row["name"].startswith("rest_of_step") for row in rows)
    assert len(bench.table(rows)) == len(rows) + 3


def test_the_keys_that_are_set_for_the_recipe_exist(bench, tmp_path):
    a = bench.parse(["--seed", "3", "--threads", "2", "--processes", "2"])
    files = {"train": tmp_path / "train.jsonl", "val": tmp_path / "val.jsonl"}
    cfg = settings.parse(bench.overrides(a, tmp_path, files, tmp_path, "drop"))
    assert cfg.run.seed == 3 and cfg.train.samples_per_update == 128
    assert cfg.algo.equal_reward_groups == "drop" and cfg.rollout.threads == 1
    assert not cfg.data.shuffle and not cfg.checkpoint.at_end


def test_a_command_that_fails_is_reported_with_its_last_words(bench):
    with pytest.raises(RuntimeError, match=r"exit code 3\nno such thing"):
        bench.call(
            [sys.executable, "-c", "import sys; sys.stderr.write('no such thing'); sys.exit(3)"], 20
        )


def test_a_command_that_takes_too_long_is_ended(bench):
    with pytest.raises(RuntimeError, match="not done after 0.5 s"):
        bench.call([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
