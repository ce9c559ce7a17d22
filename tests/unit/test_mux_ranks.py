"""What a job of several ranks adds to a gate: profiles, patience, what is where in a phase."""

import json
import os
import time
from pathlib import Path

import pytest

from rlcore.cli import world
from rlcore.mux import profile, ranks
from rlcore.mux.profile import Profile, Profiler
from rlcore.mux.ranks import RanksGate
from rlcore.trainer.shared_device import SharedDevice
from tests.parts import Shelf, parts_of


def metrics(gen: float, step: float, length: float, gb: float = 1.0) -> dict[str, float]:
    return {
        "timing_s/gen": gen,
        "timing_s/reward": 0.5,
        "timing_s/step": step,
        "response_length/mean": length,
        "perf/rollout_node_gb": gb,
        "perf/train_node_gb": 2 * gb,
    }


def test_a_profile_is_the_worst_step_but_the_first_with_every_response_at_its_limit(tmp_path: Path):
    one = Profiler(tmp_path, max_tokens=100, rollout_nodes=2, train_nodes=1)
    one.see(metrics(30.0, 60.0, 100.0))
    assert Profile.read(tmp_path / profile.FILE).rollout_s == 30.5
    one.see(metrics(1.5, 3.0, 50.0))
    one.see(metrics(1.0, 3.0, 40.0, gb=1.5))
    found = Profile.read(tmp_path / profile.FILE)
    assert found.rollout_s == pytest.approx(4.0)  # 2 s at half of the tokens
    assert found.train_s == pytest.approx(3.75)  # 1.5 s at 40 of 100
    assert (found.rollout_nodes, found.train_nodes) == (2, 1)
    assert (found.rollout_gb, found.train_gb) == (1.5, 3.0)
    about = json.loads((tmp_path / profile.FILE).read_text())
    assert (about["steps"], about["stretched_by"]) == (3, 2.5)


def test_a_profile_counts_the_copy_of_a_save_that_is_still_to_come(tmp_path: Path):
    one = Profiler(tmp_path, max_tokens=9, rollout_nodes=1, train_nodes=1, copy_gb=5.0)
    one.see(metrics(1.0, 2.0, 9.0))
    assert Profile.read(tmp_path / profile.FILE).train_gb == 7.0
    one.see(metrics(1.0, 2.0, 9.0, gb=3.5) | {"timing_s/write_checkpoint": 1.0})
    assert Profile.read(tmp_path / profile.FILE).train_gb == 7.0
    one.see(metrics(1.0, 2.0, 9.0, gb=3.5))
    assert Profile.read(tmp_path / profile.FILE).train_gb == 7.0


def test_a_profile_says_whether_every_rank_does_both(tmp_path: Path):
    one = Profiler(tmp_path, max_tokens=9, rollout_nodes=1, train_nodes=1, colocated=True)
    one.see(metrics(1.0, 2.0, 9.0))
    assert Profile.read(tmp_path / profile.FILE).colocated
    (tmp_path / profile.FILE).write_text('{"rollout_s": 1, "train_s": 1, "colocated": "no"}')
    with pytest.raises(ValueError, match="colocated 'no': must be true or false"):
        Profile.read(tmp_path / profile.FILE)


@pytest.mark.parametrize("text", ["", "[1]", '{"rollout_s": 1}', '{"rollout_s": 1, "train_s": []}'])
def test_what_is_no_profile_is_one_sentence(tmp_path: Path, text: str):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match="p.json: not the profile of a job .* writes with"):
        Profile.read(tmp_path / "p.json")
    with pytest.raises(ValueError, match="gone.json: not the profile of a job"):
        Profile.read(tmp_path / "gone.json")


def test_whoever_waits_says_that_it_lives_and_hears_why_not(monkeypatch):
    monkeypatch.setattr(ranks, "MEET_S", 0.01)
    beats: list[int] = []

    def call() -> str:
        while len(beats) < 3:
            time.sleep(0.005)
        return "turn"

    assert ranks.patiently(call, alive=lambda: beats.append(1)) == "turn"

    def refuse() -> str:
        raise TimeoutError("no turn in 3 s; behind B")

    with pytest.raises(TimeoutError, match="behind B"):
        ranks.patiently(refuse)


class Gate:
    """Rank 0's, which writes down what it is asked for."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def enter(self, name: str) -> None:
        self.said.append(f"enter {name}")

    def leave(self, name: str, seconds: float, switch_s: float) -> None:
        assert seconds >= 0 and switch_s >= 0
        self.said.append(f"leave {name}")


def device_of(said: list[str], folder: Path, *, colocated: bool = False) -> SharedDevice:
    parts = parts_of(said)
    gate = RanksGate(Gate(said), folder, tell=parts.progress.add)
    device = SharedDevice(parts, gate, Shelf(said), colocated=colocated)
    device.leave()
    said.clear()
    return device


def test_a_phase_has_what_it_needs_on_the_device_and_leaves_it_empty(tmp_path: Path):
    said: list[str] = []
    device = device_of(said, tmp_path)
    for name, phase in (("rollout", device.generate), ("train", device.train)):
        with phase():
            said.append(f"in {name}")
    assert said == [
        "enter rollout",
        "engine wake weights",
        "fill engine",
        "engine wake kv_cache",
        "in rollout",
        "engine sleep weights kv_cache",
        "leave rollout",
        "enter train",
        "learner onload",
        "in train",
        "learner offload",
        "leave train",
    ]
    found = device.parts.progress.metrics
    assert found["mux/resident_gb/rollout"] == 1.0
    assert found["mux/resident_gb/train"] == 2.0
    assert found["mux/wait_s/train"] >= 0 and device.parts.spans.take()["wait_permit"] > 0
    rows = [json.loads(line) for line in (tmp_path / ranks.FILE).read_text().splitlines()]
    assert [row["phase"] for row in rows] == ["rollout", "train"]
    times = [row[at] for row in rows for at in ("asked", "granted", "began", "ended", "left")]
    assert times == sorted(times)


def test_a_job_whose_ranks_do_both_takes_one_turn_for_a_step(tmp_path: Path):
    """Engine and learner come and go within it; others sample and train in two turns."""
    said: list[str] = []
    device = device_of(said, tmp_path, colocated=True)
    for _ in range(2):
        with device.step():
            for name, phase in (("rollout", device.generate), ("train", device.train)):
                with phase():
                    said.append(f"in {name}")
    assert [line for line in said if line.startswith(("enter", "in", "leave"))] == [
        "enter step",
        "in rollout",
        "in train",
        "leave step",
    ] * 2
    assert said.index("engine sleep weights kv_cache") < said.index("learner onload")
    assert said.index("learner offload") < said.index("leave step")
    found = device.parts.progress.metrics
    assert found["mux/wait_s/step"] >= 0 and "mux/wait_s/train" not in found
    assert found["mux/step_s"] >= found["mux/load_s/train"]
    with device_of(said, tmp_path).step():
        assert not said


def test_a_phase_that_fails_keeps_its_permit_and_stores_nothing(tmp_path: Path):
    said: list[str] = []
    with pytest.raises(RuntimeError, match="no"), device_of(said, tmp_path).train():
        raise RuntimeError("no")
    assert said == ["enter train", "learner onload"]


def test_cores_that_are_not_there_are_refused_on_every_rank():
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="--cluster.rollout_cores 4096: this process may only use"):
        world.pin(1, (4096,), ())
    world.pin(0, (), ())
    assert os.sched_getaffinity(0) == before
