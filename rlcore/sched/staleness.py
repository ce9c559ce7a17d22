"""The sample buffer of `--mode async`: how many groups may be under way, how old they may be, and
which of them are trained next. ROLL Flash, arXiv:2510.11345.

A version is a number of policy updates. A group is as old as the oldest first token of its
responses. Policy version n trains B groups that are at most alpha versions old:

    room      in all, (1 + alpha) B groups are started at the first version and B at each one after;
              a group that is dropped makes room for another. So at most (1 + alpha) B are running
              or finished, alpha B of them while the learner trains
    order     the oldest version first, and within one those that were complete first; no younger
              group is trained while an older one still runs
    end       what is older than alpha when the version changes is dropped, wherever it is

With a fraction, alpha B and the age are rounded up, and at most that fraction of B comes from the
oldest version. With `extra` so many more groups run than are needed, and so many
older ones may be left behind; they end by their age. alpha 0 without extra is the synchronous
batch: B groups start with a version, and all are waited for.

Pure: no clock, no I/O; the controller drives it in a run and in the simulator alike.
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
"""Why a group is not trained."""


@dataclass(slots=True)
class Entry:
    """A group that is running or finished."""

    version: Version | None = None
    """Of its first token; None before there is one."""
    finished: int | None = None
    """Its place among all groups that were complete; None while it runs."""

    def decoded(self, version: Version) -> None:
        """Note the first token of one of its responses: the oldest of them counts."""
        self.version = version if self.version is None else min(self.version, version)

    def complete(self, place: int) -> None:
        """Note that all of its responses are there and rewarded."""
        self.finished = place


class SampleBuffer:
    """Numbers and versions alone: the groups themselves are the controller's."""

    def __init__(self, batch: int, alpha: float, extra: int = 0) -> None:
        """
        Args:
            batch: groups that one version trains, B.
            alpha: most policy versions between the first token and the training of a sample.
            extra: groups that run besides, of which the slowest are dropped.
        """
        self._batch, self._alpha, self._extra = batch, alpha, extra
        self._oldest = math.ceil(alpha)
        fraction = alpha - math.floor(alpha)
        self._from_oldest = math.ceil(fraction * batch) if fraction else batch
        self.version: Version = -1
        """Of the weights that are decoded with; -1 before the first."""
        self.room = math.ceil(alpha * batch) + extra
        """Groups that may be started now."""
        self._finished = 0
        self._num_finished = 0
        self._has_news = True
        """`take` may find more than the last time; it is asked at every event."""
        self._entries: dict[GroupId, Entry] = {}

    @property
    def capacity(self) -> int:
        """Groups that may be running or finished at a time."""
        return self._batch + math.ceil(self._alpha * self._batch) + self._extra

    @property
    def batch(self) -> int:
        """Groups of one."""
        return self._batch

    @property
    def num_held(self) -> int:
        """Groups that are running or finished."""
        return len(self._entries)

    @property
    def num_finished(self) -> int:
        return self._num_finished

    def advance(self, version: Version) -> list[GroupId]:
        """The engines go on with the weights of `version`. Returns the groups that can never be
        trained any more; they are dropped here."""
        assert version == self.version + 1 or self.version < 0, (version, self.version)
        self.version, self._has_news = version, True
        self.room += self._batch
        late = [g for g, entry in self._entries.items() if self._age(entry) > self._oldest]
        for group in late:
            self.drop(group)
        return late

    def start(self, group: GroupId) -> None:
        """It takes room; nobody has decoded a token of it yet."""
        assert self.room > 0, group
        self.room -= 1
        self._entries[group] = Entry()

    def __contains__(self, group: GroupId) -> bool:
        return group in self._entries

    def decoded(self, group: GroupId, version: Version) -> None:
        """One of its responses began with a token of this version."""
        entry = self._entries.get(group)
        if entry is not None:
            entry.decoded(version)

    def finish(self, group: GroupId) -> bool:
        """All of its responses are there and rewarded. False where it turns out to be too old: it
        is dropped here."""
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
        """It will not be trained: another may be started in its place."""
        self._remove(group)
        self.room += 1
        self._has_news = True

    def take(self) -> list[GroupId] | None:
        """The groups that this version trains, which leave the buffer; None while they are not all
        there."""
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

    def _age(self, entry: Entry) -> int:
        """In versions; what has no token yet will have one of this version or a later one."""
        return 0 if entry.version is None else self.version - entry.version

    def metrics(self) -> dict[str, float]:
        """What is held now."""
        return {
            "async/running_groups": float(self.num_held - self.num_finished),
            "async/finished_groups": float(self.num_finished),
        }

    def state(self) -> dict[str, Any]:
        """What `restore` needs; plain JSON."""
        return {
            "version": self.version,
            "room": self.room,
            "finished": self._finished,
            "entries": {g: [e.version, e.finished] for g, e in self._entries.items()},
            "settings": [self._batch, self._alpha, self._extra],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. ConfigError where it is of other settings, under which its groups
        might be too many or too old."""
        was, now = list(state["settings"]), [self._batch, self._alpha, self._extra]
        names = "data.prompts_per_step", "async.alpha", "async.extra_prompts"
        for name, old, new in zip(names, was, now, strict=True):
            if old != new:
                raise ConfigError(
                    f"--{name} {new}: the checkpoint's sample buffer was filled with {old}; resume "
                    "with that, or start anew with --run.resume fresh"
                )
        self.version, self.room = state["version"], state["room"]
        self._finished = state["finished"]
        self._entries = {g: Entry(*entry) for g, entry in state["entries"].items()}
        self._num_finished = sum(e.finished is not None for e in self._entries.values())
        self._has_news = True


MOST_EQUAL = 4
"""Groups of equal rewards that are replaced before a batch, as many times the batch; further ones
count, or a task that is solved, or too hard, would be searched for ever."""


class Refill:
    """The `Stop` of a round that does not end: a complete group goes into the buffer, and what has
    room is started."""

    def __init__(
        self, buffer: SampleBuffer, issue: Callable[[int], list[Work]], dynamic: bool = False
    ) -> None:
        """`issue(n)` gives the work of the next n prompts. With `dynamic` a group of equal rewards
        does not count, and another prompt takes its place, MOST_EQUAL times the batch for each."""
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
        """What there is room for."""
        work = self._issue(self._buffer.room) if self._buffer.room else []
        for w in work:
            self._buffer.start(w.id)
        return work

    def num_wanted(self, groups: Mapping[GroupId, GroupState]) -> int:
        return sum(group.wanted for group in groups.values())
