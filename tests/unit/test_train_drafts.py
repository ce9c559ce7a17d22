"""Drafts from history through the whole program: epochs, checkpoints, what stays the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import runs

EPOCHS = (
    *("--data.num_prompts", 8, "--run.steps", 6, "--rollout.dtype", "float64"),
    *(
        "--log.rollouts",
        -1,
        "--log.rollout_tokens",
        -1,
        "--checkpoint.every",
        1,
        "--checkpoint.keep",
        0,
    ),
    *("--checkpoint.no_export_hf", "--eval.every", 2, "--eval.no_at_start"),
)
"""Three epochs of two steps; the engine is exact."""
STEADY = "--rollout.draft", "history_reward", "--debug.deterministic_order"


class Found:
    def __init__(self, folder: Path):
        self.runs, model = folder / "runs", runs.tiny_model(folder / "model")

        def job(name: str, *keys: object) -> runs.Job:
            return {
                "name": name,
                "argv": runs.arguments(model, self.runs, name, *EPOCHS, *keys),
            }

        third = self.runs / "history" / "checkpoints" / "step_000003"
        jobs = [
            job("none"),
            job("history", *STEADY),
            job("resumed", *STEADY, "--run.resume", third),
            job("idle", "--draft.max_length", 8),
            job("width", "--rollout.draft", "ngram", "--draft.verify_tokens", 4),
        ]
        self.gang = runs.run(1, jobs, folder / "gang")

    def rows(self, name: str) -> dict[int, dict[str, Any]]:
        self.gang.check(name)
        return runs.rows(self.runs / name)

    def samples(self, name: str) -> dict[str, tuple[str, float]]:
        return {row["id"]: (row["response"], row["score"]) for row in self.lines(name)}

    def lines(self, name: str) -> list[dict[str, Any]]:
        lines = (self.runs / name / "rollouts.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("drafts"))


def test_samples_are_those_of_plain_decoding_in_fewer_decode_steps(found: Found) -> None:
    none, history = found.rows("none"), found.rows("history")
    assert found.samples("history") == found.samples("none")
    assert len(found.samples("none")) == 6 * 16
    for step in none:
        one, two = none[step], history[step]
        assert two["sched/decode_tokens"] == one["sched/decode_tokens"]
        assert "spec/gate" not in one and two["spec/gate"] == 1
        assert two["sched/decode_steps"] <= one["sched/decode_steps"]
    assert sum(row["spec/speculated_tokens"] for row in history.values()) > 0.01
    assert sum(row["spec/drafted_tokens"] for row in history.values()) > 100


def test_every_token_says_whether_it_came_from_a_draft(found: Found) -> None:
    assert not any("drafted" in line["tokens"] for line in found.lines("none"))
    flags: dict[int, int] = dict.fromkeys(range(1, 7), 0)
    for line in found.lines("history"):
        runs_of = line["tokens"]["drafted"]
        assert sum(n for _, n in runs_of) == line["num_tokens"]
        flags[line["step"]] += sum(n for is_drafted, n in runs_of if is_drafted)
    first = found.rows("history")[1]
    accepted = first["spec/speculated_tokens"] * first["sched/decode_tokens"]
    assert flags[1] == pytest.approx(accepted)
    assert flags[5] + flags[6] > 0


def test_validation_leaves_nothing_in_the_library(found: Found) -> None:
    """Evaluation had 8 prompts of its own in steps 2, 4 and 6."""
    known = [row["spec/history_prompts"] for row in found.rows("history").values()]
    assert known[0] <= 4 and max(known) == known[1] <= 8 and known[-1] == known[1]


def test_a_resumed_run_drafts_from_what_the_checkpoint_has_and_goes_on_bit_by_bit(
    found: Found,
) -> None:
    history, resumed = found.rows("history"), found.rows("resumed")
    assert list(resumed) == [4, 5, 6]
    for step, row in resumed.items():
        assert runs.same(row) == runs.same(history[step]), step


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("idle", "--draft.max_length: has no effect without --rollout.draft"),
        (
            "width",
            "--draft.verify_tokens 4: only SGLang uses it; unset it, or set --draft.max_length",
        ),
    ],
)
def test_what_cannot_work_is_one_sentence(found: Found, name: str, words: str) -> None:
    assert found.gang.code(name) == 2
    assert words in found.gang.text(name)
