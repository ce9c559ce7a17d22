"""Who trains while others decode: the policy, and the controller with it under any order of
events."""

import random
from collections import deque
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.config.schema import StreamConfig
from rlcore.records import (
    Abort,
    Aborted,
    AnyCommand,
    AnyEvent,
    Down,
    DropEngine,
    EndRound,
    Finished,
    Partial,
    Prompt,
    Ready,
    Release,
    Released,
    Repair,
    Rewarded,
    RewardResult,
    Sampling,
    Ship,
    Submit,
    Train,
    Trained,
    Work,
)
from rlcore.rollout.controller import Controller
from rlcore.sched.roles import Cell, GroupState, Live, RequestState
from rlcore.sched.router import LeastLoaded
from rlcore.sched.stop import StopAtAll, StopAtFirst
from rlcore.sched.stream import LengthDistribution, StreamWindow, cells
from rlcore.trainer import stream_loop

FOUR = cells([[0], [1], [2], [3]], [[0], [1], [2], [3]])


def window(parts=FOUR, *, cache_tokens=1000, max_running=64, batch_tokens=100, **more: Any):
    sizes = {"cache_tokens": cache_tokens, "max_running": max_running, "batch_tokens": batch_tokens}
    return StreamWindow(parts, **sizes, **(asdict(StreamConfig()) | more))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(0, 60))
def test_the_mean_of_longer_ones_is_over_the_newest(lengths: list[int], length: int) -> None:
    seen = LengthDistribution(history=20)
    for n in lengths:
        seen.add(n)
    longer = [n for n in lengths[-20:] if n > length]
    want = sum(longer) / len(longer) if longer else None
    assert seen.mean_above(length) == want


def test_cells_are_whole_engines_and_whole_model_replicas() -> None:
    assert [c.ranks for c in FOUR] == [(0,), (1,), (2,), (3,)]
    # Pipelines over (0, 2) and (1, 3).
    found = cells([[0], [1], [2], [3]], [[0, 2], [1, 3]])
    assert found == [
        Cell(ranks=(0, 2), leaders=(0, 2), dp_ranks=(0,)),
        Cell(ranks=(1, 3), leaders=(1, 3), dp_ranks=(1,)),
    ]
    # Engines over two ranks, one replica each.
    found = cells([[0, 1], [2, 3]], [[0], [1], [2], [3]])
    assert found[1] == Cell(ranks=(2, 3), leaders=(2,), dp_ranks=(2, 3))
    assert len(cells([[0, 1], [2, 3]], [[0, 2], [1, 3]])) == 1
    assert len(cells([[0], [1], [2], [3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]])) == 2


def test_one_cell_cannot_do_both() -> None:
    with pytest.raises(ValueError, match="use more ranks or --mode sync"):
        window(FOUR[:1])


def test_the_last_half_is_asked_for_every_five_percent_from_twenty_to_fifty() -> None:
    asked = []

    def live() -> list[Live]:
        asked.append(done)
        return [Live(10, 0, 10_000)]  # never fits

    w = window()
    for done in range(101):
        assert w.release(done, 100, live, range(4)) == ()
    assert asked == [20, 25, 30, 35, 40, 45, 50]
    w.start()
    assert w.release(30, 100, lambda: [Live(10, 0, 100)], range(4)) == FOUR[2:]
    assert w.release(40, 100, lambda: [Live(10, 0, 100)], range(4)) == ()
    assert [c.ranks for c in window(FOUR[:3]).release(1, 4, list, range(3))] == [(2,)]


def test_what_is_left_must_fit_into_those_that_stay() -> None:
    many = [Live(10, 5, 100)] * 30
    stays = window(cache_tokens=1649).release(1, 4, lambda: many, range(4))
    leaves = window(cache_tokens=1650).release(1, 4, lambda: many, range(4))
    assert (stays, leaves) == ((), FOUR[2:])  # 30 x (10 + 100) over two
    w = window(cache_tokens=450)  # 30 x (10 + 20)
    for n in (2, 15, 25):
        w.finished(n)
    assert w.release(1, 4, lambda: many, range(4)) == FOUR[2:]
    assert window(cache_tokens=10**6, max_running=14).release(1, 4, lambda: many, range(4)) == ()
    assert window().release(1, 4, list, [2, 3]) == ()  # the others are dead


