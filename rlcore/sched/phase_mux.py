"""Order the phases of jobs that share nodes: RollMux's intra-group scheduler, arXiv 2512.11306.

In every round, each job of a group does one rollout and one training. On every node (a slot), the
jobs get their permits in one cyclic order. A job requests a phase and reports its end. The phase is
granted once the job is next in the order on all slots of the phase and these slots are free. The
order is kept even if a later job could start at once. In a fixed order, a faster job never delays
another job, so the worst-case period (`cluster.py`) is a bound. Grants in order of requests would
have no such bound.

The following rules keep one job from blocking the others:

- A job takes part in the order from its first request on.
- A job that requests the same phase again (such as for an evaluation) gives up its permits between
  the two requests.
- A job that neither holds nor requests a phase for longer than its `patience_s` is skipped until
  its next request.
- A failed job is removed (`leave`) by the process that watches the job's lease.

Towards the end of a rollout few responses are unfinished. Once a share `tail` of the responses is
done and another job waits, the rollout must continue on `keep` slots and free its other slots. The
next job starts on the freed slots, if its minimum (`least`) allows, and gets other slots later.

This module has no I/O and no clock: calls get the time as argument and return the actions to take.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

TAIL = 0.8
"""Share of finished responses from which a rollout may continue on fewer slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Settings of a job that is in the group."""

    job: str
    slots: Mapping[str, tuple[str, ...]]
    """Slots (nodes) to which the job is pinned, by pool. Pools are in the order of the job's phases
    (`rollout`, `train`)."""
    least: Mapping[str, int] = field(default_factory=dict)
    """Minimum number of free slots (nodes) to start a phase, by pool; default: all slots."""
    keep: int = 0
    """Number of slots (nodes) on which a rollout's tail can continue; 0: a tail keeps all slots."""
    patience_s: float = math.inf
    """Maximum seconds between two phases before the scheduler skips the job."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Permit to start a phase on `slots` (nodes). If `is_more`, a running phase gets more slots."""

    job: str
    slots: tuple[str, ...]
    is_more: bool = False


@dataclass(frozen=True, slots=True)
class Migrate:
    """Instruction to continue a rollout on the slots (nodes) `keep`. The caller must call `freed`
    once the rollout no longer uses the slots `free`."""

    job: str
    keep: tuple[str, ...]
    free: tuple[str, ...]


Todo = Grant | Migrate


@dataclass(slots=True)
class _State:
    member: Member
    order: int
    turn: dict[str, int]
    """Number of rounds in which the job used or gave up its permit, by pool."""
    wants: tuple[str, ...] = ()
    """Pools of the phase that the job waits for; empty if it waits for none."""
    holds: tuple[str, ...] = ()
    """Pools of the running phase; empty if no phase runs."""
    slots: list[str] = field(default_factory=list)
    """Slots (nodes) that the job holds."""
    more: list[str] = field(default_factory=list)
    """Slots (nodes) for which the running phase waits until other jobs free the slots."""
    since: float = 0.0
    """Time of the most recent request or end of a phase."""
    is_here: bool = False
    """Whether the job takes part in the cyclic order of permits."""
    is_tail: bool = False
    """Whether the running rollout has reached its tail and may move to fewer slots (nodes)."""
    is_moving: bool = False
    """Whether the running rollout has been told to free slots (`Migrate`)."""

    def take_place(self, order: int) -> None:
        """Set the job's position in the order of permits."""
        self.order = order

    def enter(self) -> None:
        """Let the job take part in the cyclic order of permits from now on."""
        self.is_here = True

    def pass_over(self) -> None:
        """Exclude the job from the cyclic order of permits until the job's next request."""
        self.is_here = False

    def ask(self, pools: tuple[str, ...], now: float) -> None:
        """Record that the job waits for a phase in these pools."""
        self.wants, self.since = pools, now

    def start(self, free: list[str], later: list[str]) -> None:
        """Start the phase that the job waits for, on the slots `free`. The phase gets the slots
        `later` when these are free."""
        for pool in self.wants:
            self.turn[pool] += 1
        self.holds, self.wants = self.wants, ()
        self.slots, self.more = free, later

    def extend(self, slots: list[str]) -> None:
        """Give the running phase further `slots`, for which the phase has waited."""
        self.more = [s for s in self.more if s not in slots]
        self.slots += slots

    def reach_tail(self) -> None:
        """Record that the rollout has reached its tail."""
        self.is_tail = True

    def move(self) -> None:
        """Record that the running rollout has been told to free slots; it gets no further slots."""
        self.is_moving = True
        self.more = []

    def end(self, now: float) -> None:
        """End the running phase."""
        self.slots, self.more, self.holds = [], [], ()
        self.is_tail = self.is_moving = False
        self.since = now


