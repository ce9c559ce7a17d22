"""Whose turn it is on shared nodes. RollMux's intra-group scheduler, arXiv 2512.11306.

Every job of a group does one rollout and one training in a round of turns, and on every node (a
slot) turns come in one cyclic order. A job asks for a phase, gets a grant as soon as it is first in
the order on all slots of the phase and they are free, and says when it is done. The order is kept
even where a later job could start at once: with a fixed order nobody starts later because somebody
was faster, so the period of the worst case (`cluster.py`) bounds all that happens. Starting whoever
asks first has no such bound.

What keeps the order from holding everybody up:

- a job takes part from its first request on;
- who asks for the same phase again (an evaluation, say) has given up the turns between;
- who neither holds nor wants anything for longer than its `patience_s` is passed over, and comes
  back with its next request;
- a dead job leaves (whoever watches its lease says so).

Towards the end of a rollout few responses are left. When `tail` of them are done and somebody waits
for its nodes, the job is asked to go on with one slot in so many and free the others; the next job
starts there, on what it has, if it can (`least`), and gets the rest when it is free.

No I/O and no clock: every call says what time it is, and returns what is to be done.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

TAIL = 0.8
"""Share of the responses after which the rest goes on elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A job of the group."""

    job: str
    slots: Mapping[str, tuple[str, ...]]
    """By pool, in the order of its phases (`rollout`, `train`): where the job is pinned."""
    least: Mapping[str, int] = field(default_factory=dict)
    """By pool: a phase may start on so many of its slots and get the others later; all by
    default."""
    keep: int = 0
    """Slots on which the tail of a rollout can go on; 0: it cannot move."""
    patience_s: float = math.inf
    """Between its phases a job may take this long before its turn passes."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The phase may start; of one that runs, it may use these slots, too."""

    job: str
    slots: tuple[str, ...]
    is_more: bool = False


@dataclass(frozen=True, slots=True)
class Migrate:
    """Go on with the rollout on `keep`, and say `freed` when `free` are free."""

    job: str
    keep: tuple[str, ...]
    free: tuple[str, ...]


Todo = Grant | Migrate


@dataclass(slots=True)
class _State:
    member: Member
    order: int
    turn: dict[str, int]
    """By pool: rounds in which it had its turn, or gave it up."""
    wants: tuple[str, ...] = ()
    """Pools that it waits for."""
    holds: tuple[str, ...] = ()
    """Pools that its running phase uses."""
    slots: list[str] = field(default_factory=list)
    """That it holds."""
    more: list[str] = field(default_factory=list)
    """That its running phase will get when they are free."""
    since: float = 0.0
    """When it last asked for something, or was done."""
    is_here: bool = False
    """It takes part in the order."""
    is_tail: bool = False
    """Enough of its responses are done."""
    is_moving: bool = False
    """It was asked to move."""

    def take_place(self, order: int) -> None:
        """Have another place in the order of turns."""
        self.order = order

    def enter(self) -> None:
        """Take part in the order from now on."""
        self.is_here = True

    def pass_over(self) -> None:
        """Take no part in the order until its next request."""
        self.is_here = False

    def ask(self, pools: tuple[str, ...], now: float) -> None:
        """Wait for a phase in these pools."""
        self.wants, self.since = pools, now

    def start(self, free: list[str], later: list[str]) -> None:
        """Begin the phase that it waits for, on the slots in `free`; it gets `later` besides."""
        for pool in self.wants:
            self.turn[pool] += 1
        self.holds, self.wants = self.wants, ()
        self.slots, self.more = free, later

    def extend(self, slots: list[str]) -> None:
        """Use more slots in its running phase, of those that it was to get."""
        self.more = [s for s in self.more if s not in slots]
        self.slots += slots

    def reach_tail(self) -> None:
        """Note that enough responses of its rollout are done."""
        self.is_tail = True

    def move(self) -> None:
        """Begin to free slots in its running phase, which gets no others."""
        self.is_moving = True
        self.more = []

    def end(self, now: float) -> None:
        """End its running phase."""
        self.slots, self.more, self.holds = [], [], ()
        self.is_tail = self.is_moving = False
        self.since = now