def test_a_batch_fills_a_micro_batch_of_every_replica() -> None:
    states = [GroupState(work=w) for w in work(5, 1)]
    for s in states:
        s.counted = [RequestState(id="", num_tokens=27)]  # 30 tokens each
    cell = Cell(ranks=(2, 3), leaders=(2,), dp_ranks=(2, 3))
    assert window(batch_tokens=10).take(states, cell) == 2
    assert window(batch_tokens=65).take(states, cell) == 4
    assert window(batch_tokens=1000).take(states, cell) == 5


# ---- the controller


def work(groups: int, samples: int) -> list[Work]:
    prompt = Prompt(index=0, dataset="s", tokens=np.arange(3, dtype=np.int32))
    sampling = Sampling(max_tokens=50)
    return [Work(id=f"t{g}", prompt=prompt, num_samples=samples, sampling=sampling)
            for g in range(groups)]  # fmt: skip


class Replicas:
    """Ranks that carry out commands in any order of events, and check them."""

    def __init__(self, parts: list[Cell], n: int, stop: Any, draw: random.Random, deaths: int):
        self.draw, self.n, self.deaths, self.parts = draw, n, deaths, parts
        self.leaders = sorted(leader for cell in parts for leader in cell.leaders)
        rest = {r: [m for c in parts if r in c.leaders for m in c.ranks if m not in c.leaders]
                for r in self.leaders}  # fmt: skip
        elastic = window(parts, batch_tokens=20)
        self.controller = Controller(
            ranks=self.leaders, all_ranks=range(n), members=rest, place=LeastLoaded(10**6),
            stop=stop, deadline_s=10.0, elastic=elastic,
        )  # fmt: skip
        self.live: dict[int, dict[str, int]] = {r: {} for r in self.leaders}
        self.inbox: dict[int, deque[AnyCommand]] = {r: deque() for r in range(n)}
        self.outbox: dict[int, deque[AnyEvent]] = {r: deque() for r in range(n)}
        self.holds: dict[str, int] = {}
        self.dead: set[int] = set()
        self.trains: dict[int, list[Train]] = {r: [] for r in range(n)}
        self.shipped: dict[int, set[str]] = {r: set() for r in range(n)}
        self.ends: dict[int, EndRound] = {}
        self.releasing: set[int] = set()
        self.decodes = set(self.leaders)

    def run(self, todo: list[Work]) -> None:
        self.send(self.controller.start(todo, 0.0))
        for rank in range(self.n):
            self.outbox[rank].append(Ready(rank=rank))
        for _ in range(20_000):
            if len(self.ends) == self.n:
                return
            choices = [*(("in", r) for r in self.inbox if self.inbox[r]),
                       *(("out", r) for r in self.outbox if self.outbox[r]),
                       *(("decode", r) for r in self.leaders if self.live[r]),
                       *(("train", r) for r in self.trains if self.trains[r])]  # fmt: skip
            what, rank = self.draw.choice(choices)
            getattr(self, f"do_{what}")(rank)
        raise AssertionError("the round does not end")

    def send(self, commands: list[AnyCommand]) -> None:
        for command in commands:
            self.inbox[command.rank].append(command)

    def do_out(self, rank: int) -> None:
        self.send(self.controller.handle(self.outbox[rank].popleft(), 1.0))

    def do_decode(self, rank: int) -> None:
        if self.deaths and self.draw.random() < 0.05:
            self.deaths -= 1
            self.dead.add(rank)
            self.outbox[rank].append(Down(rank=rank, reason="x", partials=self.let_go(rank)))
            return
        request = self.draw.choice(list(self.live[rank]))
        self.live[rank][request] += 1
        if self.draw.random() < 0.3:
            length = self.live[rank].pop(request)
            self.holds[request] = rank
            self.outbox[rank] += [
                Finished(rank=rank, id=request, num_tokens=length, finish="stop"),
                Rewarded(rank=rank, id=request, result=RewardResult(score=self.draw.random())),
            ]
            self.released(rank)

    def let_go(self, rank: int) -> dict[str, Partial]:
        live, self.live[rank] = self.live[rank], {}
        zeros = {i: np.zeros(n, np.int32) for i, n in live.items()}
        return {i: Partial(tokens=z, logps=z, versions=z) for i, z in zeros.items()}

    def released(self, rank: int) -> None:
        if rank in self.releasing and (not self.live[rank] or self.draw.random() < 0.5):
            self.releasing.discard(rank)
            self.decodes.discard(rank)
            self.outbox[rank].append(Released(rank=rank, partials=self.let_go(rank)))

    def do_train(self, rank: int) -> None:
        todo = self.trains[rank][0]
        needs = {ref.id for g in todo.groups for ref in g.refs if ref.owner != rank}
        if needs <= self.shipped[rank]:
            self.trains[rank].pop(0)
            self.outbox[rank].append(Trained(rank=rank, seconds=1.0))

    def do_in(self, rank: int) -> None:
        command = self.inbox[rank][0]
        if isinstance(command, EndRound | Repair) and self.trains[rank]:
            return  # they are trained first
        self.inbox[rank].popleft()
        if isinstance(command, Submit):
            if rank not in self.dead:
                assert rank in self.decodes
                for r in command.requests:
                    self.live[rank][r.id] = len(r.resume.tokens) if r.resume else 0
        elif isinstance(command, Abort):
            for i in command.ids:
                if i in self.live[rank]:
                    tokens = self.live[rank].pop(i)
                    self.outbox[rank].append(Aborted(rank=rank, id=i, num_tokens=tokens))
            self.released(rank)
        elif isinstance(command, Release):
            if rank not in self.dead:
                self.releasing.add(rank)
                self.released(rank)
        elif isinstance(command, Ship):
            assert all(self.holds[i] == rank for i in command.ids)
            for to in command.to:
                self.shipped[to] |= set(command.ids)
        elif isinstance(command, Train):
            assert rank not in self.decodes or rank in self.dead or rank not in self.leaders
            # It may wait for the others from now on, so what they need of it is on its way.
            own = {ref.id for g in command.groups for ref in g.refs if ref.owner == rank}
            others = [to for cell in self.parts if rank in cell.ranks for to in cell.ranks]
            assert all(own <= self.shipped[to] for to in others)
            self.trains[rank].append(command)
        elif isinstance(command, Repair):
            self.dead.discard(rank)
            self.releasing.discard(rank)
            if rank in self.leaders:
                self.decodes.add(rank)
            self.outbox[rank].append(Ready(rank=rank))
        elif isinstance(command, EndRound):
            self.ends[rank] = command
        else:
            raise AssertionError(command)


