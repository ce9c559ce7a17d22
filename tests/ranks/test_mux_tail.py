"""The tail of a rollout leaves one of its two nodes to another job, and the run learns the same."""

import json
import threading
import time
from pathlib import Path

import pytest

from rlcore.cli import mux as cli
from rlcore.mux.gate import Gate, Profile
from tests import runs
from tests.mux_cluster import Up, needs_redis, turns

pytestmark = [pytest.mark.ranks(3), needs_redis, pytest.mark.timeout(600)]

STEPS = 3
WAIT_S = 300.0
KEYS = ("--cluster.rollout_ranks", 2, "--run.steps", STEPS, "--checkpoint.no_export_hf")
KEYS += ("--rollout.max_tokens", 64, "--debug.decode_floor_ms", 20, "--cluster.timeout_s", 300)


def test_a_node_is_the_next_jobs_while_the_last_responses_go_on_elsewhere(tmp_path: Path) -> None:
    model, folder = runs.tiny_model(tmp_path / "model"), tmp_path / "runs"
    up = Up(tmp_path / "mux", 2, 1)
    about = tmp_path / "profile.json"
    about.write_text(json.dumps({"rollout_s": 900, "train_s": 900, "rollout_nodes": 2}))
    more = "--mux.url", up.url, "--mux.profile", about, "--mux.slo", 1000, "--mux.tail_nodes", 1

    def job(name: str, *keys: object) -> runs.Job:
        return {"name": name, "argv": runs.arguments(model, folder, name, *KEYS, *keys)}

    slim = Gate(
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
                time.sleep(0.2)
                was_there.append((begin, time.time()))
            with slim.phase("train"):
                time.sleep(0.05)
        slim.close()

    thread = threading.Thread(target=work, daemon=True)
    gang = runs.Running(3, [job("mux", *more), job("alone")], tmp_path / "gang", ["t", "a", "b"])
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
    assert len(mine) == STEPS and any("freed" in turn for turn in mine)
    shared = 0
    for turn in mine:
        freed = turn.get("freed", {"at": turn["left"]})
        assert not [b for b, e in was_there if b < freed["at"] and e > turn["granted"]]
        shared += any(freed["at"] <= b < turn["left"] for b, _ in was_there)
        if "freed" in turn:
            assert freed["nodes"] == [1]
    assert shared
    ours, theirs = (runs.rows(folder / name) for name in ("mux", "alone"))
    left = [row for row in ours.values() if "mux/tail_s" in row]
    assert left and all(row["sched/migrated"] > 0 for row in left)
    assert all(row["sched/tail_at"] >= 0.8 and row["mux/tail_s"] > 0 for row in left)
    for step in range(1, STEPS + 1):
        for key in ("response_length/mean", "critic/score/mean"):
            assert ours[step][key] == theirs[step][key], (step, key)
        for key in ("actor/entropy", "actor/grad_norm"):
            assert ours[step][key] == pytest.approx(theirs[step][key], rel=1e-3), (step, key)
