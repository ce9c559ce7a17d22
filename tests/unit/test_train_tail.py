"""Tail batching through the whole program: rounds, accounts, checkpoints, replays."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.data import label_task
from tests import runs

KEPT = "--checkpoint.every", 1, "--checkpoint.keep", 0, "--checkpoint.no_export_hf"
TAIL = (
    *("--schedule", "tail_batching", "--debug.deterministic_order", "--run.steps", 6),
    *("--eval.no_at_start", "--eval.no_at_end", "--rollout.max_running_requests", 64, *KEPT),
)

LOSE = """
import json, pathlib, shutil, sys
run, folder = map(pathlib.Path, sys.argv[1:])
shutil.copytree(run / "checkpoints/step_000001", folder / "lost")
state = json.loads((folder / "lost/state.json").read_text())
state["source"]["queue"] = {"": [[0, 3], [0, 77]]}
(folder / "lost/state.json").write_text(json.dumps(state))
from rlcore.trainer import seal
(folder / "lost" / seal.MANIFEST).unlink()
assert not seal.write(folder / "lost", None)
"""
"""A checkpoint whose queue has a prompt that the data do not have."""


class Found:
    """Runs with 4 prompts of 4 responses a step, of which 5 are started each time."""

    def __init__(self, folder: Path):
        self.runs, model = folder / "runs", runs.tiny_model(folder / "model")

        def job(name: str, *keys: object, run: str = "") -> runs.Job:
            argv = runs.arguments(model, self.runs, run or name, *TAIL, *keys)
            return {"name": name, "argv": argv}

        saved = self.runs / "one" / "checkpoints" / "step_000003"
        rows = folder / "rows.jsonl"
        texts = [label_task.make("val", 0, i).prompt for i in range(4)]
        rows.write_text("".join(json.dumps({"question": t, "answer": "1"}) + "\n" for t in texts))
        few = "--data.train", rows, "--data.template", "none"
        jobs = [
            job("one"),
            job("again"),
            job("resumed", "--run.resume", saved),
            job(
                "dynamic",
                "--algo.equal_reward_groups",
                "replace",
                "--reward",
                "tests.scores.half",
                "--run.steps",
                3,
            ),
            job("few", *few),
            job("bad eta", "--tail.eta_prompts", 0.5),
            job("no tail", "--schedule", "all", "--tail.eta_samples", 1.0),
            job("quotas", "--tail.dataset_quotas", "label=3"),
        ]
        clock = (
            "--debug.no_deterministic_order",
            "--algo.rollout_is",  # the sampler's last bits would weigh the gradient
            "none",
            "--reward",
            "tests.scores.unsteady",
            "--reward.workers",
            4,
        )
        by = *clock, "--debug.replay", self.runs / "clock" / "rounds.jsonl"
        fourth = self.runs / "clock" / "checkpoints" / "step_000004"
        jobs += [
            job("clock", *clock),
            job("replay", *by),
            job("second replay", *by, "--run.steps", 3),
            job("replay of a part", *by, "--run.resume", fourth),
            job("long replay", *by, "--run.steps", 7, "--run.resume", "auto", run="replay"),
            job("other seed", *by, "--run.seed", 1),
            job("no log", *clock, "--debug.replay", folder / "nothing.jsonl"),
            job("its own log", *by, run="clock"),
        ]
        hangs = (
            *("--schedule", "all", "--reward", "tests.scores.hangs", "--run.steps", 2),
            *("--data.num_prompts", 4, "--reward.adaptive_timeout", "--reward.timeout_s", 2),
            *("--reward.min_timeout_s", 0.8, "--reward.workers", 4),
        )
        jobs += [
            job("finite", "--data.num_prompts", 12, "--run.steps", 2),
            job(
                "lost queue",
                *("--data.num_prompts", 12, "--run.resume", folder / "lost"),
                run="finite",
            )
            | {"before": [sys.executable, "-c", LOSE, str(self.runs / "finite"), str(folder)]},
        ]
        first = self.runs / "hangs" / "checkpoints" / "step_000001"
        jobs += [
            job("hangs", *hangs),
            job("hangs on", *hangs, "--run.resume", first),
            job("no least", *hangs, "--reward.min_timeout_s", 9),
        ]
        self.gang = runs.run(1, jobs, folder / "gang")

    def rows(self, name: str) -> dict[int, dict[str, Any]]:
        self.gang.check(name)
        return runs.rows(self.runs / name)

    def source(self, name: str, step: int) -> dict[str, Any]:
        file = self.runs / name / "checkpoints" / f"step_{step:06d}" / "state.json"
        return json.loads(file.read_text())["source"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("tail"))


def test_four_short_rounds_and_a_long_one_and_every_step_has_its_samples(found: Found) -> None:
    rows = found.rows("one")
    assert [row["sched/long_round"] for row in rows.values()] == [0, 0, 0, 0, 1, 0]
    assert [row["sched/queue"] for row in rows.values()] == [1, 2, 3, 4, 0, 1]
    assert all(row["training/trained_rows"] == 16 for row in rows.values())
    assert all(row["sched/length_shift"] <= 0 for step, row in rows.items() if step != 5)
    assert "sched/length_shift" not in rows[5] and "sched/surplus_tokens" not in rows[5]


def test_the_long_round_is_of_the_prompts_that_were_late(found: Found) -> None:
    found.gang.check("one")
    late = found.source("one", 4)["queue"][""]
    accounts = found.source("one", 5)["accounts"]
    assert len(late) == 4 and found.source("one", 5)["queue"][""] == []
    assert accounts == {"0": {"started": 20, "trained": 20}}


def test_lengths_decide_so_a_run_repeats_itself(found: Found) -> None:
    one, again = found.rows("one"), found.rows("again")
    for step in one:
        assert runs.same(again[step]) == runs.same(one[step]), step


def test_a_resumed_run_goes_on_with_the_queue_bit_by_bit(found: Found) -> None:
    one, resumed = found.rows("one"), found.rows("resumed")
    assert list(resumed) == [4, 5, 6]
    for step, row in resumed.items():
        assert runs.same(row) == runs.same(one[step]), step
    assert found.source("resumed", 6) == found.source("one", 6)


def test_with_dynamic_sampling_groups_of_equal_rewards_are_replaced(found: Found) -> None:
    for row in found.rows("dynamic").values():
        assert row["training/equal_reward_groups"] == 0
        assert row["training/trained_rows"] == 16
    last = found.rows("dynamic")[3]
    assert sum(row["training/replaced_groups"] for row in found.rows("dynamic").values()) > 0
    assert last["sched/prompts_dropped"] > 0 and last["sched/short_of_groups"] == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("few", "has 4 prompts but a short round starts 5 different prompts"),
        ("bad eta", "--tail.eta_prompts 0.5: must be at least 1"),
        ("no tail", "--tail.eta_samples: has no effect without --schedule tail_batching"),
        ("no least", "--reward.min_timeout_s 9: must be at most reward.timeout_s 2"),
        (
            "lost queue",
            "queue of prompts names row 77 of data.train, which has 12 rows; resume with the same",
        ),
        ("quotas", "their sum must be data.prompts_per_step 4"),
    ],
)
def test_what_cannot_work_is_one_sentence(found: Found, name: str, words: str) -> None:
    assert found.gang.code(name) == 2
    assert words in found.gang.text(name)
    assert "Traceback" not in found.gang.text(name)


def test_a_checkpoint_that_does_not_fit_costs_the_run_nothing(found: Found) -> None:
    """It failed in the folder of `finite`, going back to a step before its last."""
    assert found.gang.code("lost queue") == 2
    assert list(found.rows("finite")) == [1, 2]
    folder = found.runs / "finite" / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["step_000001", "step_000002"]
    queue = json.loads((found.runs.parent / "lost" / "state.json").read_text())["source"]["queue"]
    assert queue == {"": [[0, 3], [0, 77]]}


# ---- rewards that take too long


def test_deadlines_of_rewards_shorten_and_are_in_the_checkpoint(found: Found) -> None:
    """Four prompts, so the second step has seen all of them; so has the run that goes on."""
    rows = found.rows("hangs")
    for row in (rows[2], found.rows("hangs on")[2]):
        assert row["reward/timeouts"] == 4
        assert row["reward/timeout_s/mean"] == pytest.approx(0.8)
        assert row["reward/timeout_s/min"] == 0.8
    assert rows[1]["reward/timeout_s/mean"] > 0.8, "the first of a prompt has all the time"
    file = found.runs / "hangs" / "checkpoints" / "step_000001" / "state.json"
    reference_latency = json.loads(file.read_text())["deadlines"]["reference_latency"]
    assert set(reference_latency) == {f"label/{row}" for row in range(4)}


# ---- replays

BY_THE_CLOCK = ("sched/", "rollout_corr/", "training/rollout_")
"""Surplus; and the sampler's log-probs, whose last bits depend on who is decoded beside whom."""


