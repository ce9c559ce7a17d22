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
EPOCHS = "--data.num_prompts", 8, "--rollout.temperature", 0.5
"""Epochs of two steps, whose responses resemble each other."""
EXACT = *EPOCHS, "--rollout.dtype", "float64", "--log.rollouts", -1, "--log.rollout_tokens", -1
DRAFTS = (
    *("--rollout.draft", "history", "--draft.no_adaptive"),
    *("--draft.min_match", 6, "--draft.min_token_prob", 0),
)
"""Drafts after six known tokens: hardly any are from the request's own text."""
AGE = "training/off_policy/trajectory_staleness_worst"


class Found:
    def __init__(self, folder: Path):
        self.runs = folder / "runs"
        model = runs.tiny_model(folder / "model")

        def job(name: str, *more: object, run: str = "") -> runs.Job:
            argv = runs.arguments(model, self.runs, run or name, *KEPT, *more)
            return {"name": name, "argv": argv}

        old = *ASYNC, "--async.alpha", 2, *SLOW
        last = *old, *EPOCHS, *DRAFTS
        kill = job("killed", *last, "--run.steps", 6, "--debug.kill_at_step", 3)
        self.killed = runs.run(2, [kill], folder / "killed")
        replay = "--debug.replay", self.runs / "recorded"
        self.gang = runs.run(
            2,
            [
                job("sync", *APART, *EXACT),
                job("alpha 0", *ASYNC, "--async.alpha", 0, *EXACT),
                job("drafts", *ASYNC, "--async.alpha", 0, *EXACT, *DRAFTS),
                job("resumed", *last, "--run.steps", 6, run="killed"),
                job("in place", *old, "--async.weight_update", "in_place", "--run.steps", 6),
                job("fraction", *ASYNC, "--async.alpha", 0.5, *SLOW, "--async.extra_prompts", 2),
                job("recorded", *last, "--run.steps", 5, "--debug.record"),
                job("replayed", *ASYNC, "--async.alpha", 2, *EPOCHS, "--run.steps", 5, *replay),
                job("alone", "--mode", "async"),
            ],
            folder / "gang",
        )

    def rows(self, name: str) -> dict[int, dict[str, Any]]:
        self.gang.check(name, 2)
        return runs.rows(self.runs / name)

    def tokens(self, name: str) -> dict[str, tuple[list[str], list[float]]]:
        """Tokens and log-probs of every response."""
        lines = (self.runs / name / "rollouts.jsonl").read_text().splitlines()
        parts = {row["id"]: row["tokens"] for row in map(json.loads, lines)}
        return {i: (part["pieces"], part["logps"]) for i, part in parts.items()}


def of_step(row: dict[str, Any]) -> float:
    """Number of tokens of the histories of a step; prompts are shorter than the part that is
    kept."""
    return 16 * (row["prompt_length/mean"] + row["response_length/mean"])


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


def test_drafts_of_the_epoch_before_are_accepted_and_change_no_response(found: Found) -> None:
    none, rows = found.rows("alpha 0"), found.rows("drafts")
    assert [rows[step]["spec/history_prompts"] for step in (1, 2, 3, 4)] == [4, 8, 8, 8]
    tokens = [of_step(rows[step]) for step in (1, 2, 3, 4)]
    for step in (1, 2, 3, 4):
        known = rows[step]["spec/history_tokens"]
        assert known == pytest.approx(sum(tokens[:step])), step
        assert rows[step]["sched/decode_tokens"] == none[step]["sched/decode_tokens"]
        assert rows[step]["critic/score/mean"] == none[step]["critic/score/mean"]
    first, second = (
        sum(rows[step]["spec/speculated_tokens"] for step in steps) for steps in ((1, 2), (3, 4))
    )
    assert second > 2 * first
    ours, theirs = found.tokens("drafts"), found.tokens("alpha 0")
    assert len(theirs) == 4 * 16 and ours.keys() == theirs.keys()
    for i, (pieces, logps) in theirs.items():
        assert ours[i][0] == pieces, i
        assert ours[i][1] == pytest.approx(logps, abs=0.0011), i  # written with three digits


def test_a_resumed_run_goes_on_with_the_histories_that_it_had(found: Found) -> None:
    """Step 3 is of the process that was started again."""
    found.gang.check("resumed", 2)
    rows = runs.rows(found.runs / "killed")
    assert rows[2]["spec/history_prompts"] == 8
    known = [rows[step]["spec/history_tokens"] for step in (2, 3)]
    tokens = of_step(rows[3])
    assert known[1] == pytest.approx(known[0] + tokens)
    assert sum(rows[step]["spec/speculated_tokens"] for step in (4, 5, 6)) > 0


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
    engines = "sched/", "async/", "sync/", "memory/", "spec/"
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
    """RhymeRL whole: two ranks sample with drafts, one trains one step off-policy."""
    model = runs.tiny_model(tmp_path / "model")
    pipe = "--rollout.routing", "histopipe", *EPOCHS, *DRAFTS
    words = "--mode", "async", "--cluster.rollout_ranks", 2, "--async.alpha", 1
    argv = runs.arguments(model, tmp_path, "pipe", *pipe, *words, *SLOW, "--run.steps", 6)
    job: runs.Job = {"name": "pipe", "argv": [*argv, "--checkpoint.no_export_hf"]}
    gang = runs.run(3, [job], tmp_path / "gang")
    gang.check("pipe", 3)
    rows = runs.rows(tmp_path / "pipe")
    assert sum(rows[step]["spec/speculated_tokens"] for step in (4, 5, 6)) > 0
    assert rows[6]["spec/history_prompts"] == 8
    assert rows[1]["pipe/known"] == 0 and rows[6]["pipe/known"] == 1
    assert all(0 <= rows[step]["pipe/higher"] < 1 for step in range(1, 7))
    assert max(rows[step][AGE + "/max"] for step in range(1, 7)) == 1
    assert all(rows[step]["training/trained_rows"] == 16 for step in range(1, 7))
