"""The sample buffer of `--mode async`: how many groups may be in flight, how old they may be, and
which are trained next. ROLL Flash, arXiv:2510.11345.

A version is a number of policy updates. The age of a group is that of the oldest first token of its
responses. Policy version n trains B groups that are at most alpha versions old:

    room      In all, (1 + alpha) B groups start at the first version and B at each later one. A
              dropped group makes room for another. So at most (1 + alpha) B groups are running or
              finished, alpha B of them while the learner trains.
    order     The oldest version is trained first, and within a version the groups that completed
              first. No younger group is trained while an older one still runs.
    end       When the version changes, groups older than alpha are dropped, running or finished.

If alpha has a fraction, alpha B and the age are rounded up, and at most that fraction of B comes
from the oldest version. With `extra`, that many more groups run than are needed, and as many older
ones may be left behind until their age drops them. alpha 0 without extra is the synchronous batch:
B groups start with a version, and all are waited for.

No clock and no I/O: the controller drives the buffer in a run and in the simulator alike.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.records import GroupId, Version, Work
from rlcore.sched.roles import GroupState, Verdict
from rlcore.sched.stop import EQUAL_REWARDS
from rlcore.utils.errors import ConfigError

STALE = "older than async.alpha"
"""Reason why a stale group is dropped."""


@dataclass(slots=True)
class BufferedGroup:
    """A group that is running or finished."""

    version: Version | None = None
    """Oldest policy version of a first token in the group; None before the first token."""
    finished: int | None = None
    """Position in the order of completion over all groups; None while the group runs."""

    def decoded(self, version: Version) -> None:
        """Record the version of a response's first token; the oldest version of the group
        counts."""
        self.version = version if self.version is None else min(self.version, version)

    def complete(self, place: int) -> None:
        """Mark the group as complete: all of its responses are finished and rewarded."""
        self.finished = place


class SampleBuffer:
    """Sample buffer that keeps ids, versions and counts; the controller keeps the groups
    themselves."""

    def __init__(self, batch: int, alpha: float, extra: int = 0) -> None:
        """
        Args:
            batch: number of groups that one version trains, B.
            alpha: maximum number of policy versions between first token and training of a sample.
            extra: number of additional running groups, of which the slowest are dropped.
        """
        self._batch, self._alpha, self._extra = batch, alpha, extra
        self._oldest = math.ceil(alpha)
        fraction = alpha - math.floor(alpha)
        self._from_oldest = math.ceil(fraction * batch) if fraction else batch
        self.version: Version = -1
        """Version of the weights that the engines decode with; -1 before the first."""
        self.room = math.ceil(alpha * batch) + extra
        """Number of groups that may be started now."""
        self._finished = 0
        self._num_finished = 0
        self._has_news = True
        """Whether `take` may find more than the last time; avoids a search at every event."""
        self._entries: dict[GroupId, BufferedGroup] = {}

    @property
    def capacity(self) -> int:
        """Maximum number of groups that may be running or finished at a time."""
        return self._batch + math.ceil(self._alpha * self._batch) + self._extra

    @property
    def batch(self) -> int:
        """Number of groups that one version trains."""
        return self._batch

    @property
    def num_held(self) -> int:
        """Number of groups that are running or finished."""
        return len(self._entries)

    @property
    def num_finished(self) -> int:
        return self._num_finished

    def advance(self, version: Version) -> list[GroupId]:
        """Move to a new weight version. Drop and return the groups that are now too old to be
        trained."""
        assert version == self.version + 1 or self.version < 0, (version, self.version)
        self.version, self._has_news = version, True
        self.room += self._batch
        late = [g for g, entry in self._entries.items() if self._age(entry) > self._oldest]
        for group in late:
            self.drop(group)
        return late

    def start(self, group: GroupId) -> None:
        """Start a group: it takes room, and has no token yet."""
        assert self.room > 0, group
        self.room -= 1
        self._entries[group] = BufferedGroup()

    def __contains__(self, group: GroupId) -> bool:
        return group in self._entries

    def decoded(self, group: GroupId, version: Version) -> None:
        """Record that a response of the group got its first token from this version."""
        entry = self._entries.get(group)
        if entry is not None:
            entry.decoded(version)

    def finish(self, group: GroupId) -> bool:
        """Complete a group. If it is too old, drop it and return False."""
        entry = self._entries[group]
        if self._age(entry) > self._oldest:
            self.drop(group)
            return False
        entry.complete(self._finished)
        self._finished += 1
        self._num_finished += 1
        self._has_news = True
        return True

    def drop(self, group: GroupId) -> None:
        """Drop a group that will not be trained, so that another may start in its place."""
        self._remove(group)
        self.room += 1
        self._has_news = True

    def take(self) -> list[GroupId] | None:
        """Remove and return the groups that this version trains, or None if they are not all
        complete."""
        if not self._has_news or self._num_finished < self._batch:
            return None
        self._has_news = False
        chosen: list[GroupId] = []
        left_behind = 0
        ages = Counter(self._age(entry) for entry in self._entries.values())
        for age in sorted(ages, reverse=True):
            of_age = {g: e for g, e in self._entries.items() if self._age(e) == age}
            done = [g for g, e in of_age.items() if e.finished is not None]
            done.sort(key=lambda g: self._entries[g].finished or 0)
            quota = self._from_oldest if age > self._alpha else self._batch
            chosen += done[: min(quota, self._batch - len(chosen))]
            if len(chosen) == self._batch:
                for group in chosen:
                    self._remove(group)
                return chosen
            left_behind += len(of_age) - len(done)
            if left_behind > self._extra:
                return None
        return None

    def _remove(self, group: GroupId) -> None:
        self._num_finished -= self._entries.pop(group).finished is not None

    def _age(self, entry: BufferedGroup) -> int:
        """Age of a group in versions; 0 if it has no token yet."""
        return 0 if entry.version is None else self.version - entry.version

    def metrics(self) -> dict[str, float]:
        """Return the numbers of running and of finished groups."""
        return {
            "async/running_groups": float(self.num_held - self.num_finished),
            "async/finished_groups": float(self.num_finished),
        }

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain JSON."""
        return {
            "version": self.version,
            "room": self.room,
            "finished": self._finished,
            "entries": {g: [e.version, e.finished] for g, e in self._entries.items()},
            "settings": [self._batch, self._alpha, self._extra],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. If its settings differ, raise ConfigError, since there might be
        too many groups or too old ones."""
        was, now = list(state["settings"]), [self._batch, self._alpha, self._extra]
        names = "data.prompts_per_step", "async.alpha", "async.extra_prompts"
        for name, old, new in zip(names, was, now, strict=True):
            if old != new:
                raise ConfigError(
                    f"--{name} {new}: the checkpoint's sample buffer was filled with {old}; resume "
                    "with that value, or start a new run with --run.resume fresh"
                )
        self.version, self.room = state["version"], state["room"]
        self._finished = state["finished"]
        self._entries = {g: BufferedGroup(*entry) for g, entry in state["entries"].items()}
        self._num_finished = sum(e.finished is not None for e in self._entries.values())
        self._has_news = True


MOST_EQUAL = 4
"""Limit on replaced groups of equal rewards, as a multiple of the batch. Further ones count, or a
task that is solved or too hard would be sampled without end."""


class Refill:
    """Stop policy of a round that never ends: put complete groups into the buffer and start work
    while there is room."""

    def __init__(
        self, buffer: SampleBuffer, issue: Callable[[int], list[Work]], dynamic: bool = False
    ) -> None:
        """`issue(n)` returns the work of the next n prompts. With `dynamic`, a group of equal
        rewards is replaced by another prompt, at most MOST_EQUAL x batch times for each version."""
        self._buffer, self._issue, self._dynamic = buffer, issue, dynamic
        self._version, self._num_equal = buffer.version, 0

    def judge(self, groups: Mapping[GroupId, GroupState], group: GroupState) -> Verdict:
        name, dropped = group.work.id, {}
        if self._version != self._buffer.version:
            self._version, self._num_equal = self._buffer.version, 0
        if self._dynamic and group.has_equal_scores and self._may_replace():
            self._buffer.drop(name)
            dropped = {name: EQUAL_REWARDS}
        elif not self._buffer.finish(name):
            dropped = {name: STALE}
        return Verdict(dropped=dropped, more=self.fill())

    def _may_replace(self) -> bool:
        self._num_equal += 1
        return self._num_equal <= MOST_EQUAL * self._buffer.batch

    def fill(self) -> list[Work]:
        """Issue as many groups as the buffer has room for."""
        work = self._issue(self._buffer.room) if self._buffer.room else []
        for w in work:
            self._buffer.start(w.id)
        return work

    def num_wanted(self, groups: Mapping[GroupId, GroupState]) -> int:
        return sum(group.wanted for group in groups.values())
