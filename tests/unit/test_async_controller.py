"""The controller of a round that does not end, over virtual replicas, under schedules that
hypothesis makes up: what is decoded where and when, when rewards come, who dies, when weights
change.

Token k of a response is the number k, so what a batch has says whether a token was lost or made
twice on the way through pauses, releases and deaths (invariant I6).
"""

import math
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.records import (
    Abort,
    Aborted,
    AnyCommand,
    AnyEvent,
    Down,
    Fail,
    Finish,
    Finished,
    Held,
    Hold,
    Holding,
    LengthReport,
    Move,
    Moved,
    Partial,
    Prompt,
    Ready,
    Released,
    Repair,
    Request,
    Rewarded,
    RewardResult,
    Sampling,
    Submit,
    TrainOrder,
    Wanted,
    Work,
    group_of,
)
from rlcore.rollout.async_controller import AsyncController, Saved
from rlcore.rollout.controller import MAX_REPAIRS
from rlcore.sched.histopipe import HistoPipe
from rlcore.sched.roles import GroupState, RequestState
from rlcore.sched.router import LeastLoaded
from rlcore.sched.staleness import SampleBuffer
from rlcore.utils.net import decode, encode

GROUP = 2
LONGEST = 6
SAMPLING = Sampling(max_tokens=LONGEST)


class Source:
    """Seven prompts over and over."""

    def __init__(self) -> None:
        self.issued = 0

    def __call__(self, count: int) -> list[Work]:
        found = []
        for _ in range(count):
            prompt = Prompt(index=self.issued % 7, dataset="s", tokens=np.ones(2, np.int32))
            found.append(
                Work(id=f"t{self.issued}", prompt=prompt, num_samples=GROUP, sampling=SAMPLING)
            )
            self.issued += 1
        return found