def batch(row: dict[str, Any]) -> dict[str, Any]:
    """What the samples of a step and their gradient came to."""
    return {k: v for k, v in runs.same(row).items() if not k.startswith(BY_THE_CLOCK)}


def rounds(found: Found, name: str) -> list[dict[str, Any]]:
    found.gang.check(name)
    lines = (found.runs / name / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_log_has_every_round_and_the_clock_decided_them(found: Found) -> None:
    logged = rounds(found, "clock")
    assert [r["step"] for r in logged] == [1, 2, 3, 4, 5, 6]
    assert [len(r["started"]) for r in logged] == [5, 5, 5, 5, 4, 5]
    lengths = [[n for _, n, _, _ in r["counted"]] for r in logged]
    assert any(ns != sorted(ns) for ns in lengths), "else the shorter had always come first"


def test_a_replay_makes_the_same_batches(found: Found) -> None:
    """Ids, lengths, scores, what is kept, and every figure of the update that they gave."""
    clock, logged = found.rows("clock"), rounds(found, "clock")
    assert rounds(found, "replay")[:6] == logged
    replayed = found.rows("replay")
    for step in clock:
        assert batch(replayed[step]) == batch(clock[step]), step
        assert len(batch(clock[step])) > 30
    texts = [(found.runs / n / "rollouts.jsonl").read_text() for n in ("clock", "replay")]
    assert texts[0] == texts[1]
    assert "differ from the log" not in found.gang.text("replay")


def test_two_replays_agree_in_every_bit(found: Found) -> None:
    """Sampler log-probs too: nothing is aborted while something that counts is decoded."""
    one, two = found.rows("replay"), found.rows("second replay")
    assert list(two) == [1, 2, 3]
    for step in two:
        for name in ("rollout_corr/kl", "training/rollout_probs_diff_max", "actor/grad_norm"):
            assert one[step][name] == two[step][name], (step, name)


def test_a_resumed_run_replays_the_rest(found: Found) -> None:
    clock, rest = found.rows("clock"), found.rows("replay of a part")
    assert list(rest) == [5, 6]
    for step, row in rest.items():
        assert batch(row) == batch(clock[step]), step
    assert rounds(found, "replay of a part") == rounds(found, "clock")[4:]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("long replay", 1, "has no round that starts with t29; it ends with step 6: take fewer"),
        ("other seed", 1, "of step 1 was sampled with --run.seed 0, not 1; replay with"),
        ("no log", 2, "nothing.jsonl: no such file; give a run's rounds.jsonl"),
        ("its own log", 2, "is the log that this run itself writes; set another --run.name"),
    ],
)
def test_a_log_that_does_not_fit_is_one_sentence(
    found: Found, name: str, code: int, words: str
) -> None:
    assert found.gang.code(name) == code
    text = found.gang.text(name)
    assert words in text and text.count("--debug.replay") == 1
    assert "Traceback" not in text


def test_a_failed_replay_leaves_the_log_that_it_read(found: Found) -> None:
    assert [r["step"] for r in rounds(found, "clock")] == [1, 2, 3, 4, 5, 6]
