"""The tail of a rollout leaves one of its two nodes to another job, and the run learns the same."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlcore.cli import mux as cli
from rlcore.mux.gate import PermitGate, Profile
from tests import runs
from tests.mux_cluster import Up, needs_redis, turns

pytestmark = [pytest.mark.ranks(3), needs_redis, pytest.mark.timeout(600)]

STEPS = 3
WAIT_S = 300.0
KEYS = ("--cluster.rollout_ranks", 2, "--run.steps", STEPS, "--checkpoint.no_export_hf")
KEYS += ("--rollout.max_tokens", 64, "--rollout.process", "inline", "--cluster.timeout_s", 300)
STAYS, LEAVES = "1", "2"
"""Ranks that sample."""
TAIL = 3
"""Of the 16 responses of a round; 80 % are done without them."""
HOLD_S = 100.0


@contextmanager
def held(arrivals: str) -> Iterator[None]:
    """Make the tail wait for the other job instead of racing with it: the engine that is to leave
    stops decoding at its last responses until they are taken away, and the one that goes on with
    them stops until the other job has arrived, which the file `arrivals` tells by its length."""
    from rlcore.rollout.torch_engine.engine import TorchEngine

    step, rank, file = TorchEngine._step, os.environ["RANK"], Path(arrivals)
    since: list[float] = []
    seen = 0

    def waits(engine: TorchEngine) -> bool:
        nonlocal seen
        live = [job for job in engine._jobs.values() if job.request.id.startswith("t")]
        came = file.stat().st_size if file.exists() else 0
        moved = any(job.request.resume is not None for job in live)
        if rank == STAYS and moved:
            return came == seen
        seen = came
        return rank == LEAVES and 0 < len(live) <= TAIL

    def held_step(engine: TorchEngine) -> bool:
        if not waits(engine):
            since.clear()
            return step(engine)
        since.append(time.monotonic())
        if since[-1] > since[0] + HOLD_S:  # the test fails by what it looks for
            return step(engine)
        time.sleep(0.01)
        return False

    TorchEngine._step = held_step
    try:
        yield
    finally:
        TorchEngine._step = step


def test_a_node_is_the_next_jobs_while_the_last_responses_go_on_elsewhere(tmp_path: Path) -> None:
    model, folder = runs.tiny_model(tmp_path / "model"), tmp_path / "runs"
    up = Up(tmp_path / "mux", 2, 1)
    about = tmp_path / "profile.json"
    about.write_text(json.dumps({"rollout_s": 900, "train_s": 900, "rollout_nodes": 2}))
    more = "--mux.url", up.url, "--mux.profile", about, "--mux.slo", 1000, "--mux.tail_nodes", 1

    arrivals = tmp_path / "arrivals"

    def job(name: str, *keys: object) -> runs.Job:
        return {"name": name, "argv": runs.arguments(model, folder, name, *KEYS, *keys)}

    slim = PermitGate(
        up.url,
        "slim",
        Profile(rollout_s=900, train_s=900, slo=1000),
        hosts={"rollout": ["b"], "train": ["t"]},
        lease_s=120,
    )
    over, was_there = threading.Event(), []

    def work() -> None:
        while not over.is_set():
            with slim.phase("rollout"):
                begin = time.time()
                with arrivals.open("a") as file:
                    file.write(".")
                time.sleep(0.05)
                was_there.append((begin, time.time()))
            with slim.phase("train"):
                time.sleep(0.05)
        slim.close()

    thread = threading.Thread(target=work, daemon=True)
    tail = {"within": ["tests.ranks.test_mux_tail:held", str(arrivals)]}
    jobs = [job("mux", *more) | tail, job("alone")]
    gang = runs.Running(3, jobs, tmp_path / "gang", ["t", "a", "b"])
    try:
        thread.start()
        found = gang.wait(WAIT_S)
        over.set()
        thread.join(WAIT_S)
    finally:
        over.set()
        assert cli.main(["down", "--dir", str(up.folder)]) == 0
    for name in ("mux", "alone"):
        found.check(name, 3)
    mine = [turn for turn in turns(folder / "mux") if turn["phase"] == "rollout"]
    assert len(mine) == STEPS
    for turn in mine:
        freed = turn["freed"]
        assert freed["nodes"] == [1]
        assert not [b for b, e in was_there if b < freed["at"] and e > turn["granted"]]
        assert any(freed["at"] <= b < turn["left"] for b, _ in was_there)
    ours, theirs = (runs.rows(folder / name) for name in ("mux", "alone"))
    for step in range(1, STEPS + 1):
        assert ours[step]["sched/migrated"] > 0
        assert ours[step]["sched/tail_at"] >= 0.8 and ours[step]["mux/tail_s"] > 0
        for key in ("response_length/mean", "critic/score/mean"):
            assert ours[step][key] == theirs[step][key], (step, key)
        for key in ("actor/entropy", "actor/grad_norm"):
            assert ours[step][key] == pytest.approx(theirs[step][key], rel=1e-3), (step, key)
