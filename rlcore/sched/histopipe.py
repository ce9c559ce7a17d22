"""HistoPipe: long and short answers take turns on a worker, so that two steps end together.

RhymeRL, arXiv:2508.18588. One step off-policy: a worker that is done with its share
of step k starts its share of step k + 1 with the newest weights, and waits for nobody.

    rank        prompts of a step ascending by predicted length, the longest answer of the epoch
                before; cut into ranking groups of equal size
    alternate   worker w takes group w in odd steps and group W - 1 - w in even ones: whoever had
                the longest group has the shortest next
    shares      tier 2: GPUs by group such that the seconds of the groups are on a line. Then
                t_w + t_(W-1-w) is the same for all workers, and two steps take no longer than that
    threshold   an answer beyond the P98 of its group's history leaves the worker that has it

Workers and groups are numbered from 0 here, steps from 1.
"""

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlcore.records import GroupId, Prompt, RequestId, Work, group_of
from rlcore.sched.reward import key_of

Key = TypeVar("Key", bound=Hashable)
GROUPS = 8
QUANTILE = 0.98
"""Of a group's history: what is longer migrates."""


class LengthHistory:
    """Longest answers of the last epoch by prompt."""

    def __init__(self) -> None:
        self._longest: dict[Hashable, int] = {}
        self._lengths: dict[Hashable, tuple[int, ...]] = {}

    def note(self, prompt: Hashable, lengths: Collection[int]) -> None:
        """The answers of an epoch to a prompt, in tokens; at least one."""
        self._longest[prompt] = max(lengths)
        self._lengths[prompt] = tuple(lengths)

    def predict(self, prompt: Hashable, otherwise: int) -> int:
        """The longest answer that is to be expected; `otherwise` where nothing is known."""
        return self._longest.get(prompt, otherwise)

    def lengths(self, prompts: Collection[Hashable]) -> list[int]:
        """Of all answers to these prompts in the last epoch."""
        return [n for prompt in prompts for n in self._lengths.get(prompt, ())]

    def state(self) -> dict[Any, list[int]]:
        """What `restore` needs; plain JSON where the prompts' names are strings."""
        return {prompt: list(lengths) for prompt, lengths in self._lengths.items()}

    def restore(self, state: Mapping[Any, Sequence[int]]) -> None:
        """Go on from `state`."""
        for prompt, lengths in state.items():
            self.note(prompt, lengths)


