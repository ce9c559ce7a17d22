"""Groups of equal rewards are replaced in every mode (DAPO's dynamic sampling), on two ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests import runs

pytestmark = pytest.mark.ranks(2)

BARE = "--eval.no_at_start", "--eval.no_at_end", "--checkpoint.no_export_hf"
HALF = "--reward", "tests.scores.half", "--algo", "dapo", "--algo.overlong_share", 0
TIMES = "--debug.decode_floor_ms", 5, "--rollout.progress_interval_s", 0.05
KEPT = "--checkpoint.every", 2, "--checkpoint.keep", 0


class Found:
    def __init__(self, folder: Path):
        self.runs = folder / "runs"
        model = runs.tiny_model(folder / "model")

        def job(name: str, *more: object, run: str = "") -> runs.Job:
            argv = runs.arguments(model, self.runs, run or name, *BARE, *KEPT, *TIMES, *more)
            return {"name": name, "argv": argv}

        kill = job("killed", *HALF, "--debug.kill_at_step", 3)
        self.killed = runs.run(2, [kill], folder / "killed")
        tail = "--schedule", "tail_batching"
        self.gang = runs.run(
            2,
            [
                job("sync", *HALF),
                job("resumed", *HALF, run="killed"),
                job("drop", *HALF, "--algo.equal_reward_groups", "drop"),
                job("stream", *HALF, "--mode", "stream"),
                job("tail", *HALF, *tail),
                job("async", *HALF, "--mode", "async", "--cluster.rollout_ranks", 1),
                job("never", *HALF, "--reward", "tests.scores.zero", "--run.steps", 2),
                job("one", *HALF, "--rollout.samples_per_prompt", 1),
                job("remax", *HALF, "--algo.adv_estimator", "remax"),
                job("idle", "--algo.max_replaced_groups", 2),
            ],
            folder / "gang",
        )

    def rows(self, name: str) -> dict[int, dict[str, Any]]:
        self.gang.check(name, 2)
        return runs.rows(self.runs / name)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("replace"))


@pytest.mark.parametrize("mode", ["sync", "stream", "tail", "async"])
def test_a_step_has_all_its_groups_and_none_of_equal_rewards(found: Found, mode: str) -> None:
    rows = found.rows(mode).values()
    for row in rows:
        assert row["training/equal_reward_groups"] == 0
        assert row["training/trained_rows"] == 16
    assert sum(row["training/replaced_groups"] for row in rows) >= 4, "half of the rows are equal"


def test_without_it_a_step_has_fewer(found: Found) -> None:
    assert all(row["training/trained_rows"] < 16 for row in found.rows("drop").values())


def test_a_resumed_run_goes_on_with_the_same_prompts(found: Found) -> None:
    """Further prompts join a batch when there is room: log-probs differ in their last bits."""
    sync = found.rows("sync")
    resumed = runs.rows(found.runs / "killed")
    found.gang.check("resumed", 2)
    for step in (3, 4):
        for name in ("training/replaced_groups", "response_length/mean", "prompt_length/mean"):
            assert resumed[step][name] == sync[step][name], (step, name)
        for name in ("actor/loss", "actor/grad_norm", "critic/score/mean"):
            assert resumed[step][name] == pytest.approx(sync[step][name], rel=1e-4), (step, name)


def test_training_early_changes_no_step(found: Found) -> None:
    sync, stream = found.rows("sync")[1], found.rows("stream")[1]
    for name in ("actor/loss", "actor/grad_norm", "training/replaced_groups", "critic/score/mean"):
        assert stream[name] == pytest.approx(sync[name], rel=1e-4), name


def test_where_no_prompt_has_unequal_rewards_a_step_has_one_group(found: Found) -> None:
    for row in found.rows("never").values():
        assert row["training/replaced_groups"] == 16, "4 times the 4 prompts of a step"
        assert row["training/trained_rows"] == 4 and row["actor/grad_norm"] == 0
    assert "rewards are equal in every group" in found.gang.text("never")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("one", "replace: a group of rollout.samples_per_prompt 1 always has equal rewards"),
        ("remax", "replace: with adv_estimator remax a prompt also has a greedy response"),
        ("idle", "--algo.max_replaced_groups: has no effect without --algo.equal_reward_groups"),
    ],
)
def test_what_cannot_work_is_refused(found: Found, name: str, sentence: str) -> None:
    assert found.gang.code(name) == 2 and sentence in found.gang.text(name)
