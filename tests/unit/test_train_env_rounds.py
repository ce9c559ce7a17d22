"""Environments with tail batching and with drafts from earlier epochs, through the whole program:
an episode is what a response is elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.unit.test_train_env import BARE, LAKE

WALK = *BARE, *LAKE, "--rollout.max_tokens", 100, "--reward", "exact", "--run.steps", 3
TAIL = "--schedule", "tail_batching"
STEADY = "--debug.deterministic_order", "--algo.rollout_is", "none"


class Found:
    """Runs of 4 groups of 4 a step. Short rounds of tail batching start 5 groups of 5."""

    def __init__(self, folder: Path):
        self.runs, model = folder / "runs", runs.tiny_model(folder / "model", task="frozenlake")

        def job(name: str, *keys: object) -> runs.Job:
            return {"name": name, "argv": runs.arguments(model, self.runs, name, *WALK, *keys)}

        all_of_them = "--tail.eta_prompts", 1, "--tail.eta_samples", 1
        clock = *TAIL, "--algo.rollout_is", "none"
        epochs = (
            *("--data.num_prompts", 8, "--run.steps", 4, "--rollout.temperature", 0.5),
            *("--env.max_turn_tokens", 6, "--rollout.max_tokens", 200, *STEADY),
        )
        jobs = [
            job("all", *STEADY, "--run.steps", 1),
            job("tail of all", *STEADY, *TAIL, *all_of_them, "--run.steps", 1),
            job("tail", *STEADY, *TAIL, "--run.steps", 6),
            job("clock", *clock),
            job("replay", *clock, "--debug.replay", self.runs / "clock"),
            job("no drafts", *epochs),
            job("drafts", *epochs, "--rollout.draft", "history"),
        ]
        self.gang = runs.run(1, jobs, folder / "gang")

    def rows(self, name: str) -> dict[int, dict[str, Any]]:
        self.gang.check(name)
        return runs.rows(self.runs / name)

    def read(self, name: str, file: str = "rollouts.jsonl") -> list[dict[str, Any]]:
        self.gang.check(name)
        lines = (self.runs / name / file).read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("env_rounds"))


def test_episodes_that_are_late_in_short_rounds_are_those_of_the_long_one(found):
    """Five groups of five episodes start, and four of four count, by tokens of the episode."""
    rows = found.rows("tail")
    assert [row["sched/long_round"] for row in rows.values()] == [0, 0, 0, 0, 1, 0]
    assert [row["sched/queue"] for row in rows.values()] == [1, 2, 3, 4, 0, 1]
    assert all(row["training/trained_rows"] == 16 for row in rows.values())
    assert [row["env/episodes"] for row in rows.values()] == [25, 25, 25, 25, 16, 25]
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows.values())
    logged = found.read("tail", "rounds.jsonl")
    late = [s[1] for r in logged[:4] for s in r["started"] if s[0] not in r["kept"]]
    assert len(late) == 4 and [s[1] for s in logged[4]["started"]] == late
    for round_ in logged[:4]:
        lengths = [n for _, n, _, _ in round_["counted"]]
        assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_tail_batching_samples_the_episodes_of_a_run_without_it(found):
    keys = "id", "prompt", "response", "score", "num_tokens", "finish", "turns"
    every = {row["id"]: [row[k] for k in keys] for row in found.read("all")}
    same = {row["id"]: [row[k] for k in keys] for row in found.read("tail of all")}
    assert len(every) == 16 and same == every
    for key in ("actor/loss", "actor/grad_norm", "env/turns", "critic/score/mean"):
        assert found.rows("tail of all")[1][key] == found.rows("all")[1][key], key
    first = {row["id"]: row for row in found.read("tail") if row["step"] == 1}
    both = first.keys() & every.keys()
    assert len(first) == 16 and len(both) > 8
    assert all([first[id][k] for k in keys] == every[id] for id in both)


def test_a_replay_of_a_tail_batched_run_trains_the_same_episodes(found):
    """The clock decided which episodes came first; the others were aborted."""
    clock, replay = found.read("clock"), found.read("replay")
    assert [row["id"] for row in clock] == [row["id"] for row in replay]
    for one, two in zip(clock, replay, strict=True):
        for key in ("response", "score", "turns", "advantage"):
            assert one[key] == two[key], (one["id"], key)
    assert len(clock) == 3 * 16
    one, two = found.rows("clock"), found.rows("replay")
    for step in one:
        for key in ("actor/loss", "actor/grad_norm", "critic/score/mean"):
            assert two[step][key] == pytest.approx(one[step][key], rel=1e-9), (step, key)


def test_turns_draft_from_the_epoch_before_and_are_the_same(found):
    keys = "id", "prompt", "response", "score", "num_tokens", "finish", "turns", "advantage"
    plain, drafted = found.read("no drafts"), found.read("drafts")
    assert len(plain) == 4 * 16
    assert [[r[k] for k in keys] for r in plain] == [[r[k] for k in keys] for r in drafted]
    rows = found.rows("drafts")
    assert [row["spec/history_prompts"] for row in rows.values()] == [4, 8, 8, 8]
    accepted = [r["spec/speculated_tokens"] * r["sched/decode_tokens"] for r in rows.values()]
    assert sum(accepted[2:]) > sum(accepted[:2])
