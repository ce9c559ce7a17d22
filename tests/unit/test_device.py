"""What the owner of the accelerator moves, with each strategy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlcore.protocols import PARTS
from rlcore.rollout.transport import LocalHub
from rlcore.rollout.worker import NoScorer, RolloutWorker
from rlcore.trainer import device as devices
from rlcore.trainer.device import NEXT, Device, OffloadDevice
from rlcore.trainer.progress import Ranks
from rlcore.trainer.shared_device import SharedDevice
from rlcore.utils.spans import Spans
from tests.parts import Part, Shelf, parts_of, sizes_of

PUSH = [
    "learner offload optimizer gradients",
    "learner onload weights",
    "engine wake weights",
    "push 0",
    "learner offload",
    "engine wake kv_cache",
]


def first_push(device: Device, said: list[str]) -> None:
    """What every run begins with."""
    with device.train():
        device.update_weights(0)
    said.clear()


def offloaded(said: list[str], **more: Any) -> OffloadDevice:
    device = OffloadDevice(parts_of(said, **more))
    first_push(device, said)
    return device


def test_the_learner_comes_back_while_something_of_it_is_written() -> None:
    said: list[str] = []
    with offloaded(said).save(["weights", "optimizer"]):
        said.append("write")
    assert said == [
        "engine sleep kv_cache",
        "learner onload weights optimizer",
        "write",
        "learner offload",
        "engine wake kv_cache",
    ]


def test_what_a_save_moves_counts_to_its_phase() -> None:
    phases: list[str] = []
    device = offloaded([], spans=Spans(listener=phases.append))
    phases.clear()
    with device.save(["weights"]):
        assert phases == ["save_checkpoint", ""]
    assert phases == ["save_checkpoint", ""] * 2


def test_the_first_push_finds_the_learner_there_and_the_engine_asleep() -> None:
    said: list[str] = []
    device = OffloadDevice(parts_of(said))
    with device.train():
        assert not said
        device.update_weights(0)
    assert said == PUSH and device.state == "gen"
    assert device.parts.progress.metrics == {"sync/bytes": 4.0}


def test_a_step_hands_the_accelerator_from_engine_to_learner_and_back() -> None:
    said: list[str] = []
    device = offloaded(said)
    with device.step(), device.generate():
        assert not said
    with device.train():
        said.append("train")
        device.update_weights(3)
    assert said[:3] == ["engine sleep weights kv_cache", "learner onload", "train"]
    assert said[3:] == [line.replace("push 0", "push 3") for line in PUSH]
    assert device.parts.progress.version == 3


def test_a_critic_comes_and_goes_with_the_learner() -> None:
    said: list[str] = []
    device = offloaded(said, critic=Part("critic", said))
    with device.train():
        device.update_weights(1)
    assert said == [
        "engine sleep weights kv_cache",
        "learner onload",
        "critic onload",
        "learner offload optimizer gradients",
        "critic offload",
        "learner onload weights",
        "engine wake weights",
        "push 1",
        "learner offload",
        "critic offload",
        "engine wake kv_cache",
    ]


def test_without_offload_nothing_moves() -> None:
    said: list[str] = []
    device = Device(parts_of(said))
    first_push(device, said)
    with device.step(), device.generate():
        device.release_engine()
        device.load_learner(PARTS)
    with device.train():
        device.update_weights(1)
    with device.generate("testing"):
        pass
    with device.save(["weights"]):
        said.append("write")
    assert said == ["push 1", "write"]


def test_an_engine_that_left_in_the_round_is_not_sent_to_sleep_again() -> None:
    said: list[str] = []
    device = offloaded(said)
    with device.generate():
        device.release_engine()
        device.load_learner(["weights", "gradients"])
    with device.train():
        pass
    assert said == [
        "engine sleep weights kv_cache",
        "learner onload weights gradients",
        "learner onload",
    ]
    device.update_weights(1)
    said.clear()
    with device.generate(), device.train():
        assert said[0] == "engine sleep weights kv_cache"


def test_a_failed_engine_is_asked_for_nothing_and_started_again_by_the_push() -> None:
    said: list[str] = []
    device = offloaded(said)
    engine = device.parts.engine
    engine.failure = "was killed"
    with device.save(["weights"]):
        pass
    with device.train():
        pass
    assert said == ["learner onload weights", "learner offload", "learner onload"]


class Returning(Part):
    """A failed engine that can be started again."""

    def restart(self) -> None:
        self.said.append("engine restart")
        self.failure = ""


def test_a_new_engine_starts_on_an_empty_device() -> None:
    said: list[str] = []
    engine = Returning("engine", said, "was killed")
    worker = RolloutWorker(LocalHub(), engine, NoScorer(), str, deadline_s=1.0)
    device = OffloadDevice(parts_of(said, engine=engine, restart_engine=worker.restart_engine))
    with device.train():
        device.update_weights(0)
    assert said[:7] == [
        "learner offload",
        "engine restart",
        "engine poll 0.0",
        "engine sleep weights kv_cache",
        "learner offload optimizer gradients",
        "learner onload weights",
        "engine wake weights",
    ]


class Dies(Part):
    """An engine that fails when it is asked for something."""

    def sleep(self, tags: list[str]) -> None:
        self.failure = "was killed by signal 9"
        raise RuntimeError("sleep: the engine was killed by signal 9")

    wake = sleep


def test_an_engine_that_fails_at_a_switch_is_left_to_the_round_that_follows() -> None:
    said: list[str] = []
    device = OffloadDevice(parts_of(said, engine=Dies("engine", said)))
    with device.train():
        device.update_weights(0)
    assert device.parts.engine.failure
    assert "push 0" in said


def test_a_working_engine_that_refuses_a_switch_ends_the_run() -> None:
    class Refuses(Part):
        def wake(self, tags: list[str]) -> None:
            raise RuntimeError("no memory")

    said: list[str] = []
    device = OffloadDevice(parts_of(said, engine=Refuses("engine", said)))
    with pytest.raises(RuntimeError, match="no memory"), device.train():
        device.update_weights(0)


def test_ranks_of_one_engine_wait_for_its_first_at_every_switch(monkeypatch) -> None:
    """Only the first calls it: the others have no memory before it has answered, and it asks for
    none before they have freed theirs."""
    said: list[str] = []
    monkeypatch.setattr(devices.collective, "barrier", lambda: said.append("all"))
    monkeypatch.setattr(devices.collective, "reduce_floats", lambda values: [0.0] * len(values))
    ranks = Ranks(rank=0, size=2, model_parallel_groups=[[0]], dp_rank=0)
    device = offloaded(said, ranks=ranks, sizes=sizes_of(said, ranks=(0, 1)))
    with device.train():
        device.update_weights(1)
    assert said == [
        *("all", "engine sleep weights kv_cache", "all", "learner onload"),
        *("learner offload optimizer gradients", "learner onload weights"),
        *("all", "engine wake weights", "all", "push 1", "learner offload"),
        *("all", "engine wake kv_cache", "all"),
    ]


def test_ranks_whose_engine_works_wait_while_another_starts_again(monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(devices.collective, "barrier", lambda: said.append("all"))
    monkeypatch.setattr(devices.collective, "reduce_floats", lambda values: [0.0, 0.0, 1.0, 0.0])
    ranks = Ranks(rank=0, size=4, model_parallel_groups=[[0]], dp_rank=0)
    device = OffloadDevice(parts_of(said, ranks=ranks, sizes=sizes_of(said, ranks=(0, 1))))
    device._restart_failed()
    assert said == ["all", "all"]


# ---- states


@pytest.mark.parametrize("make", [Device, OffloadDevice])
def test_a_phase_out_of_order_is_found(make: type[Device]) -> None:
    said: list[str] = []
    device = make(parts_of(said))
    with pytest.raises(AssertionError, match="build -> gen"), device.generate():
        pass
    first_push(device, said)
    with pytest.raises(AssertionError, match="train -> save"), device.train(), device.save(()):
        pass
    assert set(NEXT) == {to for after in NEXT.values() for to in after} | {"build"}


# ---- shared nodes


class Gate:
    """Every phase gets its permit."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    @contextmanager
    def phase(self, name: str, resident: Any = None) -> Iterator[None]:
        self.said.append(f"enter {name}")
        if resident is not None:
            resident.load()
        yield
        if resident is not None:
            resident.store()
        self.said.append(f"leave {name}")


def shared(said: list[str], *, colocated: bool = False, gate: Any = None) -> SharedDevice:
    device = SharedDevice(parts_of(said), gate or Gate(said), Shelf(said), colocated=colocated)
    device.leave()
    said.clear()
    return device


def test_a_push_ends_on_the_shelf_and_moves_no_engine() -> None:
    said: list[str] = []
    device = shared(said)
    with device.train():
        device.update_weights(2)
    assert said == [
        "enter train",
        "learner onload",
        "push 2 to shelf",
        "learner offload",
        "leave train",
    ]


def test_a_node_that_was_left_is_not_touched_until_the_rollout_is_over() -> None:
    said: list[str] = []
    device = shared(said)
    with device.generate():
        said.clear()
        device.release_engine()
        device.repair()  # of the engines that are left
    assert said == ["engine sleep weights kv_cache", "leave rollout"]
    said.clear()
    with device.generate():
        assert said[:2] == ["enter rollout", "engine wake weights"]
