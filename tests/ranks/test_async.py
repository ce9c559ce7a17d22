"""The asynchronous loop on ranks: one samples and one trains."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import kit, runs
from tests.ranks.test_roles import same

pytestmark = pytest.mark.ranks(2)

KEPT = "--checkpoint.every", 2, "--checkpoint.keep", 0, "--checkpoint.no_export_hf"
APART = "--cluster.rollout_ranks", 1
ASYNC = *APART, "--mode", "async"
SLOW = "--debug.decode_floor_ms", 20, "--rollout.progress_interval_s", 0.05
AGE = "training/off_policy/trajectory_staleness_worst"


class Found:
    def __init__(self, folder: Path):
        self.runs = folder / "runs"
        model = runs.tiny_model(folder / "model")

        def job(name: str, *more: object, run: str = "") -> runs.Job:
            argv = runs.arguments(model, self.runs, run or name, *KEPT, *more)
            return {"name": name, "argv": argv}

        old = *ASYNC, "--async.alpha", 2, *SLOW
        kill = job("killed", *old, "--run.steps", 6, "--debug.kill_at_step", 3)
        self.killed = runs.run(2, [kill], folder / "killed")
        replay = "--debug.replay", self.runs / "recorded"
        self.gang = runs.run(
            2,
            [
                job("sync", *APART),
                job("alpha 0", *ASYNC, "--async.alpha", 0),
                job("resumed", *old, "--run.steps", 6, run="killed"),
                job("in place", *old, "--async.weight_update", "in_place", "--run.steps", 6),
                job("fraction", *ASYNC, "--async.alpha", 0.5, *SLOW, "--async.extra_prompts", 2),
                job("recorded", *old, "--run.steps", 5, "--debug.record"),
                job("replayed", *ASYNC, "--async.alpha", 2, "--run.steps", 5, *replay),
                job("alone", "--mode", "async"),
            ],
            folder / "gang",
        )

    def rows(self, name: str) -> dict[int, dict[str, Any]]:
        self.gang.check(name, 2)
        return runs.rows(self.runs / name)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("async"))


def test_alpha_0_is_the_synchronous_run_bit_by_bit(found: Found) -> None:
    ours, sync = found.rows("alpha 0"), found.rows("sync")
    for step in sync:
        mine = {k: v for k, v in ours[step].items() if not k.startswith("async/")}
        same(mine, {k: v for k, v in sync[step].items() if k != "sched/short_of_groups"})
    a, b = (runs.checkpoint(found.runs / n, 4) for n in ("alpha 0", "sync"))
    for part in (a, b):
        part.pop("common")
    assert a.pop("state") == b.pop("state")
    kit.assert_bitwise(a, b)


@pytest.mark.parametrize("name", ["resumed", "in place"])
def test_samples_are_stale_and_never_older_than_alpha(found: Found, name: str) -> None:
    found.gang.check(name, 2)
    rows = runs.rows(found.runs / {"resumed": "killed"}.get(name, name))
    assert list(rows) == list(range(7))
    ages = [rows[step][AGE + "/max"] for step in range(1, 7)]
    assert ages[0] == 0 and 1 <= max(ages) <= 2
    assert max(rows[s]["training/off_policy/trajectory_spans/max"] for s in (2, 3, 4, 5)) > 1
    assert sum(row.get("async/carried", 0.0) for row in rows.values()) > 0


def test_a_killed_run_goes_on_with_the_samples_that_it_had(found: Found) -> None:
    """The first batch after the restart is of versions before it."""
    assert found.killed.codes[0] == -signal.SIGKILL
    found.gang.check("resumed", 2)
    rows = runs.rows(found.runs / "killed")
    assert rows[3][AGE + "/mean"] > 0
    folder = found.runs / "killed" / "checkpoints" / "step_000002"
    assert (folder / "buffer" / "controller.msgpack").stat().st_size > 0
    ours = json.loads((folder / "state.json").read_text())
    assert ours["source"]["issued"] == 4 * (2 + 2)  # of version 2 nothing has been started


def test_a_fraction_of_alpha_and_prompts_to_spare(found: Found) -> None:
    rows = found.rows("fraction")
    assert max(rows[step][AGE + "/max"] for step in (1, 2, 3, 4)) <= 1
    assert all(rows[step]["training/trained_rows"] == 16 for step in (1, 2, 3, 4))


def test_a_replay_trains_the_recorded_batches_bit_by_bit(found: Found) -> None:
    """Its engine decodes for the evaluations alone, and twenty times as fast."""
    recorded, replayed = found.rows("recorded"), found.rows("replayed")
    engines = "sched/", "async/", "sync/", "memory/"
    for step in range(1, 6):
        mine, theirs = (
            {k: v for k, v in runs.same(rows[step]).items() if not k.startswith(engines)}
            for rows in (replayed, recorded)
        )
        assert mine == theirs, step
        assert replayed[step]["sched/decode_tokens"] == 0 < recorded[step]["sched/decode_tokens"]
    assert max(row[AGE + "/max"] for step, row in replayed.items() if step) >= 1
    a, b = (runs.checkpoint(found.runs / name, 5) for name in ("replayed", "recorded"))
    for part in (a, b):
        part.pop("common")
        part.pop("state")
    kit.assert_bitwise(a, b)


def test_the_split_that_rates_propose_is_in_the_metrics_and_said(found: Found) -> None:
    row = found.rows("in place")[6]
    assert row["balance/rollout_ranks"] == 1 and row["balance/speed_up"] == 1
    assert 0 < row["balance/train_share"] < 1
    assert "no estimate yet" in found.gang.text("in place")
    assert "1 ranks train and 1 sample" in found.gang.text("resumed")


def test_async_without_ranks_that_sample_is_refused(found: Found) -> None:
    assert [found.gang.code("alone", rank) for rank in (0, 1)] == [2, 2]
    assert "--cluster.rollout_ranks 0: --mode async needs" in found.gang.text("alone")


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_histopipe_places_by_the_epoch_before(tmp_path: Path) -> None:
    """Two ranks sample, one trains: epochs of two steps, one step off-policy."""
    model = runs.tiny_model(tmp_path / "model")
    pipe = "--rollout.routing", "histopipe", "--data.num_prompts", 8
    words = "--mode", "async", "--cluster.rollout_ranks", 2, "--async.alpha", 1
    argv = runs.arguments(model, tmp_path, "pipe", *pipe, *words, *SLOW, "--run.steps", 6)
    job: runs.Job = {"name": "pipe", "argv": [*argv, "--checkpoint.no_export_hf"]}
    gang = runs.run(3, [job], tmp_path / "gang")
    gang.check("pipe", 3)
    rows = runs.rows(tmp_path / "pipe")
    assert rows[1]["pipe/known"] == 0 and rows[6]["pipe/known"] == 1
    assert all(0 <= rows[step]["pipe/higher"] < 1 for step in range(1, 7))
    assert max(rows[step][AGE + "/max"] for step in range(1, 7)) == 1
    assert all(rows[step]["training/trained_rows"] == 16 for step in range(1, 7))
