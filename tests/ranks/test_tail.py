"""Tail batching on two ranks: an engine is killed in the middle of a round that more was started
for than it keeps."""

import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import runs

pytestmark = [pytest.mark.ranks(2), pytest.mark.slow]

ROWS = 13
"""Of the data: an epoch ends in the third round, in which the engine dies."""
STEPS = 6


class Worlds:
    """A run that loses an engine, and what its log makes of one that loses none."""

    def __init__(self, folder: Path):
        self.runs, model = folder / "runs", runs.tiny_model(folder / "model")

        def job(name: str, *keys: object) -> runs.Job:
            settings = {
                "schedule": "tail_batching",
                "data.num_prompts": ROWS,
                "reward": "tests.scores.unsteady",
                "algo.rollout_is": "none",  # or the sampler's last bits weigh the gradient
                "run.steps": STEPS,
                "checkpoint.every": 1,
                "checkpoint.keep": 0,
                "rollout.max_running_requests": 64,
                "rollout.progress_interval_s": 0.05,
            }
            words = [word for key, value in settings.items() for word in (f"--{key}", value)]
            argv = runs.arguments(
                model, self.runs, name, *words, "--checkpoint.no_export_hf", *keys
            )
            return {"name": name, "argv": argv}

        jobs = [
            job("killed", "--debug.decode_floor_ms", 60) | {"programs": True},
            job("replay", "--debug.replay", self.runs / "killed"),
        ]
        gang = runs.Running(2, jobs, folder / "gang")
        try:
            self._kill(gang, self.runs / "killed" / "checkpoints" / "step_000002")
        finally:
            self.gang = gang.wait(280)
        for name in ("killed", "replay"):
            self.gang.check(name, 2)

    def _kill(self, gang: runs.Running, saved: Path) -> None:
        """Kill the engine of rank 1 while it samples for step 3."""
        end = time.monotonic() + 200
        while not saved.is_dir():
            assert time.monotonic() < end and gang.processes[1].poll() is None, saved
            time.sleep(0.02)
        time.sleep(0.5)
        children = psutil.Process(gang.processes[1].pid).children()
        (engine,) = [c for c in children if "rlcore.rollout.process" in c.cmdline()]
        engine.send_signal(signal.SIGKILL)

    def rounds(self, name: str) -> list[dict[str, Any]]:
        lines = (self.runs / name / "rounds.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def source(self, name: str, step: int) -> dict[str, Any]:
        file = self.runs / name / "checkpoints" / f"step_{step:06d}" / "state.json"
        return json.loads(file.read_text())["source"]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("tail"))


def test_the_engine_died_within_the_third_round(worlds: Worlds) -> None:
    rows = runs.rows(worlds.runs / "killed")
    assert [n for n, row in rows.items() if row.get("sched/engines_down")] == [3]
    assert all(rows[n]["training/trained_rows"] == 16 for n in range(1, STEPS + 1))


def test_no_prompt_is_lost(worlds: Worlds) -> None:
    """After every step each prompt that was started was trained once, or waits: by the accounts of
    the checkpoint, and counted from the log, which knows nothing of the accounts."""
    rounds = worlds.rounds("killed")
    trained: Counter[int] = Counter()
    for step in range(1, STEPS + 1):
        source, round_ = worlds.source("killed", step), rounds[step - 1]
        rows = {id: row for id, row, *_ in round_["started"]}
        trained.update(rows[id] for id in round_["kept"])
        waiting = [tuple(key) for key in source["queue"][""]]
        assert len(set(waiting)) == len(waiting)
        accounts = {int(epoch): row for epoch, row in source["accounts"].items()}
        late = Counter(epoch for epoch, _ in waiting)
        for epoch, row in accounts.items():
            assert row["started"] == row.get("trained", 0) + late[epoch], (step, epoch)
        assert sum(trained.values()) == sum(r.get("trained", 0) for r in accounts.values())
        begun = Counter(row for _, row in waiting) + trained
        if accounts[0]["started"] == ROWS:
            assert set(begun) == set(range(ROWS)), "every prompt of the epoch is somewhere"
        assert sum(begun.values()) == sum(row["started"] for row in accounts.values())
    assert accounts[0]["started"] == ROWS


def test_the_log_of_a_run_that_lost_an_engine_makes_the_same_batches_without_a_loss(
    worlds: Worlds,
) -> None:
    assert worlds.rounds("replay") == worlds.rounds("killed")
    rows = runs.rows(worlds.runs / "replay")
    assert not any(row.get("sched/engines_down") for row in rows.values())
    for step, row in runs.rows(worlds.runs / "killed").items():
        if "actor/grad_norm" in row:
            for name in ("actor/grad_norm", "critic/score/mean", "response_length/mean"):
                assert rows[step][name] == row[name], (step, name)
    assert worlds.source("replay", STEPS) == worlds.source("killed", STEPS)
    assert "differ from the log" not in worlds.gang.text("replay")