class World:
    """Rank 0 trains, the others sample. Messages are handled as they are sent."""

    def __init__(
        self, batch: int, alpha: float, extra: int, replicas: int, seed: int, pipe: bool = False
    ) -> None:
        self.pipe = pipe
        self.batch, self.alpha, self.extra, self.seed = batch, alpha, extra, seed
        self.rollout_ranks = range(1, replicas + 1)
        self.source = Source()
        self.controller = self.make()
        self.version = -1
        self.live: dict[int, dict[str, list[int]]] = {r: {} for r in self.rollout_ranks}
        self.dead: set[int] = set()
        self.unscored: list[tuple[int, str]] = []
        self.tokens: dict[str, list[int]] = {}
        self.versions: dict[str, list[int]] = {}
        self.batches: list[TrainOrder] = []
        self.repairs = 0
        self.log: list[tuple[str, Any]] = []
        self.holds = True
        self.trains = False

    def make(self) -> AsyncController:
        place: LeastLoaded | HistoPipe = LeastLoaded(3)
        if self.pipe:
            place = HistoPipe(engines=self.rollout_ranks, batch=self.batch, longest=LONGEST, rows=2)
        return AsyncController(
            buffer=SampleBuffer(self.batch, self.alpha, self.extra),
            issue=self.source,
            trainers=[0],
            rollout_ranks=self.rollout_ranks,
            ranks=self.rollout_ranks,
            place=place,
            deadline_s=1e9,
        )

    # ---- what happens

    def go(self) -> None:
        self.version += 1
        self.holds = False
        self.log.append(("go", self.version))
        self.obey(self.controller.go(self.version, 0.0))
        for rank in self.rollout_ranks:  # a push starts dead engines again
            if rank in self.dead:
                self.dead.discard(rank)
                self.send(Released(rank=rank))
            self.send(Ready(rank=rank))
        self.send(Wanted(rank=0))

    def decode(self, rank: int, count: int) -> None:
        """Some tokens of every request of a replica; those that are long enough are finished."""
        if self.holds or rank in self.dead:
            return
        for i in list(self.live[rank]):
            own = self.versions.setdefault(i, [])
            tokens = self.tokens.setdefault(i, [])
            for _ in range(count):
                if i not in self.live[rank] or len(tokens) == self.length(i):
                    break
                tokens.append(len(tokens))
                own.append(self.version)
            if i in self.live[rank] and len(tokens) == self.length(i):
                del self.live[rank][i]
                self.unscored.append((rank, i))
                n = len(tokens)
                self.send(Finished(rank=rank, id=i, num_tokens=n, finish="stop", version=own[0]))
        ids = tuple(self.live[rank])
        lengths = tuple(len(self.tokens[i]) for i in ids)
        self.send(LengthReport(rank=rank, ids=ids, lengths=lengths))

    def score(self, which: int) -> None:
        if self.unscored:
            rank, i = self.unscored.pop(which % len(self.unscored))
            self.send(Rewarded(rank=rank, id=i, result=RewardResult(score=float(which % 2))))

    def kill(self, rank: int, known: int) -> None:
        """Of each response the last tokens were not reported."""
        if rank in self.dead or self.is_last(rank):
            return
        self.dead.add(rank)
        lost, self.live[rank] = self.live[rank], {}
        partials = {}
        for i in lost:
            kept = max(len(self.tokens[i]) - known, 0)
            self.tokens[i], self.versions[i] = self.tokens[i][:kept], self.versions[i][:kept]
            partials[i] = self.partial(i)
        if not self.holds:
            self.send(Down(rank=rank, reason="killed", lost=tuple(lost), partials=partials))

    def is_last(self, rank: int) -> bool:
        """With it the run would end: all have died MAX_REPAIRS times with these weights."""
        others = [r for r in self.rollout_ranks if r != rank and r not in self.dead]
        return not others and self.controller._repairs == MAX_REPAIRS

    def end_step(self, mode: str) -> None:
        """The learner has trained its batch: weights change."""
        if not self.trains:
            return
        self.trains = False
        self.send(Holding(rank=0, mode=mode))
        assert self.controller.done
        self.holds = True
        self.go()

    # ---- messages

    def send(self, event: AnyEvent) -> None:
        self.log.append(("event", event))
        self.obey(self.controller.handle(event, 0.0))
        held = self.controller.buffer
        assert held.num_held <= math.ceil((1 + self.alpha) * self.batch) + self.extra  # I3
        assert held.num_held <= held.capacity

    def obey(self, commands: list[AnyCommand]) -> None:
        for command in commands:
            if isinstance(command, Submit):
                for request in command.requests:
                    self.start(command.rank, request)
            elif isinstance(command, Abort):
                for i in command.ids:  # an engine says so of each, and has room for others then
                    if self.live[command.rank].pop(i, None) is not None:
                        n = len(self.tokens[i])
                        self.send(Aborted(rank=command.rank, id=i, num_tokens=n))
            elif isinstance(command, Move):
                for i in command.ids:
                    if self.live[command.rank].pop(i, None) is not None:
                        self.send(Moved(rank=command.rank, partials={i: self.partial(i)}))
            elif isinstance(command, TrainOrder):
                self.train(command)
            elif isinstance(command, Repair) and command.rank == 0:
                self.repairs += 1
                self.dead.clear()
                for rank in (0, *self.rollout_ranks):
                    self.send(Ready(rank=rank))
            elif isinstance(command, Hold):
                if command.mode == "release":
                    while self.unscored:
                        self.score(0)
                    partials = {i: self.partial(i) for i in self.live[command.rank]}
                    self.live[command.rank] = {}
                    self.send(Released(rank=command.rank, partials=partials))
                self.send(Held(rank=command.rank))
            assert not isinstance(command, Fail), command

    def start(self, rank: int, request: Request) -> None:
        had = self.tokens.setdefault(request.id, [])
        self.versions.setdefault(request.id, [])
        kept = 0 if request.resume is None else len(request.resume.tokens)
        assert kept == len(had), request.id  # nothing is lost, nothing is made twice
        if rank not in self.dead:
            self.live[rank][request.id] = had

    def partial(self, i: str) -> Partial:
        n = len(self.tokens[i])
        return Partial(
            tokens=np.array(self.tokens[i], np.int32),
            logps=np.zeros(n, np.float32),
            versions=np.array(self.versions[i], np.int32),
        )

    def train(self, batch: TrainOrder) -> None:
        """The invariants of a batch."""
        assert not self.trains and not self.holds
        assert len(batch.groups) == self.batch
        trained = {g.id for b in self.batches for g in b.groups}
        for group in batch.groups:
            assert group.id not in trained
            for ref, length in zip(group.refs, group.lengths, strict=True):
                versions = self.versions[ref.id]
                assert self.version - versions[0] <= math.ceil(self.alpha)  # I2
                assert versions == sorted(versions)
                assert self.tokens[ref.id] == list(range(self.length(ref.id)))
                assert length == len(versions)
        if self.alpha % 1:
            oldest = [
                g.id
                for g in batch.groups
                if max(self.version - self.versions[r.id][0] for r in g.refs) > self.alpha
            ]
            assert len(oldest) <= math.ceil(self.alpha % 1 * self.batch)
        self.batches.append(batch)
        self.trains = True

    def length(self, i: str) -> int:
        return 1 + Random(f"{self.seed} {i}").randrange(LONGEST)

    def finish_step(self, mode: str = "in_place") -> None:
        """Everybody works until there is a batch."""
        for _ in range(200):
            if self.trains:
                return self.end_step(mode)
            for rank in self.rollout_ranks:
                self.decode(rank, 1)
                self.score(0)
                self.score(1)
        raise AssertionError("no batch comes")