LAYOUTS = {
    "4 of 1": (FOUR, 4),
    "2 of 2, engines of 2": (cells([[0, 1], [2, 3]], [[0], [1], [2], [3]]), 4),
    "2 of 2, pipelines": (cells([[0], [1], [2], [3]], [[0, 2], [1, 3]]), 4),
    "2 of 1": (cells([[0], [1]], [[0], [1]]), 2),
}


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(sorted(LAYOUTS)), st.integers(0, 2), st.booleans())
def test_every_group_is_trained_once_whatever_happens(
    seed: int, layout: str, deaths: int, tail: bool
) -> None:
    parts, n = LAYOUTS[layout]
    todo = work(8, 3)
    stop = StopAtFirst({"s": 6}, {w.id: "s" for w in todo}) if tail else StopAtAll()
    world = Replicas(parts, n, stop, random.Random(seed), deaths)
    world.run(todo)
    end = world.ends[0]
    for other in world.ends.values():
        assert [g.id for g in other.groups] == [g.id for g in end.groups]
        assert other.streamed == end.streamed
    kept = {g.id for g in end.groups}
    assert len(kept) == len(end.groups) == (6 if tail else 8)
    early = [g for s in end.streamed for g in s.groups]
    assert len(early) == len(set(early)) and set(early) <= kept
    for group in end.groups:
        assert len(group.refs) == 3
        assert all(world.holds[ref.id] == ref.owner for ref in group.refs)
    if early and not end.stats.get("sched/repairs"):
        assert 0 < end.stats["sched/streamed_tokens"] <= 1
        assert 0.2 <= end.stats["sched/stream_at"] <= 0.5


