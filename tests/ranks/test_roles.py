"""Ranks that only sample beside ranks that only train: the run is that of ranks that do both."""

from pathlib import Path
from typing import Any

import pytest

from tests import kit, runs

pytestmark = pytest.mark.ranks(2)

KEPT = "--checkpoint.every", 2, "--checkpoint.keep", 0, "--checkpoint.no_export_hf"
APART = "--cluster.rollout_ranks", 1
TAIL = "--schedule", "tail_batching", "--debug.deterministic_order"


class Found:
    def __init__(self, folder: Path):
        self.runs = folder / "runs"
        model = runs.tiny_model(folder / "model")

        def job(name: str, *more: object, run: str = "", ranks: int = 2) -> runs.Job:
            argv = runs.arguments(model, self.runs, run or name, *KEPT, *more)
            return {"name": name, "argv": argv, "ranks": ranks}

        killed = job("killed", *APART, "--debug.kill_at_step", 3)
        self.killed = runs.run(2, [killed], folder / "killed")
        self.gang = runs.run(
            2,
            [
                job("together", "--rollout.process", "child", ranks=1),
                job("apart", *APART, "--log.rollouts", 4),
                job("resumed", *APART, run="killed"),
                job("together tail", *TAIL, "--rollout.process", "child", ranks=1),
                job("apart tail", *APART, *TAIL),
                job("nobody", "--cluster.rollout_ranks", 2),
                job("gather", *APART, "--sync.route", "gather"),
            ],
            folder / "gang",
        )

    def rows(self, name: str, ranks: int = 2) -> dict[int, dict[str, Any]]:
        self.gang.check(name, ranks)
        return runs.rows(self.runs / name)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("roles"))


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """All but what says how weights came."""
    drop = "sync/", "memory/"
    a, b = (
        {k: v for k, v in runs.same(row).items() if not k.startswith(drop)}
        for row in (ours, theirs)
    )
    assert a == b


@pytest.mark.parametrize("schedule", ["", " tail"])
def test_a_rank_that_samples_and_one_that_trains_do_what_one_rank_does_bit_by_bit(
    found: Found, schedule: str
) -> None:
    apart, together = found.rows("apart" + schedule), found.rows("together" + schedule, 1)
    assert list(apart) == list(together) == [0, 1, 2, 3, 4]
    for step in apart:
        same(apart[step], together[step])
    ours, theirs = (runs.checkpoint(found.runs / (n + schedule), 4) for n in ("apart", "together"))
    for part in (ours, theirs):
        part.pop("common")
    assert ours.pop("state") == theirs.pop("state")
    kit.assert_bitwise(ours, theirs)


def test_a_killed_run_goes_on_from_its_checkpoint(found: Found) -> None:
    found.gang.check("resumed", 2)
    resumed, apart = runs.rows(found.runs / "killed"), found.rows("apart")
    assert list(resumed) == [0, 1, 2, 3, 4]
    for step in (3, 4):
        same(resumed[step], apart[step])


def test_samples_are_shown_where_rank_0_has_no_engine(found: Found) -> None:
    found.gang.check("apart", 2)
    lines = (found.runs / "apart" / "rollouts.jsonl").read_text().splitlines()
    assert len(lines) == 16


def test_roles_that_cannot_work_are_refused_once(found: Found) -> None:
    wanted = {
        "nobody": "--cluster.rollout_ranks 2: leaves none of the 2 ranks to train",
        "gather": "--sync.route gather: updates only engines on train ranks",
    }
    for name, sentence in wanted.items():
        assert [found.gang.code(name, rank) for rank in (0, 1)] == [2, 2]
        assert sentence in found.gang.text(name)
