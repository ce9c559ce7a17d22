"""Tail batching through the whole program: rounds, accounts, checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.data import label_task
from tests import runs

KEPT = "--checkpoint.every", 1, "--checkpoint.keep", 0, "--checkpoint.no_export_hf"
TAIL = (
    *("--schedule", "tail_batching", "--debug.deterministic", "--run.steps", 6),
    *("--eval.no_at_start", "--eval.no_at_end", "--rollout.max_running", 64, *KEPT),
)


class Found:
    """Runs with 4 prompts of 4 responses a step, of which 5 are started each time."""

    def __init__(self, folder: Path):
        self.runs, model = folder / "runs", runs.tiny_model(folder / "model")

        def job(name: str, *keys: object) -> runs.Job:
            return {"name": name, "argv": runs.arguments(model, self.runs, name, *TAIL, *keys)}

        saved = self.runs / "one" / "checkpoints" / "step_000003"
        rows = folder / "rows.jsonl"
        texts = [label_task.make("val", 0, i).prompt for i in range(4)]
        rows.write_text("".join(json.dumps({"question": t, "answer": "1"}) + "\n" for t in texts))
        few = "--data.train", rows, "--data.template", "none"
        jobs = [
            job("one"),
            job("again"),
            job("resumed", "--run.resume", saved),
            job("dynamic", "--tail.dynamic", "--reward", "tests.scores.half", "--run.steps", 3),
            job("few", *few),
            job("bad eta", "--tail.eta_prompts", 0.5),
            job("no tail", "--schedule", "all", "--tail.eta_samples", 1.0),
            job("quotas", "--tail.quotas", "label=3"),
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
    assert last["sched/prompts_dropped"] > 0 and last["sched/short_of_groups"] == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("few", "has 4 prompts and a short round starts 5 different ones"),
        ("bad eta", "--tail.eta_prompts 0.5: must be at least 1"),
        ("no tail", "--tail.eta_samples: has no effect without --schedule tail_batching"),
        ("quotas", "together they must be data.prompts_per_step 4"),
    ],
)
def test_what_cannot_work_is_one_sentence(found: Found, name: str, words: str) -> None:
    assert found.gang.code(name) == 2
    assert words in found.gang.text(name)
    assert "Traceback" not in found.gang.text(name)
