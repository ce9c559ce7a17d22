"""Sample buffer of `--mode async`: limit how many groups are in flight and how old they are, and
choose which groups are trained next. ROLL Flash, arXiv:2510.11345.

A version is the number of policy updates so far. The age of a group is counted in versions, from
the oldest first token of its responses. Per version, B groups of at most age alpha are trained:

    room      (1 + alpha) B groups start at the first version, and B groups at each later version.
              Each dropped group makes room for another. So at most (1 + alpha) B groups are running
              or finished, or alpha B while the learner trains.
    order     Groups of the oldest version are trained first, in order of completion. No group is
              trained while a group of an older version still runs.
    drop      When the version changes, running and finished groups older than alpha are dropped.

If alpha has a fractional part f, alpha B and the maximum age are rounded up. Then at most f B
groups of a batch have the maximum age. With `extra` > 0, `extra` additional groups run, and at most
`extra` older groups may still run while younger groups are trained. With alpha 0 and no extra, the
batch is synchronous: B groups start with a version, and all must finish.

This module has no clock and no I/O, so the controller uses it in runs and in the simulator."""

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
"""Reason given when a group is dropped because the group is too old."""


@dataclass(slots=True)
class BufferedGroup:
    """Entry of the buffer for a running or finished group."""

    version: Version | None = None
    """Oldest policy version of any response's first token; None before the first token."""
    finished: int | None = None
    """Position of the group in the order in which groups complete; None while the group runs."""

    def decoded(self, version: Version) -> None:
        """Record the policy version that generated a response's first token. The group keeps the
        oldest of these versions."""
        self.version = version if self.version is None else min(self.version, version)

    def complete(self, place: int) -> None:
        """Mark the group as complete, at position `place` in the order of completion."""
        self.finished = place


class SampleBuffer:
    """Sample buffer that holds only ids, versions and counts; the controller holds the groups."""

    def __init__(self, batch: int, alpha: float, extra: int = 0) -> None:
        """
        Args:
            batch: number of groups trained per version (B in the module text).
            alpha: maximum number of policy versions between first token and training of a group.
            extra: number of additional groups in flight; the slowest groups are dropped.
        """
        self._batch, self._alpha, self._extra = batch, alpha, extra
        self._oldest = math.ceil(alpha)
        fraction = alpha - math.floor(alpha)
        self._from_oldest = math.ceil(fraction * batch) if fraction else batch
        self.version: Version = -1
        """Version of the weights with which the engines decode; -1 before the first version."""
        self.room = math.ceil(alpha * batch) + extra
        """Number of groups that may be started now."""
        self._finished = 0
        self._num_finished = 0
        self._has_news = True
        """Whether the buffer has changed since the previous `take`, so that `take` must search."""
        self._entries: dict[GroupId, BufferedGroup] = {}

    @property
    def capacity(self) -> int:
        """Maximum number of running and finished groups at a time."""
        return self._batch + math.ceil(self._alpha * self._batch) + self._extra

    @property
    def batch(self) -> int:
        """Number of groups trained per version."""
        return self._batch

    @property
    def num_held(self) -> int:
        """Number of running and finished groups."""
        return len(self._entries)

    @property
    def num_finished(self) -> int:
        return self._num_finished

    def advance(self, version: Version) -> list[GroupId]:
        """Advance to a new weight version. Drop and return the groups that are now too old."""
        assert version == self.version + 1 or self.version < 0, (version, self.version)
        self.version, self._has_news = version, True
        self.room += self._batch
        late = [g for g, entry in self._entries.items() if self._age(entry) > self._oldest]
        for group in late:
            self.drop(group)
        return late

    def start(self, group: GroupId) -> None:
        """Add a group that starts now; `room` decreases by one."""
        assert self.room > 0, group
        self.room -= 1
        self._entries[group] = BufferedGroup()

    def __contains__(self, group: GroupId) -> bool:
        return group in self._entries

    def decoded(self, group: GroupId, version: Version) -> None:
        """Record the version that generated the first token of a response of the group."""
        entry = self._entries.get(group)
        if entry is not None:
            entry.decoded(version)

    def finish(self, group: GroupId) -> bool:
        """Mark a group as complete. If the group is too old, drop it and return False."""
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
        """Drop a group, so that another group may start in its place."""
        self._remove(group)
        self.room += 1
        self._has_news = True

    def take(self) -> list[GroupId] | None:
        """Remove and return the groups to train on at the current version. If too few of these
        groups are complete, return None."""
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
        """Return the age of a group in versions; 0 if the group has no token yet."""
        return 0 if entry.version is None else self.version - entry.version

    def metrics(self) -> dict[str, float]:
        """Return the number of running groups and the number of finished groups."""
        return {
            "async/running_groups": float(self.num_held - self.num_finished),
            "async/finished_groups": float(self.num_finished),
        }

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain JSON."""
        return {
            "version": self.version,
            "room": self.room,
            "finished": self._finished,
            "entries": {g: [e.version, e.finished] for g, e in self._entries.items()},
            "settings": [self._batch, self._alpha, self._extra],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a saved `state`. If the settings differ from the saved run's, raise ConfigError,
        since groups might be too many or too old."""
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


class Refill:
    """Stop policy of a round that never ends. It puts complete groups into the buffer and starts
    new work while the buffer has room."""

    def __init__(
        self, buffer: SampleBuffer, issue: Callable[[int], list[Work]], max_replaced: int = 0
    ) -> None:
        """Make the policy. `issue(n)` returns the work of the next n prompts. At most
        `max_replaced` groups of equal rewards per version are replaced by other prompts. Further
        ones are trained on, since a data set of solved tasks would be sampled without end."""
        self._buffer, self._issue, self.max_replaced = buffer, issue, max_replaced
        self._version, self._num_replaced = buffer.version, 0

    def judge(self, groups: Mapping[GroupId, GroupState], group: GroupState) -> Verdict:
        name, dropped = group.work.id, {}
        if self._version != self._buffer.version:
            self._version, self._num_replaced = self._buffer.version, 0
        if group.has_equal_scores and self._num_replaced < self.max_replaced:
            self._num_replaced += 1
            self._buffer.drop(name)
            dropped = {name: EQUAL_REWARDS}
        elif not self._buffer.finish(name):
            dropped = {name: STALE}
        return Verdict(dropped=dropped, more=self.fill())

    def fill(self) -> list[Work]:
        """Start as many groups as the buffer has room for; return their work."""
        work = self._issue(self._buffer.room) if self._buffer.room else []
        for w in work:
            self._buffer.start(w.id)
        return work

    def num_wanted(self, groups: Mapping[GroupId, GroupState]) -> int:
        return sum(group.wanted for group in groups.values())
