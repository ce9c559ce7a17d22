"""Drafts from history over two ranks: what one has sampled, the other may draft from."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import runs

pytestmark = [pytest.mark.ranks(2), pytest.mark.slow]

STEPS = 6
"""Three epochs of two steps."""


class Worlds:
    def __init__(self, folder: Path):
        self.runs, model = folder / "runs", runs.tiny_model(folder / "model")

        def job(name: str, *keys: object) -> runs.Job:
            settings = {
                "data.num_prompts": 8,
                "run.steps": STEPS,
                "rollout.dtype": "float64",
                "rollout.max_running_requests": 64,
                "log.rollouts": -1,
            }
            words = [word for key, value in settings.items() for word in (f"--{key}", value)]
            argv = runs.arguments(model, self.runs, name, *words, *keys)
            return {
                "name": name,
                "argv": [*argv, "--checkpoint.no_export_hf", "--eval.no_at_start"],
            }

        drafts = "--rollout.draft", "history"
        self.gang = runs.run(
            2,
            [job("none"), job("history", *drafts), job("steady", *drafts, "--draft.no_adaptive")],
            folder / "gang",
        )
        for name in ("none", "history", "steady"):
            self.gang.check(name, 2)

    def rows(self, name: str) -> dict[int, dict[str, Any]]:
        return runs.rows(self.runs / name)

    def samples(self, name: str) -> dict[str, str]:
        lines = (self.runs / name / "rollouts.jsonl").read_text().splitlines()
        return {row["id"]: row["response"] for row in map(json.loads, lines)}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("drafts"))


@pytest.mark.parametrize("name", ["history", "steady"])
def test_both_ranks_sample_what_they_would_without_drafts(worlds: Worlds, name: str) -> None:
    assert worlds.samples(name) == worlds.samples("none")
    for step, row in worlds.rows("none").items():
        other = worlds.rows(name)[step]
        for key in ("sched/decode_tokens", "critic/score/mean", "response_length/mean"):
            assert other[key] == row[key], (step, key)


def test_the_library_has_what_both_ranks_have_sampled(worlds: Worlds) -> None:
    rows = worlds.rows("steady")
    known = [row["spec/history_prompts"] for row in rows.values()]
    assert known[1] == max(known) >= 6  # of 8 prompts, of which some may be equal
    tokens = [row["response_length/mean"] * 16 for row in rows.values()]
    assert rows[2]["spec/history_tokens"] > sum(tokens[:2])
    assert sum(row["spec/speculated_tokens"] for row in rows.values()) > 0.01
