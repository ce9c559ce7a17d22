"""Two jobs of rlcore that take turns on one pair of nodes learn what they learn alone."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlcore.cli import mux as cli
from rlcore.mux import arbiter
from rlcore.mux.gate import PermitGate, Profile
from tests import kit, runs
from tests.mux_cluster import Up, learned, needs_redis, overlaps, turns

pytestmark = [pytest.mark.ranks(2), needs_redis, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3
APART = ("--cluster.rollout_ranks", 1, "--run.steps", STEPS, "--checkpoint.no_export_hf")
APART += ("--checkpoint.every", 1, "--cluster.timeout_s", 300)
NOWHERE = "redis://127.0.0.1:1"
START_S = WAIT_S = 600.0


def start_together(up: Up, jobs: dict[Path, list[runs.Job]], gangs: list[runs.Running]) -> None:
    """Two ranks for the jobs of each folder, added to `gangs`. Nobody has a turn before all have
    joined: from then on turns alternate. Whoever keeps them has gaps for all, by its profile."""
    holder = PermitGate(up.url, "holder", Profile(rollout_s=100, train_s=100, slo=1e6), lease_s=60)
    try:
        with holder.phase("rollout"):
            gangs += [runs.Running(2, of_gang, folder) for folder, of_gang in jobs.items()]
            processes = [p for gang in gangs for p in gang.processes]
            end = time.monotonic() + START_S
            while time.monotonic() < end and not any(p.poll() for p in processes):
                members = [j for g in arbiter.status(up.url)["groups"] for j in g["jobs"]]
                if sum(j["waits_s"] is not None for j in members) == len(jobs):
                    break
                time.sleep(0.1)
    finally:
        holder.close()


class Found:
    """`a` and `b` alone, and then with each other: `b` is killed after its second step and started
    again. And `a` once more, whose server is away."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        model = runs.tiny_model(folder / "model")
        up = Up(folder / "mux", 1, 1)

        def job(name: str, seed: int, *more: object) -> runs.Job:
            keys = (*APART, "--run.seed", seed, *more)
            return {"name": name, "argv": runs.arguments(model, self.runs, name, *keys)}

        def jobs(name: str, seed: int) -> list[runs.Job]:
            profile = "--mux.profile", self.runs / f"{name}_alone" / "mux_profile.json"
            patient = "--mux.lease_s", 30, "--mux.slo", 10_000
            lost = "--mux.url", NOWHERE, "--mux.if_unavailable", "solo"
            return [
                job(f"{name}_alone", seed),
                job(f"{name}_mux", seed, "--mux.url", up.url, *profile, *patient),
                job(f"{name}_lost", seed, *lost, *profile),
            ]

        a, b = jobs("a", 0), jobs("b", 1)[:2]
        again = b[1] | {"argv": list(b[1]["argv"])}
        b[1]["argv"] += ["--debug.kill_at_step", str(STEPS - 1)]
        gangs: list[runs.Running] = []
        try:
            start_together(up, {folder / "a": a, folder / "b": b}, gangs)
            killed = gangs[1].wait(WAIT_S)
            gangs.append(runs.Running(2, [again], folder / "again"))
            self.gangs = {"b_alone": killed, "b_mux": gangs[2].wait(WAIT_S)}
            self.gangs |= dict.fromkeys(("a_alone", "a_mux", "a_lost"), gangs[0].wait(WAIT_S))
            self.killed = killed.codes
        finally:
            for gang in gangs:
                gang.kill()
            assert cli.main(["down", "--dir", str(up.folder)]) == 0

    def rows(self, job: str, how: str) -> dict[int, dict[str, Any]]:
        """What a run has learned, which went well."""
        name = f"{job}_{how}"
        self.gangs[name].check(name, 2)
        return learned(self.runs / name)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("mux"))


@pytest.mark.parametrize("job", ["a", "b"])
def test_what_is_learned_among_others_is_what_is_learned_alone_bit_by_bit(
    found: Found, job: str
) -> None:
    alone = found.rows(job, "alone")
    assert list(alone) == list(range(STEPS + 1))
    assert found.rows(job, "mux") == alone
    ours, theirs = (runs.checkpoint(found.runs / f"{job}_{n}", STEPS) for n in ("mux", "alone"))
    for part in (ours, theirs):
        part.pop("common")
    assert ours.pop("state") == theirs.pop("state")
    kit.assert_bitwise(ours, theirs)


