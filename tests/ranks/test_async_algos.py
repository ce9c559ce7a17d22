"""Every objective on samples that are eight policy versions old: all that nine updates train is
started at version 0."""

import math
from pathlib import Path

import pytest

from rlcore import algos
from tests import runs

pytestmark = pytest.mark.ranks(2)

QUICK = ("grpo", "decoupled_ppo")
ALPHA, STEPS = 8, 10
OLD = (
    *("--cluster.rollout_ranks", 1, "--mode", "async", "--async.alpha", ALPHA),
    *("--run.steps", STEPS, "--data.prompts_per_step", 2, "--rollout.max_running_requests", 128),
    *("--checkpoint.no_at_end", "--checkpoint.no_export_hf", "--eval.no_at_start"),
    *("--eval.no_at_end", "--train.samples_per_update", 4),
)
ALONE = [name for name in algos.NAMES if name not in ("opd", "gkd")]
"""The others need a teacher: test_distillation.py."""
WAYS = {name: ("--algo", name) for name in ALONE} | {
    "bypass": ("--algo", "grpo", "--algo.bypass_mode"),
    "in place": ("--algo", "grpo", "--async.weight_update", "in_place"),
    "rejected": ("--algo", "grpo", "--algo.rollout_rs", "token_k1"),
}
SLOW = tuple(name for name in WAYS if name not in QUICK)


def run(names: tuple[str, ...], folder: Path) -> tuple[runs.Gang, Path]:
    model = runs.tiny_model(folder / "model")
    jobs: list[runs.Job] = [
        {"name": name, "argv": runs.arguments(model, folder / "runs", name, *OLD, *WAYS[name])}
        for name in names
    ]
    return runs.run(2, jobs, folder / "gang"), folder / "runs"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[runs.Gang, Path]:
    return run(QUICK, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> tuple[runs.Gang, Path]:
    return run(SLOW, tmp_path_factory.mktemp("slow"))


def check(gang: runs.Gang, folder: Path, name: str) -> None:
    gang.check(name, 2)
    rows = runs.rows(folder / name)
    ages = [rows[k]["training/off_policy/trajectory_staleness_worst/max"] for k in rows]
    assert max(ages) == ALPHA, ages
    for step, row in rows.items():
        for key, value in row.items():
            assert math.isfinite(value), (step, key, value)
    learned = [row for row in rows.values() if "actor/grad_norm" in row]
    assert len(learned) >= STEPS - 2  # a step may have equal rewards alone
    assert all(row["actor/grad_norm"] > 0 for row in learned)
    assert any(row["actor/ppo_kl"] != 0 for row in learned)


@pytest.mark.parametrize("name", QUICK)
def test_it_trains_on_samples_of_eight_versions_before(
    quick: tuple[runs.Gang, Path], name: str
) -> None:
    check(*quick, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_others_do_too(slow: tuple[runs.Gang, Path], name: str) -> None:
    check(*slow, name)