def test_an_engine_that_leaves_is_ended_when_another_of_its_ranks_has_lost_its_part() -> None:
    """Or it might never let go of its requests."""
    parts = cells([[0, 1], [2, 3]], [[0], [1], [2], [3]])
    c = Controller(
        ranks=[0, 2], all_ranks=range(4), members={0: [1], 2: [3]}, place=LeastLoaded(64),
        stop=StopAtAll(), deadline_s=10.0, elastic=window(parts, cache_tokens=10**6),
    )  # fmt: skip
    c.start(work(4, 1), 0.0)
    for rank in range(4):
        c.handle(Ready(rank=rank), 0.0)
    c.handle(Finished(rank=0, id="t0.0", num_tokens=3, finish="stop"), 1.0)
    release, *_ = c.handle(Rewarded(rank=0, id="t0.0", result=RewardResult(score=1.0)), 1.0)
    assert isinstance(release, Release) and release.rank == 2
    (drop,) = c.handle(Down(rank=3, reason="killed"), 1.0)
    assert isinstance(drop, DropEngine) and drop.rank == 2
    (submit, *_) = c.handle(Down(rank=2, reason="was stopped: killed"), 1.0)
    assert isinstance(submit, Submit) and submit.rank == 0


def test_a_gradient_that_is_begun_anew_takes_the_engine_back() -> None:
    """Also where nothing was trained: then there is nothing to drop, and with --train.offload no
    buffer to drop it from."""
    back: list[bool] = []
    device = SimpleNamespace(engine_is_back=lambda: back.append(True))
    stream = stream_loop.StreamTrainer(SimpleNamespace(cfg=None, learner=None, device=device))  # type: ignore
    stream.forget()
    assert back == [True]


class Leaves:
    """An `Elastic`: the last replica leaves when half is done, and trains nothing."""

    def __init__(self, rank: int) -> None:
        self.cell = Cell(ranks=(rank,), leaders=(rank,), dp_ranks=())
        self.is_chosen, self.has_left = False, set()

    def start(self) -> None:
        pass

    def finished(self, num_tokens: int) -> None:
        pass

    def release(self, done: int, wanted: int, live: Any, up: Any) -> list[Cell]:
        if self.is_chosen or 2 * done < wanted or set(up) <= set(self.cell.leaders):
            return []
        self.is_chosen = True
        return [self.cell]

    def take(self, ready: Any, cell: Cell) -> int:
        raise AssertionError

    def left(self, rank: int) -> None:
        assert rank not in self.has_left
        self.has_left.add(rank)


class Leavers(Replicas):
    """A node that was left is another job's, whatever dies and starts again."""

    def __init__(self, dice: random.Random, deaths: int) -> None:
        super().__init__(FOUR, 4, StopAtAll(), dice, deaths)
        self.leaves = Leaves(3)
        self.controller = Controller(
            ranks=range(4),
            place=LeastLoaded(64),
            stop=StopAtAll(),
            deadline_s=10.0,
            elastic=self.leaves,
        )

    def do_in(self, rank: int) -> None:
        super().do_in(rank)
        self.decodes -= self.leaves.has_left


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 6))
def test_a_node_that_was_left_gets_nothing_until_the_round_is_over(seed: int, deaths: int) -> None:
    world = Leavers(random.Random(seed), deaths)
    world.run(work(8, 3))
    end = world.ends[0]
    assert len(end.groups) == 8 and all(len(g.refs) == 3 for g in end.groups)
    assert all(world.holds[ref.id] == ref.owner for g in end.groups for ref in g.refs)
    assert not end.streamed and "sched/stream_at" not in end.stats
    if world.leaves.is_chosen:
        assert end.stats["sched/tail_at"] >= 0.5
    if not deaths:
        assert world.leaves.is_chosen


def test_most_rounds_do_train_early() -> None:
    """Or the test above says nothing."""
    early = migrated = 0
    for seed in range(20):
        world = Replicas(FOUR, 4, StopAtAll(), random.Random(seed), 0)
        world.run(work(8, 3))
        early += bool(world.ends[0].streamed)
        migrated += world.ends[0].stats.get("sched/migrated", 0) > 0
    assert early >= 15 and migrated >= 10
