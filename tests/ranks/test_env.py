"""Environments on two ranks: one samples and one trains, in turn and asynchronously, and processes
of environments and the engine are killed."""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import runs

pytestmark = pytest.mark.ranks(2)

BARE = (
    *("--checkpoint.every", 2, "--checkpoint.keep", 0, "--checkpoint.no_export_hf"),
    *("--eval.no_at_start", "--eval.no_at_end", "--cluster.rollout_ranks", 1),
)
LATENCY = (
    *("--env", "latency", "--env.turns", 2, "--env.mean_s", 0.1, "--env.std_s", 0.1),
    *("--env.max_turn_tokens", 4, "--rollout.max_tokens", 24, "--env.retries", 3),
)
STEPS = 10
"""Of the asynchronous run: when step 4 is saved, the rank that samples has work left."""
AGE = "training/off_policy/trajectory_staleness_worst/max"


class Found:
    def __init__(self, folder: Path):
        self.folder, self.runs = folder, folder / "runs"
        label = runs.tiny_model(folder / "label")

        def job(name: str, *more: object) -> runs.Job:
            argv = runs.arguments(label, self.runs, name, *BARE, *LATENCY, *more)
            return {"name": name, "argv": argv}

        old = "--mode", "async", "--async.alpha", 2, "--env.group_size", 5
        jobs = [
            job("sync", "--run.steps", 2),
            job("async", *old, "--run.steps", STEPS) | {"programs": True},
        ]
        gang = runs.Running(2, jobs, folder / "gang")
        try:
            self._kill(gang, "async", 2, "rlcore.envs.child")
            self._kill(gang, "async", 4, "rlcore.rollout.process")
        finally:
            self.gang = gang.wait(280)

    def _kill(self, gang: runs.Running, name: str, step: int, module: str) -> None:
        """All such children of the rank that samples, when this step is done."""
        end = time.monotonic() + 200
        saved = self.runs / name / "checkpoints" / f"step_{step:06d}"
        while not saved.is_dir():
            assert time.monotonic() < end, f"step {step} of {name} is not there"
            assert gang.processes[1].poll() is None, "rank 1 has ended"
            time.sleep(0.02)
        time.sleep(0.4)  # episodes have begun again behind the push
        children = psutil.Process(gang.processes[1].pid).children()
        victims = [c for c in children if module in c.cmdline()]
        assert victims, children
        for victim in victims:
            victim.kill()

    def rows(self, name: str) -> dict[int, dict[str, Any]]:
        self.gang.check(name, 2)
        return runs.rows(self.runs / name)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("env"))


def test_episodes_of_a_rank_that_samples_are_trained_by_one_that_trains(found: Found) -> None:
    for row in found.rows("sync").values():
        assert row["training/trained_rows"] == 16 and row["env/turns"] == 2
        assert row["env/episodes"] == 16 and row["env/latency_s"] >= 0
        assert row["training/rollout_probs_diff_max"] < 1e-4
    lines = (found.runs / "sync" / "rollouts.jsonl").read_text().splitlines()
    for sample in map(json.loads, lines):
        first, second = sample["turns"]
        assert (first["row"], second["row"], second["parent"]) == (0, 0, 0)
        parts = *first["sampled"], *second["context"], *second["sampled"]
        assert "context" not in first and len(second["context"]) == 1
        assert "".join(text for _, text in parts).replace("<eos>", "") == sample["response"]
        assert (
            first["num_tokens"] + second["num_context"] + second["num_tokens"]
            == (sample["num_tokens"])
        )
    assert lines


def test_asynchronous_episodes_are_not_too_old_and_killed_processes_cost_no_sample(found) -> None:
    rows = found.rows("async")
    assert list(rows) == list(range(1, STEPS + 1))
    assert all(row["training/trained_rows"] == 16 for row in rows.values())
    assert 1 <= max(row[AGE] for row in rows.values()) <= 2
    assert sum(row["env/episodes"] for row in rows.values()) >= STEPS * 16
    assert sum(row.get("reward/errors", 0) for row in rows.values()) == 0