MODES = st.sampled_from(["in_place", "recompute", "release"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.integers(1, 3), st.integers(1, 3)),
        st.tuples(st.just("score"), st.integers(0, 5)),
        st.tuples(st.just("kill"), st.integers(1, 3), st.integers(0, 3)),
        st.tuples(st.just("end_step"), MODES),
        st.tuples(st.just("finish_step"), MODES),
    ),
    max_size=40,
)


def play(world: World, steps: list[tuple]) -> World:
    world.go()
    for name, *args in steps:
        if name in ("decode", "kill"):
            args[0] = 1 + args[0] % len(world.rollout_ranks)
        getattr(world, name)(*args)
    world.finish_step()
    return world


@settings(max_examples=60, deadline=None)
@given(
    steps=STEPS,
    batch=st.integers(1, 4),
    alpha=st.sampled_from([0, 0.5, 1, 1.5, 2, 4]),
    extra=st.integers(0, 3),
    replicas=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    pipe=st.booleans(),
)
def test_no_schedule_breaks_an_invariant(
    steps: list[tuple], batch: int, alpha: float, extra: int, replicas: int, seed: int, pipe: bool
) -> None:
    """I2, I3 and I6 are asserted as things happen. In the end every group that was started was
    trained once, is held, or was dropped for being too old; and the log of what happened, played to
    another controller, gives the same batches."""
    world = play(World(batch, alpha, extra, replicas, seed, pipe), steps)
    trained = [g.id for b in world.batches for g in b.groups]
    assert len(trained) == len(set(trained)) == batch * len(world.batches)
    again = World(batch, alpha, extra, replicas, seed, pipe)
    found: list[TrainOrder] = []
    for kind, what in world.log:
        if kind == "go":
            again.controller.go(what, 0.0)
        else:
            found += [c for c in again.controller.handle(what, 0.0) if isinstance(c, TrainOrder)]
    assert encode(found) == encode(world.batches)


def test_alpha_0_waits_for_all_in_the_order_of_their_start() -> None:
    world = World(3, 0, 0, 2, seed=1)
    world.go()
    for step in range(3):
        world.finish_step()
        assert [g.id for g in world.batches[step].groups] == [f"t{3 * step + k}" for k in range(3)]
    assert world.source.issued == 12  # three of the version that begins


def test_batches_come_from_the_oldest_version_first() -> None:
    world = World(2, 2, 0, 4, seed=3)
    world.go()
    for _ in range(8):
        world.finish_step()
    born = [
        sorted(min(world.versions[r.id][0] for r in g.refs) for g in batch.groups)
        for batch in world.batches
    ]
    assert [v for versions in born for v in versions] == sorted(v for b in born for v in b)
    assert max(n - versions[0] for n, versions in enumerate(born)) == 2