class PhaseMux:
    """Scheduler of phases for the jobs of one group."""

    def __init__(self, *, tail: float = TAIL) -> None:
        """Make a scheduler without jobs. `tail` is the share of finished responses from which a
        rollout may move to fewer slots; above 1: never."""
        self._tail = tail
        self._jobs: dict[str, _State] = {}
        self._users: dict[str, list[tuple[str, str]]] = {}
        """Jobs pinned to each slot, as pairs (pool, job)."""
        self._holder: dict[str, str] = {}

    # ---- membership

    def join(self, member: Member, now: float, order: Collection[str] = ()) -> None:
        """Add a job. `order` has all jobs in the order of permits; by default the new job is last.

        Raises:
            ValueError: the job is already in the group, or a pool has no slots for the job.
        """
        if member.job in self._jobs:
            raise ValueError(f"job {member.job}: is already in the group")
        if not member.slots or not all(member.slots.values()):
            raise ValueError(f"job {member.job}: every pool needs a slot, got {dict(member.slots)}")
        last = max((s.order for s in self._jobs.values()), default=-1)
        self._jobs[member.job] = _State(member, last + 1, dict.fromkeys(member.slots, 0), since=now)
        for at, name in enumerate(order):
            if name in self._jobs:
                self._jobs[name].take_place(at)
        for pool, slots in member.slots.items():
            for slot in slots:
                self._users.setdefault(slot, []).append((pool, member.job))

    def leave(self, job: str, now: float) -> list[Todo]:
        """Remove a job that ended or failed, and free its slots. An unknown job is ignored."""
        state = self._jobs.pop(job, None)
        if state is None:
            return []
        for slot in [s for s, holder in self._holder.items() if holder == job]:
            del self._holder[slot]
        for users in self._users.values():
            users[:] = [(p, j) for p, j in users if j != job]
        return self._go(now)

    # ---- calls from jobs

    def ask(self, job: str, pools: Iterable[str], now: float) -> list[Todo]:
        """Request a phase that uses the job's slots in these pools.

        Raises:
            ValueError: the job or pool is unknown.
            RuntimeError: the job already holds or waits for a phase.
        """
        state = self._state(job)
        wants = tuple(pools)
        for pool in wants:
            if pool not in state.member.slots:
                known = ", ".join(state.member.slots)
                raise ValueError(f"job {job}: has no slots in pool {pool!r}, only in {known}")
        if not wants:
            raise ValueError(f"job {job}: a phase must name at least one pool")
        if state.wants or state.holds:
            doing = "holds" if state.holds else "waits for"
            raise RuntimeError(
                f"job {job}: already {doing} a phase of {state.wants or state.holds}"
            )
        if not state.is_here:
            self._enter(state)
        turn = max(state.turn[p] for p in wants)
        pools = list(state.member.slots)
        first = min(pools.index(p) for p in wants)
        for at, pool in enumerate(pools):  # the job gives up unused permits before this phase
            state.turn[pool] = max(state.turn[pool], turn + 1 if at < first else turn)
        state.ask(wants, now)
        return self._go(now)

    def done(self, job: str, now: float) -> list[Todo]:
        """End the running phase of a job and free its slots."""
        state = self._state(job)
        if not state.holds:
            raise RuntimeError(f"job {job}: cannot end a phase, because it is in none")
        for slot in state.slots:
            del self._holder[slot]
        state.end(now)
        return self._go(now)

    def progress(self, job: str, done: int, wanted: int, now: float) -> list[Todo]:
        """Record that `done` of the `wanted` responses of a running rollout are finished."""
        state = self._state(job)
        if state.holds and done >= self._tail * wanted:
            state.reach_tail()
        return self._go(now)

    def freed(self, job: str, slots: Collection[str], now: float) -> list[Todo]:
        """Record that a rollout has freed these slots, as its `Migrate` instruction required."""
        state = self._state(job)
        for slot in slots:
            if slot in state.slots:
                state.slots.remove(slot)
                del self._holder[slot]
        return self._go(now)

    def tick(self, now: float) -> list[Todo]:
        """Advance the time: skip jobs that have been idle for longer than their `patience_s`."""
        return self._go(now)

    def next_tick(self, now: float) -> float:
        """Return the next time at which `tick` may have an effect; inf: never."""
        return min(
            (s.since + s.member.patience_s for s in self._jobs.values() if self._is_idle(s)),
            default=math.inf,
        )

    # ---- queries

    def holders(self) -> dict[str, str]:
        """Return the job that holds each slot, for all slots in use."""
        return dict(self._holder)

    def waiting(self) -> dict[str, float]:
        """Return the request time of each job that waits for a phase."""
        return {name: s.since for name, s in self._jobs.items() if s.wants}

    def held(self, job: str) -> tuple[str, ...]:
        """Return the slots of a job's running phase; empty if no phase runs."""
        return tuple(self._jobs[job].slots) if job in self._jobs else ()

    def blockers(self, job: str) -> list[str]:
        """Return the jobs that keep a waiting job from starting its phase."""
        state = self._state(job)
        found = dict.fromkeys(
            name
            for slot in self._slots(state, state.wants)
            for name in (self._holder.get(slot), self._first(slot))
            if name is not None and name != job
        )
        return list(found)

    def state(self) -> list[dict[str, Any]]:
        """Return the whole state of the scheduler as plain values, for `restore`."""
        return [asdict(s) for s in self._jobs.values()]

    def restore(self, saved: Iterable[Mapping[str, Any]], now: float) -> None:
        """Replace the current state by a saved result of the method `state`."""
        self._jobs.clear()
        self._users.clear()
        self._holder.clear()
        for values in saved:
            m = dict(values["member"])
            m["slots"] = {p: tuple(s) for p, s in m["slots"].items()}
            member = Member(**m)
            self.join(member, now)
            rest = {k: v for k, v in values.items() if k != "member"}
            rest |= {k: tuple(rest[k]) for k in ("wants", "holds")}
            self._jobs[member.job] = _State(member, **rest)
            self._holder |= dict.fromkeys(rest["slots"], member.job)

    # ---- the cyclic order

    def _state(self, job: str) -> _State:
        if job not in self._jobs:
            known = ", ".join(self._jobs) or "none"
            raise ValueError(f"job {job}: not in this group ({known})")
        return self._jobs[job]

    def _enter(self, state: _State) -> None:
        """Let a job enter the current round of permits. If the position of the job has passed in
        this round, the job enters the next round."""
        state.enter()
        for pool in state.member.slots:
            others = [
                (s.turn[pool], s.order)
                for s in self._jobs.values()
                if s.is_here and s is not state and pool in s.turn
            ]
            turn, order = max(others, default=(0, -1))
            state.turn[pool] = max(state.turn[pool], turn - (turn > 0 and state.order > order))

    def _slots(self, state: _State, pools: Iterable[str]) -> list[str]:
        return [s for p in pools for s in state.member.slots[p]]

    def _is_idle(self, state: _State) -> bool:
        return state.is_here and not state.wants and not state.holds

    def _first(self, slot: str) -> str | None:
        """Return the job that gets the next permit on a slot; None if no job takes part."""
        best, first = None, None
        for pool, job in self._users[slot]:
            state = self._jobs[job]
            if state.is_here and (key := (state.turn[pool], state.order)) < (best or (math.inf,)):
                best, first = key, job
        return first

    def _go(self, now: float) -> list[Todo]:
        for state in self._jobs.values():
            if self._is_idle(state) and now - state.since > state.member.patience_s:
                state.pass_over()
        order = sorted(self._jobs.items(), key=lambda item: item[1].order)
        out: list[Todo] = []
        for name, state in order:  # running phases have precedence over new phases
            if todo := self._extend(name, state):
                out.append(todo)
        for name, state in order:
            if state.wants and (todo := self._grant(name, state)):
                out.append(todo)
        return out + self._moves()

    def _grant(self, name: str, state: _State) -> Grant | None:
        free, later = [], []
        for pool in state.wants:
            mine = state.member.slots[pool]
            if any(self._first(s) != name for s in mine):
                return None
            here = [s for s in mine if s not in self._holder]
            if len(here) < min(state.member.least.get(pool, len(mine)), len(mine)):
                return None
            free += here
            later += [s for s in mine if s not in here]
        state.start(free, later)
        self._holder |= dict.fromkeys(free, name)
        return Grant(name, tuple(free))

    def _extend(self, name: str, state: _State) -> Grant | None:
        here = [s for s in state.more if s not in self._holder]
        if not here:
            return None
        state.extend(here)
        self._holder |= dict.fromkeys(here, name)
        return Grant(name, tuple(here), is_more=True)

    def _moves(self) -> list[Todo]:
        """Tell rollouts in their tail to free slots that another job could use at once."""
        out: list[Todo] = []
        for name, state in self._jobs.items():
            keep = state.member.keep
            if len(state.holds) != 1:  # a phase that uses both pools cannot free slots
                continue
            if not state.is_tail or state.is_moving or not 0 < keep < len(state.slots):
                continue
            free = set(state.slots[keep:])
            if any(self._could_use(other, free) for other in self._jobs.values()):
                state.move()
                out.append(Migrate(name, tuple(state.slots[:keep]), tuple(state.slots[keep:])))
        return out

    def _could_use(self, state: _State, free: Collection[str]) -> bool:
        """Return whether a waiting job could start at once if the slots `free` were free."""
        for pool in state.wants:
            mine = state.member.slots[pool]
            if any(self._first(s) != state.member.job for s in mine):
                return False
            here = sum(s in free or s not in self._holder for s in mine)
            if here < min(state.member.least.get(pool, len(mine)), len(mine)):
                return False
        return any(s in free for s in self._slots(state, state.wants))
