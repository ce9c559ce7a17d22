"""`rlcore train` as a program on a GPU: a world of one with NCCL and gloo."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests import kit, runs
from tests.gpu import side

pytestmark = pytest.mark.gpu

BFLOAT16 = ("--train.offload", "--model.dtype", "bfloat16")
JOBS: dict[str, tuple[object, ...]] = {
    "inline": (),
    "inline offload": BFLOAT16,
    "child offload": (
        *("--rollout.process", "child", *BFLOAT16),
        *("--algo.kl_coef", 0.1, "--checkpoint.every", 1),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("train")
    runs.tiny_model(made / "model")
    return made


def train(folder: Path, name: str, *more: object) -> str:
    """Run the program; its output. AssertionError with it where it fails."""
    argv = runs.arguments(folder / "model", folder / "runs", name, *more)
    launcher = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    done = subprocess.run(
        [sys.executable, "-m", "rlcore", "train", *argv],
        env=env | {"PYTHONPATH": kit.python_path()},
        cwd=kit.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def two_steps(folder: Path) -> Callable[[str], str]:
    """What the first start of a job said; each is run once."""
    return cache(lambda name: train(folder, name, *JOBS[name], "--run.steps", 2))


@pytest.mark.parametrize("name", JOBS)
def test_two_steps_train_on_the_gpu(
    folder: Path, two_steps: Callable[[str], str], name: str
) -> None:
    assert f"learner: Megatron-Core on {side.DEVICE.type}" in two_steps(name)
    rows = runs.rows(folder / "runs" / name)
    assert 0 in rows and 1 in rows and 2 in rows
    for step in (1, 2):
        row = rows[step]
        assert row["actor/skipped"] == 0 and row["actor/grad_norm"] > 0
        assert row["reward/errors"] == 0
        # Engine and learner agree on the probabilities of what was sampled.
        limit = 2e-2 if "bfloat16" in JOBS[name] else 1e-4
        assert row["training/rollout_probs_diff_mean"] < limit
    assert (folder / "runs" / name / "hf" / "model.safetensors").is_file()


def test_an_offloaded_run_goes_on_from_its_checkpoint(
    folder: Path, two_steps: Callable[[str], str]
) -> None:
    name = "child offload"
    two_steps(name)
    assert "resumed from" in train(folder, name, *JOBS[name], "--run.steps", 3)
    assert list(runs.rows(folder / "runs" / name)) == [0, 1, 2, 3]


def test_a_resumed_run_has_the_bits_of_one_that_went_through(
    folder: Path, two_steps: Callable[[str], str]
) -> None:
    two_steps("inline")
    train(folder, "inline", "--run.steps", 3)
    train(folder, "straight", "--run.steps", 3)
    resumed, straight = (runs.rows(folder / "runs" / n)[3] for n in ("inline", "straight"))
    assert runs.same(resumed) == runs.same(straight)