def test_prompts_to_spare_end_by_their_age_and_are_aborted() -> None:
    """One replica of two does nothing: what it has is left behind."""
    world = World(2, 1, 4, 2, seed=5)
    world.go()
    dropped = []
    for _ in range(6):
        for _ in range(60):
            if world.trains:
                break
            world.decode(1, 1)
            world.score(0)
            world.score(0)
        world.end_step("in_place")
        dropped.append(world.controller.take_stats().get("async/stale_groups", 0))
    assert len(world.batches) == 6
    assert sum(dropped) > 0
    stuck = {group_of(i) for i in world.live[2]}
    assert len(stuck) <= world.controller.buffer.capacity


def test_a_response_that_is_longer_than_its_ranking_group_was_goes_on_elsewhere() -> None:
    """HistoPipe over two replicas. What a batch has was asserted: no token is lost on the way."""
    world = World(4, 1, 0, 2, seed=2, pipe=True)
    world.go()
    stats: dict[str, float] = {}
    for _ in range(12):
        world.finish_step()
        for name, value in world.controller.take_stats().items():
            stats[name] = stats.get(name, 0.0) + value
    assert stats["sched/migrated"] > 0 and stats["sched/migrated_tokens"] > stats["sched/migrated"]
    assert 0 < stats["pipe/moved"] / 12 < 0.5
    assert stats["pipe/known"] > 8  # all of the later steps

    state = decode(encode(world.controller._pipe.state()), dict)
    again = HistoPipe(engines=[4, 5, 6], batch=4, longest=LONGEST, rows=2)
    again.restore(state)
    assert again.state() == world.controller._pipe.state()


def test_without_an_engine_a_waiting_learner_has_all_start_again() -> None:
    world = World(2, 1, 0, 2, seed=7)
    world.go()
    world.decode(1, 1)
    world.kill(1, 1)
    assert world.repairs == 0
    world.kill(2, 0)
    assert world.repairs == 1
    world.finish_step()
    assert len(world.batches) == 1


def test_a_checkpoint_has_everything_that_is_under_way() -> None:
    """The restored controller, over another number of replicas, trains the same groups with the
    same tokens."""
    world = World(2, 2, 0, 2, seed=11)
    world.go()
    world.finish_step()
    for _ in range(3):
        world.decode(1, 1)
        world.decode(2, 1)
        world.score(0)
    world.finish_step("release")
    while not world.trains:
        world.decode(1, 1)
        world.decode(2, 1)
        world.score(0)
    world.trains = False
    world.send(Holding(rank=0, mode="release"))
    saved = decode(encode(world.controller.save()), Saved)
    held = {g.work.id for g in saved.groups}
    assert len(held) == world.controller.buffer.num_held == 4

    other = World(2, 2, 0, 1, seed=11)
    other.source.issued = world.source.issued
    other.tokens, other.versions = world.tokens, world.versions
    other.version = world.version
    other.controller.restore(saved, lambda rank: 1)
    other.go()
    other.finish_step()
    other.finish_step()
    trained = [g.id for b in other.batches for g in b.groups]
    assert set(trained) == held
    assert all(ref.owner == 1 for b in other.batches for g in b.groups for ref in g.refs)


def test_a_buffer_of_other_settings_is_refused() -> None:
    state = SampleBuffer(4, 2).state()
    with pytest.raises(ValueError, match="--async.alpha 1: the checkpoint's sample buffer was"):
        SampleBuffer(4, 1).restore(state)


def one_sampler(
    deadline_s: float = 9.0, alpha: int = 1, **keys: Any
) -> tuple[AsyncController, Source]:
    source = Source()
    made = AsyncController(
        buffer=SampleBuffer(1, alpha),
        issue=source,
        trainers=[0],
        rollout_ranks=[1],
        ranks=[1],
        place=LeastLoaded(9),
        deadline_s=deadline_s,
        **keys,
    )
    return made, source


def complete(controller: AsyncController, commands: list[AnyCommand], score: float) -> list:
    """Of what was submitted every response ends, with this reward."""
    found: list[AnyCommand] = []
    for submit in [c for c in commands if isinstance(c, Submit)]:
        for r in submit.requests:
            done = Finished(rank=1, id=r.id, num_tokens=1, finish="stop")
            found += controller.handle(done, 0.0)
            result = RewardResult(score=score)
            found += controller.handle(Rewarded(rank=1, id=r.id, result=result), 0.0)
    return found


