"""Simulate the jobs of one group on virtual nodes (slots). The shipped `sched/phase_mux.py` orders
the phases of the jobs. As in `rlcore/mux/`, a phase starts once all of its nodes are free, and the
tail of a rollout releases whole nodes."""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlcore.sched.phase_mux import TAIL, Grant, Member, Migrate, PhaseMux, Todo
from rlcore.utils import phases

ROLLOUT, TRAIN = phases.POOLS
STEPS = {ROLLOUT: TRAIN, TRAIN: "sync", "sync": ROLLOUT}


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """Durations of one iteration of a job that holds all of its rollout and train nodes."""

    rollout_s: float
    train_s: float
    sync_s: float = 0.0
    tail_s: float = math.inf
    """Seconds from the start of the rollout until its tail, which may move to fewer nodes."""
    moved_s: float = 0.0
    """Seconds of the tail, including prefill, if the tail moves to the nodes that the job keeps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualJob:
    """A job of the group with the durations of its iterations."""

    member: Member
    iteration: Callable[[int], Iteration]
    colocated: bool = False
    """Whether rollout and training are one phase, which holds the slots of both pools."""


@dataclass(frozen=True, slots=True)
class SlotInterval:
    """Interval in which a job holds a slot."""

    job: str
    phase: str
    slot: str
    start: float
    end: float


@dataclass(slots=True)
class MuxTimeline:
    """Record of a simulation, with times in virtual seconds."""

    spans: list[SlotInterval] = field(default_factory=list)
    ends: dict[str, list[float]] = field(default_factory=dict)
    """End times of the iterations, by job."""
    moves: int = 0

    def count_move(self) -> None:
        """Count a rollout whose tail has moved to the nodes that the job keeps."""
        self.moves += 1

    def period(self, job: str, skip: int) -> float:
        """Return the mean seconds of an iteration, without the first `skip` iterations."""
        ends = self.ends[job]
        return (ends[-1] - ends[skip]) / (len(ends) - 1 - skip)

    def busy(self, slots: Sequence[str], start: float, end: float) -> float:
        """Return the share of the time from `start` to `end` in which jobs hold these slots."""
        wanted = set(slots)
        total = sum(
            max(0.0, min(s.end, end) - max(s.start, start)) for s in self.spans if s.slot in wanted
        )
        return total / (len(wanted) * (end - start))


@dataclass(slots=True)
class _JobProgress:
    """Progress of a job within its current iteration."""

    job: VirtualJob
    number: int = 0
    step: str = ROLLOUT
    now: Iteration = field(default_factory=lambda: Iteration(rollout_s=1, train_s=1))
    left_s: float = 0.0
    """Seconds that the current phase still takes."""
    at: float = 0.0
    version: int = 0
    is_tail: bool = False
    opened: dict[str, float] = field(default_factory=dict)

    def next_pools(self) -> tuple[str, ...]:
        """Return the pools that the next phase needs. Draw durations if an iteration begins."""
        if self.step == ROLLOUT:
            self.now = self.job.iteration(self.number)
        return (ROLLOUT, TRAIN) if self.job.colocated else (self.step,)

    def add_slots(self, slots: Sequence[str], now: float) -> None:
        """Add slots to the current phase."""
        self.opened |= dict.fromkeys(slots, now)

    def start_phase(self, now: float, switch_s: Mapping[str, float]) -> None:
        """Begin the phase whose slots have been granted."""
        self.left_s = self.now.rollout_s if self.step == ROLLOUT else self.now.train_s
        self.left_s += switch_s.get(self.step, 0.0)
        if self.job.colocated:
            self.left_s += self.now.train_s + self.now.sync_s + switch_s.get(TRAIN, 0.0)
        self.at, self.is_tail = now, False

    def advance(self, now: float) -> None:
        """Simulate the phase until `now`."""
        self.left_s -= now - self.at
        self.at = now

    def reach_tail(self) -> None:
        """Record that only the tail of the rollout is left."""
        self.is_tail = True

    def move_tail(self) -> None:
        """Continue the tail of the rollout on the slots that the job keeps."""
        self.left_s *= self.now.moved_s / (self.now.rollout_s - self.now.tail_s)

    def replan(self) -> None:
        """Invalidate planned events."""
        self.version += 1

    def end_phase(self) -> bool:
        """Go to the next phase. Return whether the next phase is the weight update."""
        self.step = "sync" if self.job.colocated else STEPS[self.step]
        return self.step == "sync"

    def end_iteration(self) -> None:
        """Go to the rollout of the next iteration."""
        self.step = ROLLOUT
        self.number += 1


class MuxSimulation:
    """Event-driven simulation of a group. `switch_s`: seconds to switch a node to another job when
    a phase begins, by pool; ignored if the group has only one job."""

    def __init__(
        self,
        jobs: Sequence[VirtualJob],
        *,
        switch_s: Mapping[str, float] | None = None,
        tail: float = TAIL,
    ) -> None:
        self._tail_share = tail
        self.mux = PhaseMux(tail=tail)
        self._switch = switch_s if switch_s and len(jobs) > 1 else {}
        self._runs = {j.member.job: _JobProgress(j) for j in jobs}
        self._events: list[tuple[float, int, str, str, int]] = []
        self._count = 0
        self.trace = MuxTimeline(ends={j.member.job: [] for j in jobs})
        order = [j.member.job for j in jobs]
        for job in jobs:
            self.mux.join(job.member, 0.0, order)
            self._at(0.0, "ask", job.member.job)

    def run(self, iterations: int) -> MuxTimeline:
        """Simulate until every job has completed `iterations` iterations. If no job can continue,
        raise RuntimeError."""
        while any(len(e) < iterations for e in self.trace.ends.values()):
            if not self._events:
                raise RuntimeError(
                    f"deadlock: all jobs wait; request time by job: {self.mux.waiting()}, "
                    f"holding job by slot: {self.mux.holders()}"
                )
            now, _, what, name, version = heapq.heappop(self._events)
            run = self._runs[name]
            if version != run.version:
                continue
            self._do(self._event(now, what, name, run), now)
        return self.trace

    def _event(self, now: float, what: str, name: str, run: _JobProgress) -> list[Todo]:
        if what == "ask":
            return self.mux.ask(name, run.next_pools(), now)
        if what == "tail":
            run.advance(now)
            run.reach_tail()
            self._plan(name, run, now)
            return self.mux.progress(name, math.ceil(1000 * self._tail_share), 1000, now)
        if what == "end":
            self._close(name, run, list(run.opened), now)
            syncs = run.end_phase()
            todo = self.mux.done(name, now)
            if syncs:
                self._at(now + (0.0 if run.job.colocated else run.now.sync_s), "synced", name)
                return todo
            return todo + self._event(now, "ask", name, run)
        assert what == "synced", what
        run.end_iteration()
        self.trace.ends[name].append(now)
        return self._event(now, "ask", name, run)

    def _do(self, todo: list[Todo], now: float) -> None:
        for t in todo:
            run = self._runs[t.job]
            if isinstance(t, Grant):
                self._open(t, run, now)
            else:
                self._move(t, run, now)

    def _open(self, grant: Grant, run: _JobProgress, now: float) -> None:
        assert not grant.is_more, "a phase starts on all of its nodes"
        run.add_slots(grant.slots, now)
        run.start_phase(now, self._switch)
        self._plan(grant.job, run, now)

    def _move(self, move: Migrate, run: _JobProgress, now: float) -> None:
        run.advance(now)
        self.trace.count_move()
        self._close(move.job, run, move.free, now)
        run.move_tail()
        self._plan(move.job, run, now)
        self._do(self.mux.freed(move.job, move.free, now), now)

    def _plan(self, name: str, run: _JobProgress, now: float) -> None:
        """Queue the new end of a job's current phase, and the start of its tail."""
        run.replan()
        self._at(now + max(0.0, run.left_s), "end", name)
        before_tail = run.left_s - (run.now.rollout_s - run.now.tail_s)
        if run.step == ROLLOUT and not run.is_tail and before_tail > -math.inf:
            self._at(now + max(0.0, before_tail), "tail", name)

    def _close(self, name: str, run: _JobProgress, slots: Sequence[str], now: float) -> None:
        for slot in slots:
            self.trace.spans.append(SlotInterval(name, run.step, slot, run.opened.pop(slot), now))

    def _at(self, time: float, what: str, name: str) -> None:
        self._count += 1
        version = self._runs[name].version
        heapq.heappush(self._events, (time, self._count, what, name, version))
