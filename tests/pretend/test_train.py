"""`rlcore train` on two ranks with a pretend device each, against the same run on the CPU."""

from pathlib import Path
from typing import Any

import pytest

from tests import kit, runs
from tests.pretend import ranks

pytestmark = [pytest.mark.ranks(2), pytest.mark.timeout(1200)]

STEPS = 5
SETTINGS = (
    *("--train.offload", "--checkpoint.every", 1, "--algo.kl_coef", 0.1, "--eval.every", 2),
    *("--train.share_prefix", "true"),  # on the device without flash attention, too
)
JOBS: dict[str, tuple[object, ...]] = {"inline": (), "child": ("--rollout.process", "child")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pretend")
    runs.tiny_model(made / "model")
    return made


def arguments(folder: Path, name: str, *more: object) -> list[str]:
    return runs.arguments(folder / "model", folder / "runs", name, *SETTINGS, *more)


@pytest.fixture(scope="module")
def cpu(folder: Path) -> dict[int, dict[str, Any]]:
    """Rows of the metrics of the run on the CPU."""
    job = {"name": "cpu", "argv": arguments(folder, "cpu", "--run.steps", STEPS)}
    runs.run(2, [job], folder / "gang", timeout_s=500).check("cpu", ranks=2)
    return runs.rows(folder / "runs" / "cpu")


@pytest.mark.parametrize("name", ["inline", pytest.param("child", marks=pytest.mark.slow)])
def test_five_steps_and_a_resume_equal_those_of_the_cpu(
    folder: Path, cpu: dict[int, dict[str, Any]], name: str
) -> None:
    texts = []
    for steps in (3, STEPS):
        argv = arguments(folder, name, *JOBS[name], "--run.steps", steps)
        texts.append(ranks.run_gang(2, ["-m", "rlcore", "train", *argv], folder))
    assert "learner: Megatron-Core on cuda" in texts[0] and "resumed from" in texts[1]
    found = runs.rows(folder / "runs" / name)
    assert found.keys() == cpu.keys() and max(found) == STEPS
    for step, want in cpu.items():
        names = [key for key in runs.same(want) if key.startswith(("actor/", "reward/", "val"))]
        assert names
        ours, theirs = ({key: row[key] for key in names} for row in (found[step], want))
        kit.assert_close_named(ours, theirs, rtol=1e-4, atol=1e-5)
    assert found[STEPS]["actor/skipped"] == 0 and found[STEPS]["actor/grad_norm"] > 0
