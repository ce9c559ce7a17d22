"""`rlcore train` as a program on a GPU: a world of one with NCCL and gloo."""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests import runs
from tests.gpu import side

pytestmark = pytest.mark.gpu

JOBS: dict[str, tuple[object, ...]] = {
    "inline": ("--train.deterministic",),
    "inline offload": side.OFFLOAD,
    "child offload": (
        *("--rollout.process", "child", *side.OFFLOAD),
        *("--algo.kl_coef", 0.1, "--checkpoint.every", 1),
    ),
}


ENGINES = [
    "torch",
    pytest.param(
        "sglang",
        marks=[
            side.needs_gpu,
            side.needs_real_gpu,
            pytest.mark.skipif(
                importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
            ),
        ],
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("train")
    runs.tiny_model(made / "model")
    return made


@pytest.fixture(scope="module")
def two_steps(folder: Path) -> Callable[[str], str]:
    """What the first start of a job said; each is run once."""
    return cache(lambda name: side.train(folder, name, *JOBS[name], "--run.steps", 2))


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
    assert "resumed from" in side.train(folder, name, *JOBS[name], "--run.steps", 3)
    assert list(runs.rows(folder / "runs" / name)) == [0, 1, 2, 3]


def test_a_resumed_run_has_the_bits_of_one_that_went_through(
    folder: Path, two_steps: Callable[[str], str]
) -> None:
    two_steps("inline")
    side.train(folder, "inline", *JOBS["inline"], "--run.steps", 3)
    side.train(folder, "straight", *JOBS["inline"], "--run.steps", 3)
    resumed, straight = (runs.rows(folder / "runs" / n)[3] for n in ("inline", "straight"))
    assert runs.same(resumed) == runs.same(straight)


@pytest.mark.parametrize("engine", ENGINES)
def test_five_steps_of_grpo(engine: str, tmp_path: Path, record_property: Callable) -> None:
    # SGLang's attention kernels want heads of at least 64.
    runs.tiny_model(tmp_path / "model", hidden_size=128, head_dim=64)
    keys = "--algo", "grpo", "--run.steps", 5, "--cluster.timeout_s", 200
    cache = "--rollout.engine", engine, "--rollout.kv_cache_tokens", 16_384
    side.train(tmp_path, "grpo", *side.OFFLOAD, *keys, *cache)
    rows = runs.rows(tmp_path / "runs" / "grpo")
    assert list(rows) == [0, 1, 2, 3, 4, 5]
    for step in range(1, 6):
        row = rows[step]
        assert row["actor/skipped"] == 0 and row["actor/grad_norm"] > 0
        assert row["reward/errors"] == 0
        assert row["training/rollout_probs_diff_mean"] < 2e-2
        assert row["sync/bytes"] > 0
    record_property("seconds of step 5", f"{rows[5]['timing_s/step']:.2f}")
    record_property(
        "sampler and learner differ by", f"{rows[5]['training/rollout_probs_diff_mean']:.1e}"
    )