class PhaseMux:
    """The turns of one group."""

    def __init__(self, *, tail: float = TAIL) -> None:
        """`tail`: share of the responses after which a rollout may be moved; above 1: never."""
        self._tail = tail
        self._jobs: dict[str, _State] = {}
        self._users: dict[str, list[tuple[str, str]]] = {}
        """By slot: (pool, job)."""
        self._holder: dict[str, str] = {}

    # ---- who takes part

    def join(self, member: Member, now: float, order: Collection[str] = ()) -> None:
        """A job more. `order`: all jobs in the order of their turns; without it, it is the last.

        Raises:
            ValueError: it is there already, or has no slots in some pool.
        """
        if member.job in self._jobs:
            raise ValueError(f"job {member.job}: it is in the group already")
        if not member.slots or not all(member.slots.values()):
            raise ValueError(f"job {member.job}: a pool without slots in {dict(member.slots)}")
        last = max((s.order for s in self._jobs.values()), default=-1)
        self._jobs[member.job] = _State(member, last + 1, dict.fromkeys(member.slots, 0), since=now)
        for at, name in enumerate(order):
            if name in self._jobs:
                self._jobs[name].take_place(at)
        for pool, slots in member.slots.items():
            for slot in slots:
                self._users.setdefault(slot, []).append((pool, member.job))

    def leave(self, job: str, now: float) -> list[Todo]:
        """A job ended or died: what it held is free. Unknown ones are ignored."""
        state = self._jobs.pop(job, None)
        if state is None:
            return []
        for slot in [s for s, holder in self._holder.items() if holder == job]:
            del self._holder[slot]
        for users in self._users.values():
            users[:] = [(p, j) for p, j in users if j != job]
        return self._go(now)

    # ---- what jobs say

    def ask(self, job: str, pools: Iterable[str], now: float) -> list[Todo]:
        """A job wants to start a phase that uses its slots in these pools.

        Raises:
            ValueError: an unknown job or pool.
            RuntimeError: the job holds or waits for a phase.
        """
        state = self._state(job)
        wants = tuple(pools)
        for pool in wants:
            if pool not in state.member.slots:
                known = ", ".join(state.member.slots)
                raise ValueError(f"job {job}: it has no slots in pool {pool!r}, but in {known}")
        if not wants:
            raise ValueError(f"job {job}: a phase needs a pool")
        if state.wants or state.holds:
            doing = "holds" if state.holds else "waits for"
            raise RuntimeError(f"job {job}: it {doing} a phase of {state.wants or state.holds}")
        if not state.is_here:
            self._enter(state)
        turn = max(state.turn[p] for p in wants)
        pools = list(state.member.slots)
        first = min(pools.index(p) for p in wants)
        for at, pool in enumerate(pools):  # turns before this phase are used or given up
            state.turn[pool] = max(state.turn[pool], turn + 1 if at < first else turn)
        state.ask(wants, now)
        return self._go(now)

    def done(self, job: str, now: float) -> list[Todo]:
        """The phase is over, and its slots are free."""
        state = self._state(job)
        if not state.holds:
            raise RuntimeError(f"job {job}: it holds no phase that could be over")
        for slot in state.slots:
            del self._holder[slot]
        state.end(now)
        return self._go(now)

    def progress(self, job: str, done: int, wanted: int, now: float) -> list[Todo]:
        """So many of the responses of a running rollout are done."""
        state = self._state(job)
        if state.holds and done >= self._tail * wanted:
            state.reach_tail()
        return self._go(now)

    def freed(self, job: str, slots: Collection[str], now: float) -> list[Todo]:
        """A rollout has left these slots."""
        state = self._state(job)
        for slot in slots:
            if slot in state.slots:
                state.slots.remove(slot)
                del self._holder[slot]
        return self._go(now)

    def tick(self, now: float) -> list[Todo]:
        """Time has passed: turns that nobody claims pass on."""
        return self._go(now)

    def next_tick(self, now: float) -> float:
        """When time alone may change something; inf: never."""
        return min(
            (s.since + s.member.patience_s for s in self._jobs.values() if self._is_idle(s)),
            default=math.inf,
        )

    # ---- what others see

    def holders(self) -> dict[str, str]:
        """Slots in use, and by whom."""
        return dict(self._holder)

    def waiting(self) -> dict[str, float]:
        """Jobs that wait for a phase, and since when."""
        return {name: s.since for name, s in self._jobs.items() if s.wants}

    def held(self, job: str) -> tuple[str, ...]:
        """Slots of a job's running phase; none: it runs none."""
        return tuple(self._jobs[job].slots) if job in self._jobs else ()

    def blockers(self, job: str) -> list[str]:
        """Whom a waiting job waits for."""
        state = self._state(job)
        found = dict.fromkeys(
            name
            for slot in self._slots(state, state.wants)
            for name in (self._holder.get(slot), self._first(slot))
            if name is not None and name != job
        )
        return list(found)

    def state(self) -> list[dict[str, Any]]:
        """All of it as plain values, for `restore`."""
        return [asdict(s) for s in self._jobs.values()]

    def restore(self, saved: Iterable[Mapping[str, Any]], now: float) -> None:
        """Take what `state` gave in the place of what is here."""
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

    # ---- the order

    def _state(self, job: str) -> _State:
        if job not in self._jobs:
            known = ", ".join(self._jobs) or "none"
            raise ValueError(f"job {job}: not in this group, which has {known}")
        return self._jobs[job]

    def _enter(self, state: _State) -> None:
        """Into the round that others are in, if its place there has not passed."""
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
        """Whose turn on a slot is next."""
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
        for name, state in order:  # a running phase before one that starts
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
        """Rollouts in their tail leave slots that somebody could use at once."""
        out: list[Todo] = []
        for name, state in self._jobs.items():
            keep = state.member.keep
            if len(state.holds) != 1:  # who needs both pools leaves neither
                continue
            if not state.is_tail or state.is_moving or not 0 < keep < len(state.slots):
                continue
            free = set(state.slots[keep:])
            if any(self._could_use(other, free) for other in self._jobs.values()):
                state.move()
                out.append(Migrate(name, tuple(state.slots[:keep]), tuple(state.slots[keep:])))
        return out

    def _could_use(self, state: _State, free: Collection[str]) -> bool:
        """A job that waits, and could start if these slots were free."""
        for pool in state.wants:
            mine = state.member.slots[pool]
            if any(self._first(s) != state.member.job for s in mine):
                return False
            here = sum(s in free or s not in self._holder for s in mine)
            if here < min(state.member.least.get(pool, len(mine)), len(mine)):
                return False
        return any(s in free for s in self._slots(state, state.wants))
