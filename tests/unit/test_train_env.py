"""Environments through the whole program: what is trained, redundancy, failures, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import runs

BARE = (
    *("--checkpoint.no_at_end", "--checkpoint.no_export_hf", "--eval.no_at_start"),
    *("--eval.no_at_end", "--rollout.dtype", "float64", "--log.rollouts", -1),
)
LAKE = "--env", "frozenlake", "--env.max_turn_tokens", 1, "--env.max_turns", 5
ONE, TWO = ("--run.steps", 1), ("--run.steps", 2)


class Found:
    """Runs of 4 groups of 4 a step."""

    def __init__(self, folder: Path):
        self.runs = folder / "runs"
        label = runs.tiny_model(folder / "label")
        lake = runs.tiny_model(folder / "lake", task="frozenlake")

        def job(name: str, model: Path, *keys: object) -> runs.Job:
            return {"name": name, "argv": runs.arguments(model, self.runs, name, *BARE, *keys)}

        walk = *LAKE, "--rollout.max_tokens", 100, "--reward", "exact"
        odd = "--env", "tests.odd_envs.Odd", "--env.max_turn_tokens", 3, "--env.timeout_s", 2
        jobs = [
            job("plain", label, *ONE),
            job("single", label, *ONE, "--env", "single_turn"),
            job("lake", lake, *walk, *TWO, "--eval.at_end", "--debug.deterministic_order"),
            job("again", lake, *walk, *ONE, "--debug.deterministic_order"),
            job("more", lake, *walk, *ONE, "--env.num_groups", 6, "--env.group_size", 5),
            job("odd", label, *ONE, *odd, "--data.prompts_per_step", 2),
            job("few", lake, *walk, "--env.group_size", 3),
            job("idle", label, "--env.max_turns", 3),
            job("stream", lake, *walk, "--mode", "stream"),
            job("no env", label, "--env", "lake"),
        ]
        self.gang = runs.run(1, jobs, folder / "gang")

    def rows(self, name: str) -> dict[int, dict[str, Any]]:
        self.gang.check(name)
        return runs.rows(self.runs / name)

    def read(self, name: str) -> list[dict[str, Any]]:
        lines = (self.runs / name / "rollouts.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("env"))


def test_an_environment_of_one_turn_samples_and_scores_what_a_run_without_one_does(found):
    plain, single = found.read("plain"), found.read("single")
    keys = "id", "prompt", "response", "score", "num_tokens", "finish"
    assert [[r[k] for k in keys] for r in plain] == [[r[k] for k in keys] for r in single]
    one, other = found.rows("plain")[1], found.rows("single")[1]
    for key in ("actor/loss", "actor/grad_norm", "critic/score/mean", "training/trained_rows"):
        assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-7), key
    assert other["env/turns"] == 1 and "env/observed_tokens" not in other


def test_a_walk_is_trained_on_its_moves_alone(found):
    """Every board is 20 tokens, every move one: so many log-probs agree with the learner's, which
    sees the whole walk at once, and so many are counted."""
    for row in found.rows("lake").values():
        turns = row["env/turns"]
        assert 1 <= turns <= 5
        assert row["response_length/mean"] == pytest.approx(turns + 20 * (turns - 1))
        assert row["env/observed_tokens"] == pytest.approx(
            20 * (turns - 1) / (turns + 20 * (turns - 1))
        )
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert row["env/episodes"] == 16 and row["env/failures/error"] == 0
        assert row["sched/decode_tokens"] == 16 * turns
    last = found.rows("lake")[2]
    assert 0 <= last["val-core/frozenlake/acc/mean@1"] <= 1
    assert last["val-aux/frozenlake/num_prompts"] == 8


def test_with_a_barrier_a_run_repeats_itself(found):
    lake, again = found.rows("lake")[1], found.rows("again")[1]
    for key in ("actor/loss", "actor/grad_norm", "env/turns", "critic/score/mean"):
        assert lake[key] == again[key], key


def test_redundant_episodes_make_no_larger_batch(found):
    row = found.rows("more")[1]
    assert row["training/trained_rows"] == 16
    assert len(found.read("more")) == 16


def test_failed_episodes_are_counted_by_reason_and_not_trained(found):
    row = found.rows("odd")[1]
    assert row["training/trained_rows"] == 0  # of every group only the fourth has not failed
    assert row["env/failures/crash"] >= 4 and row["env/failures/timeout"] >= 2
    assert row["env/failures/error"] >= 2 and row["reward/errors"] == 6
    assert row["reward/failures/crash"] == 2
    by_finish = [r["finish"] for r in found.read("odd")]
    assert by_finish.count("failed") == 6 and by_finish.count("stop") == 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("few", "--env.group_size 3: must be at least rollout.samples_per_prompt 4"),
        ("idle", "--env.max_turns: has no effect without --env"),
        ("stream", "--mode stream: moves running responses to other ranks, and episodes"),
        ("no env", "--env lake: allowed are alfworld, blackjack, endpoint, "),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(found, name, why):
    assert found.gang.code(name) == 2
    assert why in found.gang.text(name)
