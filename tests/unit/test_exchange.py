"""The way of a sample between ranks."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rlcore.records import Branch, Sample
from rlcore.rollout.exchange import SampleExchange, StageLayers, by_owner


class Hub:
    """Inboxes of several ranks in one process; nothing is waited for."""

    def __init__(self, rank: int, inboxes: dict[int, deque[Any]]) -> None:
        self.rank, self._inboxes = rank, inboxes

    def send(self, rank: int, channel: str, record: Any) -> None:
        assert channel == "samples"
        self._inboxes[rank].append(record)

    def send_all(self, ranks: Sequence[int], channel: str, record: Any) -> None:
        for rank in ranks:
            self.send(rank, channel, record)

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


def test_a_rank_gets_the_routes_of_its_own_layers() -> None:
    """Two stages of 3 layers, two experts per token; a branch is cut like the first row."""
    inboxes: dict[int, deque[Any]] = defaultdict(deque)
    stages = StageLayers(3, [(0, 2), (1,), (1,)].__getitem__)
    ranks = [SampleExchange(Hub(rank, inboxes), 1.0, stages) for rank in range(3)]
    routes = np.arange(30, dtype=np.int8).reshape(5, 6)
    none = np.zeros(0, np.int32)
    branch = Branch(prompt=none, tokens=none, logps=none, versions=none, routes=routes[:2])
    whole = replace(sample("t0.0"), routes=routes, branches=(branch,))
    ranks[0].begin_round({"t0.0": whole, "t0.1": sample("t0.1")})
    ranks[0].send(["t0.0", "t0.1"], [0, 1, 2])
    assert inboxes[1][0] is inboxes[2][0]  # cut and encoded once
    assert inboxes[1][0][0].routes.shape == (5, 2)

    want = np.full((5, 6), -1, np.int8)
    want[:, 2:4] = routes[:, 2:4]
    for rank in ranks[1:]:
        found = rank.collect(["t0.0", "t0.1"], OWNERS)
        assert found["t0.0"].routes.dtype == np.int8
        np.testing.assert_array_equal(found["t0.0"].routes, want)
        np.testing.assert_array_equal(found["t0.0"].branches[0].routes, want[:2])
        assert found["t0.1"].routes is None
    (own,) = ranks[0].collect(["t0.0"], OWNERS).values()
    assert own is whole

    ranks[1].begin_round({"t1.0": replace(whole, id="t1.0")})
    ranks[1].send(["t1.0"], [0])
    want = routes.copy()
    want[:, 2:4] = -1
    np.testing.assert_array_equal(ranks[0].here()["t1.0"].routes, want)