def rank(prompts: Sequence[Key], predicted: Mapping[Key, int], groups: int) -> list[list[Key]]:
    """Ranking groups, the shortest first, whose sizes differ by one at most; equal predictions stay
    in their order. ValueError where there are fewer prompts than groups."""
    if not 1 <= groups <= len(prompts):
        raise ValueError(f"{groups} ranking groups of {len(prompts)} prompts: from 1 to as many")
    order = sorted(prompts, key=lambda p: predicted[p])
    ends = [len(order) * (g + 1) // groups for g in range(groups)]
    return [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def group_of_worker(worker: int, step: int, groups: int) -> int:
    """The ranking group that a worker has in a step."""
    return worker if step % 2 else groups - 1 - worker


def two_steps(seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds of two steps whose groups take `seconds` each: with a barrier between them, and with
    workers that take turns."""
    pairs = [a + b for a, b in zip(seconds, reversed(seconds), strict=True)]
    return 2 * max(seconds), max(pairs)


def off_line(seconds: Sequence[float]) -> float:
    """The largest distance from the straight line that is nearest in this sense (Chebyshev)."""
    count = len(seconds)
    if count < 3:
        return 0.0
    best = math.inf
    for i in range(count):  # the best line is parallel to one through two of the points
        for j in range(i + 1, count):
            slope = (seconds[j] - seconds[i]) / (j - i)
            rest = [t - slope * k for k, t in enumerate(seconds)]
            best = min(best, (max(rest) - min(rest)) / 2)
    return best


def shares(
    seconds: Callable[[int, int], float], groups: int, units: int, least: int = 1
) -> list[int]:
    """How many of `units` (GPUs, or replicas) each ranking group gets, at least `least`.

    `seconds(g, n)` is the time of group g over n units; it does not rise with n. Starts from equal
    shares and moves one unit at a time as long as two paired steps get shorter, then as long as
    they stay equal and the times come nearer to a line.

    Raises:
        ValueError: there are too few units.
    """
    if units < groups * least:
        raise ValueError(f"{units} units for {groups} ranking groups of at least {least}: too few")
    found = [units * (g + 1) // groups - units * g // groups for g in range(groups)]

    def cost(given: Sequence[int]) -> tuple[float, float]:
        times = [seconds(g, n) for g, n in enumerate(given)]
        return round(two_steps(times)[1], 9), round(off_line(times), 9)

    best, moved = cost(found), True
    while moved:
        moved, choice = False, found
        for a in range(groups):
            for b in range(groups):
                if a == b or found[a] <= least:
                    continue
                other = list(found)
                other[a], other[b] = other[a] - 1, other[b] + 1
                if (value := cost(other)) < best:
                    best, choice, moved = value, other, True
        found = choice
    return found


def threshold(lengths: Collection[int], quantile: float = QUANTILE) -> int:
    """The length beyond which an answer migrates: of `quantile` of the history none does, by rank.
    ValueError for an empty history."""
    if not lengths:
        raise ValueError("a threshold of no lengths; the first epoch has none")
    order = sorted(lengths)
    return order[min(len(order) - 1, math.ceil(quantile * len(order)) - 1)]


def jumps(before: Sequence[Sequence[Key]], after: Sequence[Sequence[Key]]) -> tuple[float, float]:
    """Shares of the prompts that are in a higher ranking group after than before, and of those that
    are exactly one higher."""
    old = {p: g for g, group in enumerate(before) for p in group}
    steps = [g - old[p] for g, group in enumerate(after) for p in group if p in old]
    if not steps:
        raise ValueError("jumps: the two rankings have no prompt in common")
    return sum(d > 0 for d in steps) / len(steps), sum(d == 1 for d in steps) / len(steps)


@dataclass(slots=True)
class _Home:
    """Where the responses to a prompt are decoded."""

    step: int
    rank: int
    """Its ranking group in this step."""
    replica: int
    limit: int
    """A longer response leaves; 0: none does."""


class Pipe:
    """HistoPipe in `--mode async`: where requests go, and which of them leave for elsewhere.

    Every `batch` prompts that are started are a step. Its ranking groups take the replicas by their
    shares, the shortest first in odd steps and last in even ones; so with equal shares whoever had
    the longest has the shortest next. A step begins at a replica as soon as that has room, whatever
    others do. A response beyond its group's threshold goes on beside a group of a higher rank, from
    the tokens that there are; one of the highest stays, and its replica has the lowest group next.

    A group over n replicas of `rows` places each takes max(its longest response, all of its tokens
    / (n rows)) decode steps: what it cannot be faster than.
    """

    def __init__(
        self,
        *,
        replicas: Sequence[int],
        batch: int,
        longest: int,
        rows: int,
        groups: int = GROUPS,
    ) -> None:
        """
        Args:
            replicas: ranks that speak for an engine.
            batch: prompts of a step.
            longest: that a response can get; predicted where nothing is known.
            rows: requests that a replica decodes at a time.
            groups: ranking groups at most; there are no more than replicas or prompts.
        """
        self._replicas, self._batch = tuple(replicas), batch
        self._longest, self._rows = longest, rows
        self._groups = min(groups, len(replicas), batch)
        self._history = LengthHistory()
        self._ranks: dict[str, int] = {}
        """Its last ranking group."""
        self._step = 0
        self._homes: dict[GroupId, _Home] = {}
        self._workers: dict[tuple[int, int], tuple[int, ...]] = {}  # step, rank -> replicas
        self._away: set[RequestId] = set()
        self._started = self._moved = 0
        self._stats: dict[str, float] = {}

    def order(self, work: Sequence[Work]) -> None:
        """These prompts are started now: give them their places."""
        for at in range(0, len(work), self._batch):
            part = work[at : at + self._batch]
            if len(part) == self._batch:  # fewer take the places of others, wherever there is room
                self._begin(part)

    def _begin(self, work: Sequence[Work]) -> None:
        self._step += 1
        keys = {w.id: key_of(w.prompt) for w in work}
        known = {g: self._history.lengths([key]) for g, key in keys.items()}
        most = {g: self._history.predict(key, self._longest) for g, key in keys.items()}
        total = {w.id: sum(known[w.id]) or self._longest * w.num_samples for w in work}
        ranked = rank([w.id for w in work], most, self._groups)

        def steps(group: int, replicas: int) -> float:
            tokens = sum(total[g] for g in ranked[group])
            return max(most[ranked[group][-1]], tokens / (replicas * self._rows))

        sizes = shares(steps, self._groups, len(self._replicas))
        order = self._replicas if self._step % 2 else self._replicas[::-1]
        higher = 0
        for number, end in enumerate(itertools.accumulate(sizes)):
            worker = self._workers[self._step, number] = order[end - sizes[number] : end]
            lengths = [n for g in ranked[number] for n in known[g]]
            limit = threshold(lengths) if lengths else 0
            for i, group in enumerate(ranked[number]):
                self._homes[group] = _Home(self._step, number, worker[i % len(worker)], limit)
                higher += number > self._ranks.get(keys[group], number)
                self._ranks[keys[group]] = number
        self._started += sum(w.num_samples for w in work)
        self._stats = {
            "pipe/known": sum(map(bool, known.values())) / len(work),
            "pipe/higher": higher / len(work),
            "pipe/longest_group": max(map(steps, range(self._groups), sizes)),
        }

    def learn(self, prompt: Prompt, lengths: Collection[int]) -> None:
        """The responses to it are complete: what the next epoch is predicted from."""
        self._history.note(key_of(prompt), lengths)

    def leave(self, lengths: Mapping[RequestId, int]) -> list[RequestId]:
        """Those of these running requests that go on elsewhere from here; each does once."""
        found = []
        for request, length in lengths.items():
            home = self._homes.get(group_of(request))
            if home is None or not 0 < home.limit < length or request in self._away:
                continue
            if self._higher(home):
                found.append(request)
        self._away.update(found)
        self._moved += len(found)
        return found

    def _higher(self, home: _Home) -> list[int]:
        """Replicas of higher ranking groups of the same step."""
        ranks = range(home.rank + 1, self._groups)
        return [
            r for k in ranks for r in self._workers.get((home.step, k), ()) if r != home.replica
        ]

    def choose(self, request: RequestId, load: Mapping[int, int]) -> int | None:
        """As `sched.roles.Place`; what has no place goes to the least loaded."""
        home = self._homes.get(group_of(request))
        if home is not None and request not in self._away and home.replica in load:
            return home.replica
        among = self._higher(home) if home is not None and request in self._away else []
        there = [r for r in among if r in load] or load
        return min(there, key=lambda r: (load[r], r), default=None)

    def forget(self, group: GroupId) -> None:
        """It has no more requests."""
        self._homes.pop(group, None)
        self._away = {i for i in self._away if group_of(i) != group}
        steps = {home.step for home in self._homes.values()}
        self._workers = {at: w for at, w in self._workers.items() if at[0] in steps}

    def clear(self) -> None:
        """All replicas start again; where requests belong stays."""

    def metrics(self) -> dict[str, float]:
        """Of the last step that began, and the share of the responses since the last call that
        have moved."""
        moved = self._moved / self._started if self._started else 0.0
        self._started = self._moved = 0
        return self._stats | {"pipe/moved": moved}

    def state(self) -> dict[str, Any]:
        """What `restore` needs; plain JSON. Requests that are under way are not in it."""
        return {"step": self._step, "history": self._history.state(), "ranks": self._ranks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, on as many replicas as there are now."""
        self._step = state["step"]
        self._history.restore(state["history"])
        self._ranks = dict(state["ranks"])
