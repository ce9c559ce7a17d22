"""Three jobs of rlcore on one pair of nodes, two or all of them taking turns, while jobs, the
arbiter and Redis are killed at random moments and started again. `tests/unit/test_mux.py` does the
same to jobs that only sleep."""

import math
import random
import time
from pathlib import Path
from typing import Any

import pytest

from rlcore.cli import mux as cli
from rlcore.mux import arbiter
from rlcore.mux.gate import EXIT_LOST
from tests import kit, runs
from tests.mux_cluster import Up, learned, needs_redis, overlaps, turns

pytestmark = [pytest.mark.ranks(2), needs_redis, pytest.mark.slow, pytest.mark.timeout(900)]

JOBS, STEPS = "abc", 6
LEASE_S = 15.0
END_S = 800.0


class Job:
    """Started again when it ends before its time, as a launcher would."""

    def __init__(self, name: str, argv: list[str], folder: Path) -> None:
        """`folder` has `runs`."""
        self.name, self._argv, self._folder, self._runs = name, argv, folder, folder / "runs"
        self.gang: runs.Running | None = None
        self.starts_at = 0.0
        """By the monotonic clock, when it does not run."""
        self.ends: list[list[int | None]] = []
        """Exit codes of its ranks, by start."""
        self._killed = 0
        """The number of the last start that was killed."""
        self.is_done = False
        self.lost_at: list[float] = []
        """When the last turn ended before it was taken for dead and lived, as may be where a
        machine has no time for it."""

    @property
    def turns(self) -> list[dict[str, Any]]:
        """Of all its starts, but for those in which it died."""
        found = [t for run in self._runs.glob(f"{self.name}_mux*") for t in turns(run)]
        return [turn for turn in found if turn["left"] not in self.lost_at]

    def look(self) -> None:
        """Start it where it is time; hear whether it has ended, and how."""
        if self.gang is None:
            if not self.is_done and time.monotonic() >= self.starts_at:
                folder = self._folder / f"{self.name}{len(self.ends)}"
                self.gang = runs.Running(2, [{"name": self.name, "argv": self._argv}], folder)
            return
        gang = self.gang.poll()
        if gang is None:
            return
        self.gang = None
        self.ends.append(gang.codes)
        if any(gang.codes):
            lost, killed = EXIT_LOST in gang.codes, self._killed == len(self.ends)
            assert lost or killed, (self.name, gang.codes, gang.text(self.name)[-4000:])
            if lost:
                self.lost_at.append(max((turn["left"] for turn in self.turns), default=0.0))
        else:
            gang.check(self.name, 2)
            self.is_done = True

    def kill(self, starts_at: float) -> None:
        """All of its ranks."""
        assert self.gang is not None
        self.gang.kill()
        self._killed, self.starts_at = len(self.ends) + 1, starts_at


@pytest.mark.parametrize(("seed", "colocated"), [(0, ()), (1, (2,))])
def test_whoever_is_killed_every_step_counts_once(
    tmp_path: Path, seed: int, colocated: tuple[int, ...]
) -> None:
    """The last one to be killed stays away until the others are done, who need its nodes. Of
    `colocated` jobs every rank samples and trains."""
    dice = random.Random(seed)
    found = tmp_path / "runs"
    model = runs.tiny_model(tmp_path / "model")
    common = ("--run.steps", STEPS, "--checkpoint.no_export_hf")
    common += ("--checkpoint.every", 1, "--cluster.timeout_s", 300)
    apart, both = ("--cluster.rollout_ranks", 1), ("--train.offload", "--debug.full_length")

    def argv(at: int, how: str, *more: object) -> list[str]:
        keys = *common, *(both if at in colocated else apart), "--run.seed", at, *more
        return runs.arguments(model, found, f"{JOBS[at]}_{how}", *keys)

    alone = [{"name": name, "argv": argv(at, "alone")} for at, name in enumerate(JOBS)]
    gang = runs.run(2, alone, tmp_path / "alone", timeout_s=END_S / 2)
    for name in JOBS:
        gang.check(name, 2)

    up, end = Up(tmp_path / "mux", 1, 1), time.monotonic() + END_S
    jobs = []
    for at, name in enumerate(JOBS):
        profile = "--mux.profile", found / f"{name}_alone" / "mux_profile.json"
        keys = "--mux.url", up.url, *profile, "--mux.lease_s", LEASE_S, "--mux.slo", 10_000
        jobs.append(Job(name, argv(at, "mux", *keys), tmp_path))
    victims = ["job", "job", "arbiter", "arbiter", "redis", "redis"]
    dice.shuffle(victims)
    victims.append("last")
    killed, turn = [], 1
    try:
        while not all(job.is_done for job in jobs):
            assert time.monotonic() < end, (killed, arbiter.status(up.url))
            time.sleep(0.05)
            for job in jobs:
                job.look()
            left = [job for job in jobs if not job.is_done]
            if len(left) == 1:
                left[0].starts_at = 0.0
            running = [job for job in left if job.gang is not None]
            is_late = len(left) < len(jobs)  # or all are done before all have been killed
            if victims and running and (is_late or len(turns(found)) >= turn):
                time.sleep(dice.random())
                victim = victims.pop(0)
                killed.append(victim)
                if victim in ("job", "last"):
                    away_s = 1.5 * LEASE_S * dice.random() if victim == "job" else math.inf
                    members = [j for g in arbiter.status(up.url)["groups"] for j in g["jobs"]]
                    holds = {j["job"] for j in members if j["holds"]}
                    at_work = [job for job in running if f"{job.name}_mux" in holds]
                    dice.choice(at_work or running).kill(time.monotonic() + away_s)
                else:
                    up.kill(victim)
                    time.sleep(2 * dice.random())
                    up.up()
                turn = len(turns(found)) + dice.randint(1, 3)
        assert not victims, "jobs were done before all had been killed"
        while arbiter.status(up.url)["groups"]:
            assert time.monotonic() < end, arbiter.status(up.url)
            time.sleep(0.1)
        status = arbiter.status(up.url)
        assert status["others"] == [] and not any(n["used"] for n in status["nodes"].values())
    finally:
        for job in jobs:
            if job.gang is not None:
                job.gang.kill()
        assert cli.main(["down", "--dir", str(up.folder)]) == 0

    print(f"killed: {' '.join(killed)}; ends: { {job.name: job.ends for job in jobs} }")
    for name in JOBS:
        ours, theirs = (found / f"{name}_{how}" for how in ("mux", "alone"))
        assert list(learned(theirs)) == list(range(STEPS + 1))
        assert learned(ours) == learned(theirs)
        parts = [runs.checkpoint(folder, STEPS) for folder in (ours, theirs)]
        for part in parts:
            part.pop("common")
        assert parts[0].pop("state") == parts[1].pop("state")
        kit.assert_bitwise(*parts)
    of_jobs = [job.turns for job in jobs]
    assert all(of_jobs)
    for pool in ("rollout", "train"):
        assert overlaps(of_jobs, pool, colocated) == []