def test_a_job_that_was_killed_went_on_from_its_checkpoint(found: Found) -> None:
    assert -signal.SIGKILL in found.killed
    said = found.gangs["b_mux"].text("b_mux")
    assert f"{STEPS - 1} of {STEPS} steps done" in said


def test_a_job_whose_server_is_away_runs_alone_and_says_so(found: Found) -> None:
    assert found.rows("a", "lost") == found.rows("a", "alone")
    said = found.gangs["a_lost"].text("a_lost")
    assert f"--mux.url {NOWHERE}: no answer" in said and "the job runs solo" in said


def test_turns_alternate_and_nobody_is_where_another_is(found: Found) -> None:
    both = {job: turns(found.runs / f"{job}_mux") for job in "ab"}
    for pool in ("rollout", "train"):
        assert overlaps(both.values(), pool) == []
    rollouts = sorted(
        (row["granted"], job) for job in "ab" for row in both[job] if row["phase"] == "rollout"
    )
    order = "".join(job for _, job in rollouts)
    assert len(order) == 2 * STEPS and "aaa" not in order and "bbb" not in order


def test_what_turns_cost_is_in_the_metrics(found: Found) -> None:
    found.gangs["a_mux"].check("a_mux", 2)
    rows = runs.rows(found.runs / "a_mux")
    assert rows[0]["mux/start_s"] > 0
    for pool in ("rollout", "train"):
        assert rows[STEPS][f"mux/load_s/{pool}"] > 0
        assert rows[STEPS][f"mux/resident_gb/{pool}"] > 0
        assert rows[STEPS][f"perf/{pool}_node_gb"] > 0
    about = json.loads((found.runs / "a_alone" / "mux_profile.json").read_text())
    assert about["rollout_s"] > 0 and about["train_s"] > 0 and about["rollout_gb"] > 0
    assert not (found.runs / "a_mux" / "mux_profile.json").exists()


def test_a_job_whose_ranks_do_both_shares_its_nodes_too(tmp_path: Path) -> None:
    """A step of it is one turn on the nodes of both pools, and changes nothing of what it learns,
    nor of what the other one does."""
    model = runs.tiny_model(tmp_path / "model")
    both = ("--train.offload", "--debug.full_length", "--run.seed", 2)
    keys = {"both": (*both, *APART[2:]), "apart": ("--run.seed", 0, *APART)}
    up, gangs, jobs = Up(tmp_path / "mux", 1, 1), [], {}
    for name, of_job in keys.items():
        profile = tmp_path / f"{name}_alone" / "mux_profile.json"
        more = "--mux.url", up.url, "--mux.profile", profile, "--mux.slo", 10_000
        more += ("--mux.lease_s", 30)
        jobs[tmp_path / name] = [
            {"name": run, "argv": runs.arguments(model, tmp_path, run, *of_job, *also)}
            for run, also in ((f"{name}_alone", ()), (f"{name}_mux", more))
        ]
    try:
        start_together(up, jobs, gangs)
        for name, gang in zip(keys, gangs, strict=True):
            gang.wait(WAIT_S).check(f"{name}_mux", 2)
    finally:
        for gang in gangs:
            gang.kill()
        assert cli.main(["down", "--dir", str(up.folder)]) == 0
    for name in keys:
        alone = learned(tmp_path / f"{name}_alone")
        assert list(alone) == list(range(STEPS + 1))
        assert learned(tmp_path / f"{name}_mux") == alone
    about = json.loads((tmp_path / "both_alone" / "mux_profile.json").read_text())
    assert about["colocated"] and about["rollout_nodes"] == about["train_nodes"] == 1
    assert about["rollout_gb"] > 0 and about["train_gb"] > 0
    of_jobs = [turns(tmp_path / f"{name}_mux") for name in keys]
    for pool in ("rollout", "train"):
        assert overlaps(of_jobs, pool, colocated=[0]) == []
    steps = [row for row in of_jobs[0] if row["phase"] == "step"]
    parts = [row["phase"] for row in of_jobs[0] if row.get("part")]
    assert len(steps) == STEPS and parts == ["rollout", "train"] * STEPS
    rows = runs.rows(tmp_path / "both_mux")
    assert rows[STEPS]["mux/step_s"] > rows[STEPS]["mux/load_s/train"] > 0
