"""Pushes over several ranks, each a thread of this process: what all of them say when one fails,
and what a push holds in memory. tests/ranks/test_sync.py has processes and real learners."""

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.protocols import InProcess
from rlcore.records import Bucket, Shard
from rlcore.sync import colocated, memory, peers, relay
from rlcore.sync.channel import make_channel
from rlcore.sync.memory import ExportMeter
from rlcore.sync.peers import Failure, LinkError, Peers, WeightUpdateError, WeightUpdateTimeoutError
from rlcore.utils import buckets

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(peers, "_GRACE_S", 1.0)
    monkeypatch.setattr(peers, "_LEFT_S", 0.5)


class Weights:
    """Part `place` of `of` of each tensor, by rows."""

    def __init__(self, place: int = 0, of: int = 1, names: str = "w", count: int = 4) -> None:
        generator = torch.Generator().manual_seed(1)
        self._rows = (place * 16 // of, (place + 1) * 16 // of)
        self.full = {f"{names}{i}": torch.randn(16, 8, generator=generator) for i in range(count)}

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        start, stop = self._rows
        for name, tensor in self.full.items():
            shape = tuple(tensor.shape)
            yield (
                Shard(name=name, dtype="float32", shape=shape, dim=0, start=start, stop=stop),
                tensor[start:stop],
            )

    def export(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.full.items()


class Engine(InProcess):
    """Decodes only after a whole load."""

    def __init__(self, where: str = "", error: Exception | None = None, wait_s: float = 0) -> None:
        self.usable, self.count, self.loads = True, 0, 0
        self.where, self.error, self.wait_s = where, error, wait_s

    def begin_load(self, version: int) -> None:
        self.usable, self.count = False, 0
        self.loads += 1
        self._at("begin")

    def load_bucket(self, bucket: Bucket, payloads: Any) -> None:
        self.count += 1
        if self.count == 2:
            self._at("load")

    def end_load(self) -> None:
        self._at("end")
        self.usable = True

    def _at(self, where: str) -> None:
        if where == self.where:
            time.sleep(self.wait_s)
            if self.error is not None:
                raise self.error


def ranks(n: int, work: Callable[[int, Any], Any]) -> list[Any]:
    """What each rank returned or raised."""
    store, found = dist.HashStore(), [None] * n

    def go(rank: int) -> None:
        try:
            found[rank] = work(rank, store)
        except Exception as error:
            found[rank] = error.with_traceback(None)

    threads = [threading.Thread(target=go, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def one_sentence(found: list[Any]) -> str:
    """That all ranks raised."""
    assert {type(error) for error in found} <= {WeightUpdateError, WeightUpdateTimeoutError}, found
    assert len({f"{type(error)} {error}" for error in found}) == 1, found
    return str(found[0])


NEVER_S = 3600.0
"""A deadline that is not waited for: `ranks` gives up long before."""


def channel(rank: int, n: int, store: Any, timeout_s: float = 20, **options: Any) -> Any:
    options = {"route": "intranode", "max_bytes": 1024} | options
    route = options.pop("route")
    return make_channel(route, peers=Peers(rank, n, store, timeout_s=timeout_s), **options)


# ---- one rank fails


@pytest.mark.parametrize("route", ["gather", "intranode"])
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("begin", RuntimeError("asleep")),
        ("load", OSError("no such file")),
        ("load", RuntimeError("no memory")),
        ("end", RuntimeError("3 tensors are missing")),
    ],
)
def test_an_engine_that_refuses_fails_the_push_on_all_ranks_at_once_in_one_sentence(
    route: str, where: str, error: Exception
) -> None:
    engines = [Engine(), Engine(where, error)]

    def work(rank: int, store: Any) -> Any:
        sent = channel(rank, 2, store, NEVER_S, route=route)
        learner = Weights(rank, 2) if route == "intranode" else Weights()
        with pytest.raises(WeightUpdateError) as raised:
            sent.update_weights(learner, engines[rank], 1)
        refused = not engines[rank].usable
        engines[rank].where = ""
        sent.update_weights(learner, engines[rank], 2)
        return refused and engines[rank].usable, raised.value

    found = ranks(2, work)
    assert [ok for ok, _ in found] == [True, True]
    said = one_sentence([error for _, error in found])
    assert f"rank 1: {type(error).__name__}: {error}" in said and said.startswith(
        "weight update 1: "
    )


@pytest.mark.parametrize("route", ["gather", "intranode"])
def test_a_learner_without_weights_is_told_before_anybody_waits_for_it(route: str) -> None:
    class Away(Weights):
        def shards(self) -> Any:
            raise RuntimeError("the weights are not here")

    def work(rank: int, store: Any) -> None:
        away = Away() if route == "intranode" else None
        learner = away if rank == 1 else Weights(rank, 2)
        channel(rank, 2, store, NEVER_S, route=route).update_weights(learner, Engine(), 1)

    said = one_sentence(ranks(2, work))
    assert "rank 1: " in said and "answered" not in said


@pytest.mark.parametrize("push", [1, 2])
def test_an_agreement_that_failed_on_one_rank_is_made_anew_in_the_next_push(push: int) -> None:
    """The first one, and one for shards that changed on the other rank."""

    class More(Weights):
        def shards(self) -> Iterator[tuple[Shard, Tensor]]:
            yield from super().shards()
            yield from Weights(names="more", count=1).shards()

    def work(rank: int, store: Any) -> bool:
        sent = channel(rank, 2, store)
        learner = Weights(rank, 2)
        if push == 2:
            sent.update_weights(learner, Engine(), 1)
            learner = More(rank, 2) if rank == 0 else learner
        if rank == 1:
            plan = sent._relay._make_plan

            def broken() -> None:
                sent._relay._make_plan = plan
                plan()
                raise MemoryError("no room for a plan")

            sent._relay._make_plan = broken
        with pytest.raises(WeightUpdateError, match="rank 1: MemoryError: no room for a plan"):
            sent.update_weights(learner, Engine(), 2)
        sent.update_weights(learner, engine := Engine(), 3)
        names = [meta.name for load in sent._relay.plan.loads for meta in load.tensors]
        assert names == [*learner.full, "more0"][: 3 + push]
        return engine.usable

    assert ranks(2, work) == [True, True]


def test_shards_that_change_on_one_rank_are_planned_anew_on_all() -> None:
    def work(rank: int, store: Any) -> list[float]:
        sent = channel(rank, 3, store, sites=[[0, 1], [2]])
        first = sent.update_weights(Weights(rank, 2) if rank < 2 else None, Engine(), 1)
        every = Weights(rank, 2) if rank < 2 else Weights()  # nothing has to cross now
        if rank == 2:
            every._rows = (0, 8)
        second = sent.update_weights(every, engine := Engine(), 2)
        assert engine.usable
        return [first["slow_bytes"], second["slow_bytes"]]

    assert ranks(3, work) == [[2048, 1024]] * 3


def test_two_channels_of_one_store_do_not_meet_each_other() -> None:
    def work(rank: int, store: Any) -> bool:
        first, second = channel(rank, 2, store), channel(rank, 2, store)
        for sent in (first, second, first):
            sent.update_weights(Weights(rank, 2), engine := Engine(), 1)
        return engine.usable

    assert ranks(2, work) == [True, True]


# ---- one rank is late


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA's handles, over host memory."""
    monkeypatch.setattr(buckets, "cuda_handle", lambda buffer: b"handle")
    monkeypatch.setattr(colocated, "_gpu", lambda: CPU)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)


@pytest.mark.parametrize("route", ["gather", "intranode"])
def test_a_leader_that_is_stuck_in_its_engine_is_named_with_the_bucket(
    route: str, handles: None
) -> None:
    def work(rank: int, store: Any) -> None:
        engine = Engine("load", wait_s=3) if rank == 0 else Engine()
        sent = channel(rank, 4, store, 1, route=route, tp=2, transport="cuda_ipc")
        sent.update_weights(Weights(rank, 4) if route == "intranode" else Weights(), engine, 1)

    said = one_sentence(ranks(4, work))
    where = "loads up to bucket 1 (w2 ...), between the ranks of an engine"
    assert said.startswith(f"weight update 1: {where}")
    assert "waited 1 s for rank 0;" in said
    assert "rank 0 has not answered within 1 s" in said


def test_who_does_not_come_to_make_a_group_is_named() -> None:
    def work(rank: int, store: Any) -> Any:
        mine = Peers(rank, 3, store, timeout_s=0.5)
        mine.begin()
        if rank == 1:
            return None
        with pytest.raises(LinkError) as late:
            mine.group("links", (0, 1, 2), CPU)
        return late.value.failure

    one, _, three = ranks(3, work)
    assert one.kind == three.kind == "late" and one.peers == three.peers == (1,)
    assert one.text == "rank 0 could not join the group links: rank 0 waited 0.5 s for rank 1"


def test_a_rank_that_enters_after_the_others_gave_up_says_the_same_and_leaves_its_groups() -> None:
    store = dist.HashStore()
    one, two = (Peers(rank, 2, store, timeout_s=0.2) for rank in range(2))
    found = []
    for each in (one, two):
        each.begin()
        each._groups["old"] = group = Closed()
        with pytest.raises(WeightUpdateTimeoutError) as raised:
            each.vote("here")
        found.append(raised.value)
        assert group.closed and not each._groups
    assert "rank 0 waited 0.2 s for rank 1 to enter" in one_sentence(found)


class Closed:
    closed = False

    def close(self) -> None:
        self.closed = True


def test_a_verdict_is_one_for_all_also_for_who_comes_as_the_first_gives_up() -> None:
    store = dist.HashStore()
    one, two = (Peers(rank, 2, store, timeout_s=0.2) for rank in range(2))
    one.begin()
    two.begin()
    found: list[Any] = []

    def comes() -> None:
        one._drop = lambda: None  # type: ignore[method-assign]
        with pytest.raises(WeightUpdateTimeoutError) as raised:
            two.vote("done")
        found.append(raised.value)

    one._drop = comes  # type: ignore[method-assign]
    with pytest.raises(WeightUpdateTimeoutError) as raised:
        one.vote("done")
    assert "waited 0.2 s for rank 1 to finish its part" in one_sentence([*found, raised.value])


def test_a_rank_that_comes_in_the_last_moment_is_in_time_for_all() -> None:
    store = dist.HashStore()
    one, two = (Peers(rank, 2, store, timeout_s=0.2) for rank in range(2))
    one.begin()
    two.begin()
    give_up = one._give_up

    def comes(point: Any) -> None:
        give_up(point)
        two.vote(point)

    one._give_up = comes  # type: ignore[method-assign]
    one.vote("done")


@pytest.mark.parametrize(
    ("kind", "says"),
    [("link", "rank 1 has exited"), ("data", "rank 1 has not answered within 1 s")],
)
def test_only_a_rank_whose_link_broke_by_itself_is_gone(kind: Any, says: str) -> None:
    one = Peers(0, 2, dist.HashStore(), timeout_s=5)
    one.begin()
    with pytest.raises(WeightUpdateError, match=f"weight update 1: lost; {says}; engines wait for"):
        one.vote("done", Failure(kind, 0, 0, 0, "lost", (1,)))


def test_causes_come_before_what_follows_and_unknown_errors_last_without_being_lost() -> None:
    one, _ = (Peers(rank, 2, store, timeout_s=5) for store in [dist.HashStore()] for rank in (0, 1))
    kinds = ("error", "link", "late", "learner", "engine", "data")
    rows = [Failure(kind, 0, 0, 0, kind) for kind in kinds]
    assert [f.kind for f in sorted(rows, key=lambda f: f.order)] == list(reversed(kinds))
    later = Failure("late", 3, 0, 0, "waited in a later bucket")
    assert min(later, Failure("late", 2, 1, 1, "waited"), key=lambda f: f.order) is not later

    def work(rank: int, store: Any) -> None:
        each = Peers(rank, 2, store, timeout_s=5)
        each.begin()
        mine = [Failure("error", -1, 0, 0, "rank 0: KeyError: 'x'"), Failure("link", 1, 0, 1, "B")]
        each.vote("done", mine[rank])

    assert one_sentence(ranks(2, work)).startswith("weight update 1: B; rank 0: KeyError: 'x'; ")


# ---- memory


class Rooms:
    """Memory that really lives, by thread: every room is known by a weak reference.

    gloo's own thread lets go of a broadcast a moment later, on a busy machine only when the next
    bucket is there. A new maximum waits `patience_s` for that before it counts.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most: dict[int, int] = defaultdict(int)
        self.patience_s = 0.0
        self._alive: dict[int, list[Any]] = defaultdict(list)
        for module in (relay, colocated):
            monkeypatch.setattr(module, "torch", _Torch(self))

    def made(self, tensor: Tensor) -> Tensor:
        here = threading.get_ident()
        self._alive[here].append(weakref.ref(tensor.untyped_storage()))
        until = time.monotonic() + self.patience_s
        while (now := self._nbytes(here)) > self.most[here] and time.monotonic() < until:
            time.sleep(0.001)
        self.most[here] = max(self.most[here], now)
        return tensor

    def _nbytes(self, thread: int) -> int:
        alive = [storage for ref in self._alive[thread] if (storage := ref()) is not None]
        return sum(storage.nbytes() for storage in alive)


class _Torch:
    """torch, whose `empty` is watched."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **options: Any) -> Tensor:
        return self._rooms.made(torch.empty(*args, **options))


@pytest.mark.parametrize("one_exchange", [False, True])
@pytest.mark.parametrize("transport", ["bytes", "cuda_ipc"])
@pytest.mark.parametrize(
    ("sites", "holders"),
    [
        ([[0]], [0]),
        ([[0], [1], [2], [3], [4]], [0, 1, 2, 3, 4]),  # all send to all
        ([[0], [1], [2], [3], [4]], [0, 1]),
        ([[0, 1], [2, 3], [4]], [0, 2]),
        ([[1, 2], [3, 4]], [0]),  # that is in no site
    ],
)
def test_a_push_takes_two_buckets_at_most_and_says_what_it_takes(
    sites: list[list[int]],
    holders: list[int],
    transport: str,
    one_exchange: bool,
    handles: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n = max(rank for site in sites for rank in site) + 1
    rooms = Rooms(monkeypatch)

    def work(rank: int, store: Any) -> tuple[float, float]:
        sent = channel(rank, n, store, sites=sites, transport=transport)
        sent._relay.one_exchange = one_exchange
        place = holders.index(rank) if rank in holders else -1
        needs = any(rank in site for site in sites)
        learner = Weights(place, len(holders) if len(holders) != 5 else 4) if place >= 0 else None
        if len(holders) == 5:  # tensors of their own
            learner = Weights(names=f"from{rank}.", count=2)
        for version in (1, 2):
            figures = (
                sent.update_weights(learner, engine := Engine(), version)
                if needs
                else sent.update_weights(learner, None, version)
            )
        assert engine.usable if needs else True
        bucket = sent._relay.plan.bucket_bytes
        return rooms.most[threading.get_ident()] / bucket, figures["transient_gb"] * 1e9 / bucket

    # Checksums beside the parts.
    slack = 0.1 if all(len(site) == 1 for site in sites) else 0.6
    for rooms.patience_s in (0.0, 0.0, 0.2, 2.0):
        rooms.most.clear()
        found = ranks(n, work)
        if all(real <= 2 + slack and abs(said - real) <= slack for real, said in found):
            break
    for real, said in found:
        assert real <= 2 + slack and said <= 2.1
        assert said == pytest.approx(real, abs=slack)


def test_the_memory_of_an_export_is_that_of_gathered_bundles_and_the_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Bundles(Weights):
        """Own memory, then two bundles of two tensors."""

        def export(self) -> Iterator[tuple[str, Tensor]]:
            yield from self.full.items()
            for number in range(2):
                yield from zip((f"a{number}", f"b{number}"), torch.zeros(2, 16, 8), strict=True)

    monkeypatch.setattr(memory.collective, "is_alone", lambda: False)
    monkeypatch.setattr(memory.torch.cuda, "is_initialized", lambda: False)
    learner = Bundles()
    meter = ExportMeter(learner, lambda: 100)
    assert len(list(meter.watched(learner.export()))) == 8
    assert meter.most == 100 + 2 * 1024  # the list keeps both
    meter = ExportMeter(learner, lambda: 100)
    for _, tensor in meter.watched(learner.export()):
        del tensor
    assert meter.most == 100 + 1024


# ---- engines of another size


@pytest.mark.parametrize("route", ["gather", "intranode"])
def test_engines_may_have_another_size_from_one_push_to_the_next(route: str) -> None:
    """Two engines of a rank each, one over both, two again: who leads gets every bucket, with a
    payload for every rank, and the other gets nothing."""

    class Counting(Engine):
        payloads: set[int] = set()

        def load_bucket(self, bucket: Bucket, payloads: Any) -> None:
            super().load_bucket(bucket, payloads)
            self.payloads = self.payloads | {len(payloads)}

    engines = [Counting(), Counting()]

    def work(rank: int, store: Any) -> list[tuple[int, set[int]]]:
        sent, found = channel(rank, 2, store, route=route), []
        for version, tp in enumerate((1, 2, 1)):
            sent.resize(tp)
            engines[rank].count, engines[rank].payloads = 0, set()
            sent.update_weights(Weights(rank, 2), engines[rank], version)
            found.append((engines[rank].count, engines[rank].payloads))
        return found

    first, second = ranks(2, work)
    assert [p for _, p in first] == [{1}, {2}, {1}] and [p for _, p in second] == [{1}, set(), {1}]
    count = first[0][0]
    assert count > 1 and [n for n, _ in first] == [count] * 3
    assert [n for n, _ in second] == [count, 0, count]


def test_a_size_that_does_not_divide_the_ranks_is_refused() -> None:
    sent = channel(0, 1, dist.HashStore())
    with pytest.raises(ValueError, match="tp 2: must divide the 1 ranks of the channel"):
        sent.resize(2)
