"""HistoPipe: long and short answers take turns on a worker, so that two steps end together.

RhymeRL, arXiv:2508.18588; PAPERS.md C2. One step off-policy: a worker that is done with its share
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

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rlcore.records import GroupId

Key = TypeVar("Key", bound=Hashable)
GROUPS = 8
QUANTILE = 0.98
"""Of a group's history: what is longer migrates. PAPERS.md F15."""


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
class Ranked:
    """`Place` of one step: every group of requests goes to the worker that its rank says, whatever
    the load; one that has no rank, or whose worker is gone, to the least loaded."""

    worker_of: Mapping[GroupId, int]
    """The replica's rank."""
    max_running: int

    def choose(self, group: GroupId, load: Mapping[int, int]) -> int | None:
        """As `sched.roles.Place`."""
        worker = self.worker_of.get(group)
        if worker is None or worker not in load:
            worker = min(load, key=lambda r: (load[r], r), default=None)
        if worker is None or load[worker] >= self.max_running:
            return None
        return worker

    def clear(self) -> None:
        """All replicas start again; where requests belong stays."""


def place(
    groups: Sequence[Sequence[GroupId]],
    step: int,
    workers: Sequence[Sequence[int]],
    max_running: int,
) -> Ranked:
    """`groups[g]` is ranking group g of a step; `workers[w]` are the replicas of worker w, among
    which the prompts of its group are dealt out."""
    if len(groups) != len(workers):
        raise ValueError(f"{len(groups)} ranking groups for {len(workers)} workers: must be equal")
    found: dict[GroupId, int] = {}
    for worker, replicas in enumerate(workers):
        for i, group in enumerate(groups[group_of_worker(worker, step, len(groups))]):
            found[group] = replicas[i % len(replicas)]
    return Ranked(found, max_running)