def test_groups_of_equal_rewards_make_room_for_others() -> None:
    controller, _ = one_sampler(alpha=0, max_replaced=4)
    controller.go(0, 0.0)
    controller.handle(Wanted(rank=0), 0.0)
    (more,) = complete(controller, controller.handle(Ready(rank=1), 0.0), 1.0)
    assert isinstance(more, Submit) and {group_of(r.id) for r in more.requests} == {"t1"}
    assert more.rank == 1


def test_a_prompts_responses_share_a_replica_or_go_each_by_itself() -> None:
    load = {0: 0, 1: 0}
    together, spread = LeastLoaded(9), LeastLoaded(9, spread=True)
    for place, wanted in ((together, [0, 0, 0]), (spread, [0, 1, 0])):
        found, now = [], dict(load)
        for _ in range(3):
            rank = place.choose("t0.0", now)
            assert rank is not None
            now[rank] += 1
            found.append(rank)
        assert found == wanted
    assert LeastLoaded(2).choose("t0.0", {0: 2, 1: 2}) is None  # it waits for a place


def test_a_step_that_is_longer_than_the_deadline_makes_nobody_late() -> None:
    """Those that had nothing to do were silent meanwhile."""
    controller, _ = one_sampler(deadline_s=100.0)
    controller.go(0, 0.0)
    complete(controller, controller.handle(Ready(rank=1), 0.0), 1.0)
    assert any(isinstance(c, TrainOrder) for c in controller.handle(Wanted(rank=0), 1.0))
    (hold,) = controller.handle(Holding(rank=0, mode="in_place"), 150.0)
    assert isinstance(hold, Hold)
    assert not any(isinstance(c, Fail) for c in controller.tick(150.0))
    assert not any(isinstance(c, Fail) for c in controller.tick(249.0))
    late = [c for c in controller.tick(251.0) if isinstance(c, Fail)]
    assert late and "rank 1" in late[0].reason


def test_a_task_without_unequal_groups_is_not_searched_for_ever() -> None:
    controller, source = one_sampler(max_replaced=4)
    controller.go(0, 0.0)
    controller.handle(Wanted(rank=0), 0.0)
    commands = controller.handle(Ready(rank=1), 0.0)
    for _ in range(50):
        if any(isinstance(c, TrainOrder) for c in commands):
            break
        commands = complete(controller, commands, 1.0)
    (batch,) = [c for c in commands if isinstance(c, TrainOrder)]
    assert len(batch.groups) == 1 and 4 <= source.issued <= 8


def test_a_group_that_was_to_leave_with_the_next_hold_leaves_after_a_resume_too() -> None:
    controller, _ = one_sampler(max_replaced=4)
    controller.go(0, 0.0)
    commands = controller.handle(Ready(rank=1), 0.0)
    controller.handle(Holding(rank=0, mode="release"), 0.0)
    complete(controller, commands[:1], 1.0)  # equal, between the hold and its end
    controller.handle(Released(rank=1), 0.0)
    controller.handle(Held(rank=1), 0.0)
    saved = controller.save()
    other, _ = one_sampler(max_replaced=4)
    other.restore(saved, lambda rank: rank)
    other.go(1, 0.0)
    other.handle(Ready(rank=1), 0.0)
    (hold,) = other.handle(Holding(rank=0, mode="in_place"), 0.0)
    assert isinstance(hold, Hold) and "t0" in hold.forget


def test_an_episode_that_failed_makes_no_rewards_unequal() -> None:
    def request(number: int, score: float, finish: Finish) -> RequestState:
        found = RequestState(id=f"t0.{number}", order=number, finish=finish)
        found.result = RewardResult(score=score)
        return found

    group = GroupState(work=Source()(1)[0])
    group.counted = [request(0, 1.0, "stop"), request(1, 1.0, "stop"), request(2, 0.0, "failed")]
    assert group.has_equal_scores
    group.counted[1].result = RewardResult(score=0.0)
    assert not group.has_equal_scores
