"""The way of a sample between ranks."""

from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest

from rlcore.records import Sample
from rlcore.rollout.exchange import SampleExchange, by_owner


class Hub:
    """Inboxes of several ranks in one process; nothing is waited for."""

    def __init__(self, rank: int, inboxes: dict[int, deque[Any]]) -> None:
        self.rank, self._inboxes = rank, inboxes

    def send(self, rank: int, channel: str, record: Any) -> None:
        assert channel == "samples"
        self._inboxes[rank].append(record)

    def receive(self, channel: str, kind: Any, timeout_s: float) -> Any:
        return self._inboxes[self.rank].popleft() if self._inboxes[self.rank] else None


def sample(id: str) -> Sample:
    none = np.zeros(0, np.int32)
    return Sample(id=id, prompt=none, tokens=none, logps=none, versions=none, finish="stop")


@pytest.fixture
def two() -> list[SampleExchange]:
    inboxes: dict[int, deque[Any]] = defaultdict(deque)
    found = [SampleExchange(Hub(rank, inboxes), 1.0) for rank in range(2)]
    found[0].begin_round({i: sample(i) for i in ("t0.0", "t0.1")})
    found[1].begin_round({"t1.0": sample("t1.0")})
    return found


OWNERS = {"t0.0": 0, "t0.1": 0, "t1.0": 1}


def test_own_samples_are_not_sent_and_others_are_collected(two: list[SampleExchange]) -> None:
    two[0].send(["t0.0"], [0, 1])
    assert two[0].collect(["t0.0"], OWNERS).keys() == {"t0.0"}
    assert two[0].here().keys() == {"t0.0", "t0.1"}  # its own, once
    assert not two[0]._arrived
    assert two[1].collect(["t0.0", "t1.0"], OWNERS).keys() == {"t0.0", "t1.0"}


def test_what_comes_early_waits_until_it_is_asked_for(two: list[SampleExchange]) -> None:
    """The owner is faster than a rank that still trains the last groups of its round."""
    two[0].send(["t0.0", "t0.1"], [1])
    assert two[1].collect(["t0.1"], OWNERS).keys() == {"t0.1"}
    assert two[1].here().keys() == {"t1.0", "t0.0"}  # what was collected is the caller's
    assert two[1].collect(["t0.0"], OWNERS).keys() == {"t0.0"}
    assert two[1].here().keys() == {"t1.0"}


def test_a_new_round_forgets_what_came_in_the_last_one(two: list[SampleExchange]) -> None:
    two[0].send(["t0.0"], [1])
    assert "t0.0" in two[1].here()
    two[1].begin_round({})
    assert not two[1].here()


def test_a_sample_that_does_not_come_is_named_with_its_owner(two: list[SampleExchange]) -> None:
    with pytest.raises(
        TimeoutError,
        match=r"timeout_s 1 exceeded: rank 1 .* 2 samples such as t0.0 from ranks \[0\]",
    ):
        two[1].collect(["t0.0", "t0.1", "t1.0"], OWNERS)


def test_ids_are_grouped_by_owner_and_destination() -> None:
    destination = {"t0.0": (0, 1), "t0.1": (0, 1), "t1.0": (1,)}
    assert by_owner(destination, OWNERS) == {
        (0, (0, 1)): ["t0.0", "t0.1"],
        (1, (1,)): ["t1.0"],
    }
