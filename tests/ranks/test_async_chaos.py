"""Asynchronous training of which some process is killed at a random moment, again and again: an
engine, a rank that samples, the rank that trains. Nothing is trained twice, and nothing is lost but
what the metrics say.
"""

import json
import random
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlcore.rollout.async_controller import Saved
from rlcore.utils.net import decode
from tests import runs

pytestmark = [pytest.mark.ranks(2), pytest.mark.slow]

STEPS, BATCH, SAMPLES, KILLS = 24, 4, 4, 6
KEYS = (
    *("--cluster.rollout_ranks", 1, "--mode", "async", "--async.alpha", 2),
    *("--async.extra_prompts", 2, "--run.steps", STEPS, "--log.rollouts", -1),
    *("--checkpoint.every", 2, "--checkpoint.keep", 0, "--checkpoint.no_export_hf"),
    *(
        "--debug.decode_floor_ms",
        20,
        "--rollout.progress_interval_s",
        0.05,
        "--rollout.max_running_requests",
        16,
    ),
    *("--cluster.timeout_s", 120, "--data.num_prompts", 16, "--rollout.draft", "history"),
)


class Killer(threading.Thread):
    """Ends processes of a running gang, each at a random time after another step, until one of them
    is a rank, as then the gang ends."""

    def __init__(
        self, gang: runs.Running, folder: Path, dice: random.Random, victims: list[str]
    ) -> None:
        super().__init__(daemon=True)
        self._gang, self._folder, self._dice, self._victims = gang, folder, dice, victims
        self.done = threading.Event()

    def run(self) -> None:
        while len(self._victims) < KILLS:
            before = self._lines()
            while self._lines() == before:
                if self.done.wait(0.05):
                    return
            if self.done.wait(self._dice.uniform(0.0, 2.0)):
                return
            what = self._dice.choice(["engine", "sampler", "trainer"])
            if not self._kill(what):
                continue  # it has just ended
            self._victims.append(what)
            if what != "engine":
                return

    def _kill(self, what: str) -> bool:
        process = psutil.Process(self._gang.processes[int(what != "trainer")].pid)
        try:
            if what == "engine":
                [process] = [
                    child
                    for child in process.children(recursive=True)
                    if "rlcore.rollout.process" in child.cmdline()
                ]
            process.kill()
        except (psutil.NoSuchProcess, ValueError):
            return False
        return True

    def _lines(self) -> int:
        file = self._folder / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.is_file() else 0


@pytest.mark.parametrize("seed", [0, 1])
def test_whoever_dies_each_sample_is_trained_once_or_its_loss_is_reported(
    tmp_path: Path, seed: int
) -> None:
    dice, folder = random.Random(seed), tmp_path / "runs" / "chaos"
    argv = runs.arguments(runs.tiny_model(tmp_path / "model"), tmp_path / "runs", "chaos", *KEYS)
    victims: list[str] = []
    end = time.monotonic() + 600
    for attempt in range(3 * KILLS):
        job: runs.Job = {"name": "chaos", "argv": argv}
        gang = runs.Running(2, [job | {"programs": True}], tmp_path / f"gang{attempt}")
        killer = Killer(gang, folder, dice, victims)
        killer.start()
        codes = gang.wait(end - time.monotonic()).codes
        killer.done.set()
        killer.join(10)
        if codes == [0, 0] and gang_code(tmp_path / f"gang{attempt}") == 0:
            break
    else:
        raise AssertionError(f"never done, killed {victims}")
    assert len(victims) >= 3 and "engine" in victims and set(victims) > {"engine"}, victims
    check(folder)


def gang_code(folder: Path) -> int:
    return json.loads((folder / "codes0.json").read_text())["chaos"]


def check(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    trained = [line["id"] for line in lines if line["step"] > 0]
    assert len(trained) == len(set(trained)) == STEPS * BATCH * SAMPLES
    rows = runs.rows(folder)
    assert list(rows) == list(range(STEPS + 1))
    last = folder / "checkpoints" / f"step_{STEPS:06d}"
    saved = decode((last / "buffer" / "controller.msgpack").read_bytes(), Saved)
    issued = json.loads((last / "state.json").read_text())["source"]["issued"]
    groups = {i.rpartition(".")[0] for i in trained}
    held = {group.work.id for group in saved.groups}
    assert not groups & held
    lost = {f"t{k}" for k in range(issued)} - groups - held
    reported = sum(row.get("async/stale_groups", 0.0) for row in rows.values())
    assert len(lost) == reported, lost
