"""HistoPipe of RhymeRL (arXiv:2508.18588): each rollout worker alternates between steps of long and
short responses, so that two steps together take equally long on all workers.

Rollout is one step off-policy. A worker that has finished its responses of step k starts step k + 1
with the newest weights, without waiting for other workers.

    rank        The prompts of a step are sorted by predicted length (longest response in the
                previous epoch) and cut into ranking groups of equal size, shortest first.
    alternate   With W workers, worker w has group w in odd steps and group W - 1 - w in even steps.
                So the worker with the longest group has the shortest group next.
    shares      GPUs are divided so that the groups' times t_0, t_1, ... rise linearly (the paper's
                Tier 2). Then t_w + t_(W-1-w) is equal for all workers and bounds two steps.
    threshold   A response longer than the P98 of its group's history migrates to another worker.

Workers and groups are numbered from 0, steps from 1."""

import itertools
import math
from array import array
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlcore.records import GroupId, Prompt, RequestId, Work, group_of
from rlcore.sched.reward_timeout import key_of

Key = TypeVar("Key", bound=Hashable)
GROUPS = 8
QUANTILE = 0.98
"""Quantile of a ranking group's past response lengths; a longer response migrates."""


class LengthHistory:
    """Response lengths in the most recent epoch, by prompt."""

    def __init__(self) -> None:
        self._lengths: dict[Hashable, array[int]] = {}

    def note(self, prompt: Hashable, lengths: Collection[int]) -> None:
        """Record the lengths in tokens of one or more responses to a prompt in one epoch."""
        self._lengths[prompt] = array("i", lengths)

    def predict(self, prompt: Hashable, otherwise: int) -> int:
        """Return the predicted length of the longest response to a prompt. If the prompt has no
        history, return `otherwise`."""
        return max(self._lengths.get(prompt, (otherwise,)))

    def lengths(self, prompts: Collection[Hashable]) -> list[int]:
        """Return the lengths of all responses to these prompts in the most recent epoch."""
        return [n for prompt in prompts for n in self._lengths.get(prompt, ())]

    def state(self) -> dict[Any, list[int]]:
        """Return the history for `restore`; it is plain JSON if prompts are strings."""
        return {prompt: list(lengths) for prompt, lengths in self._lengths.items()}

    def restore(self, state: Mapping[Any, Sequence[int]]) -> None:
        """Load the history from a saved `state`."""
        for prompt, lengths in state.items():
            self.note(prompt, lengths)


def rank(prompts: Sequence[Key], predicted: Mapping[Key, int], groups: int) -> list[list[Key]]:
    """Divide prompts into ranking groups by predicted length, shortest first; sizes differ by at
    most one. On a tie, prompts keep their order. With fewer prompts than groups, raise
    ValueError."""
    if not 1 <= groups <= len(prompts):
        raise ValueError(
            f"{groups} ranking groups for {len(prompts)} prompts: must be from 1 to the number of "
            "prompts"
        )
    order = sorted(prompts, key=lambda p: predicted[p])
    ends = [len(order) * (g + 1) // groups for g in range(groups)]
    return [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def group_of_worker(worker: int, step: int, groups: int) -> int:
    """Return the number of the ranking group that a worker decodes in a step."""
    return worker if step % 2 else groups - 1 - worker


def two_steps(seconds: Sequence[float]) -> tuple[float, float]:
    """Return how long two successive steps take, given the seconds of each ranking group. Return
    the seconds with a barrier between the steps, and the seconds with alternating workers."""
    pairs = [a + b for a, b in zip(seconds, reversed(seconds), strict=True)]
    return 2 * max(seconds), max(pairs)


def off_line(seconds: Sequence[float]) -> float:
    """Return the maximum distance of the values from the straight line that minimizes this distance
    (Chebyshev fit)."""
    count = len(seconds)
    if count < 3:
        return 0.0
    best = math.inf
    for i in range(count):  # the best line is parallel to a line through two of the points
        for j in range(i + 1, count):
            slope = (seconds[j] - seconds[i]) / (j - i)
            rest = [t - slope * k for k, t in enumerate(seconds)]
            best = min(best, (max(rest) - min(rest)) / 2)
    return best


def shares(
    seconds: Callable[[int, int], float], groups: int, units: int, least: int = 1
) -> list[int]:
    """Divide `units` (GPUs or engines) among ranking groups; each gets at least `least`.

    `seconds(g, n)` is the time of group g on n units and must not rise with n. The search starts
    from equal shares and moves one unit at a time. A move must shorten the time of two steps, or
    leave this time equal and make the groups' times more linear.

    Raises:
        ValueError: there are too few units.
    """
    if units < groups * least:
        raise ValueError(
            f"{units} units for {groups} ranking groups: each needs at least {least}; lower the "
            "number of groups"
        )
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
    """Return the length beyond which a response migrates: the `quantile` (nearest rank) of past
    response lengths, `lengths`. If `lengths` is empty, raise ValueError."""
    if not lengths:
        raise ValueError("threshold needs lengths, which the first epoch does not have")
    order = sorted(lengths)
    return order[min(len(order) - 1, math.ceil(quantile * len(order)) - 1)]


def jumps(before: Sequence[Sequence[Key]], after: Sequence[Sequence[Key]]) -> tuple[float, float]:
    """Return the share of prompts that moved to a higher ranking group between two rankings, and
    the share that moved up by one group. If the rankings share no prompt, raise ValueError."""
    old = {p: g for g, group in enumerate(before) for p in group}
    steps = [g - old[p] for g, group in enumerate(after) for p in group if p in old]
    if not steps:
        raise ValueError("jumps: the two rankings must share at least one prompt")
    return sum(d > 0 for d in steps) / len(steps), sum(d == 1 for d in steps) / len(steps)


@dataclass(slots=True)
class _Home:
    """Engine that decodes the responses to a prompt."""

    step: int
    rank: int
    """Ranking group of the prompt in this step."""
    engine: int
    limit: int
    """Length in tokens beyond which a response migrates; 0: responses never migrate."""


class HistoPipe:
    """Router and migration policy of HistoPipe in `--mode async`.

    Each `batch` of started prompts forms a step. The step's ranking groups are assigned to engines
    according to `shares`, in ascending order in odd steps and descending order in even steps. With
    equal shares, the engine with the longest group has the shortest group next. An engine begins a
    step as soon as it has room, independent of other engines.

    A response longer than its group's threshold continues on an engine of a higher ranking group,
    from the tokens decoded so far. Responses of the highest group stay on their engine, which has
    the lowest group next.

    With n engines of `rows` slots each, the decode steps of a group have the lower bound
    max(longest response, all tokens of the group / (n rows))."""

    def __init__(
        self,
        *,
        engines: Sequence[int],
        batch: int,
        longest: int,
        rows: int,
        groups: int = GROUPS,
    ) -> None:
        """
        Args:
            engines: leader ranks of the engines.
            batch: number of prompts in a step.
            longest: maximum response length; also the prediction for prompts without history.
            rows: maximum number of requests that an engine decodes at a time.
            groups: maximum number of ranking groups; there are never more than engines or prompts.
        """
        self._engines, self._batch = tuple(engines), batch
        self._longest, self._rows = longest, rows
        self._groups = min(groups, len(engines), batch)
        self._history = LengthHistory()
        self._ranks: dict[str, int] = {}
        """Ranking group of each prompt in the most recent step with this prompt."""
        self._step = 0
        self._homes: dict[GroupId, _Home] = {}
        self._workers: dict[tuple[int, int], tuple[int, ...]] = {}  # engines by (step, group)
        self._away: set[RequestId] = set()
        self._started = self._moved = 0
        self._stats: dict[str, float] = {}

    def order(self, work: Sequence[Work]) -> None:
        """Assign engines to the prompts of `work`, which start now."""
        for at in range(0, len(work), self._batch):
            part = work[at : at + self._batch]
            if len(part) == self._batch:  # prompts of an incomplete step are routed by load
                self._begin(part)

    def _begin(self, work: Sequence[Work]) -> None:
        self._step += 1
        keys = {w.id: key_of(w.prompt) for w in work}
        known = {g: self._history.lengths([key]) for g, key in keys.items()}
        most = {g: self._history.predict(key, self._longest) for g, key in keys.items()}
        total = {w.id: sum(known[w.id]) or self._longest * w.num_samples for w in work}
        ranked = rank([w.id for w in work], most, self._groups)

        def steps(group: int, engines: int) -> float:
            tokens = sum(total[g] for g in ranked[group])
            return max(most[ranked[group][-1]], tokens / (engines * self._rows))

        sizes = shares(steps, self._groups, len(self._engines))
        order = self._engines if self._step % 2 else self._engines[::-1]
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
        """Record the lengths of the finished responses to a prompt, to predict the next epoch."""
        self._history.note(key_of(prompt), lengths)

    def leave(self, lengths: Mapping[RequestId, int]) -> list[RequestId]:
        """Return the running requests that should migrate now; `lengths` has their current response
        lengths. Each request migrates at most once."""
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
        """Return all engines of higher ranking groups in this step, except the current engine."""
        ranks = range(home.rank + 1, self._groups)
        return [r for k in ranks for r in self._workers.get((home.step, k), ()) if r != home.engine]

    def choose(self, request: RequestId, load: Mapping[int, int]) -> int | None:
        """Return the leader rank of the engine for a request. A request without an assigned engine
        goes to the least loaded engine."""
        home = self._homes.get(group_of(request))
        if home is not None and request not in self._away and home.engine in load:
            return home.engine
        among = self._higher(home) if home is not None and request in self._away else []
        there = [r for r in among if r in load] or load
        return min(there, key=lambda r: (load[r], r), default=None)

    def forget(self, group: GroupId) -> None:
        """Forget the engine of a group that has no more requests."""
        self._homes.pop(group, None)
        self._away = {i for i in self._away if group_of(i) != group}
        steps = {home.step for home in self._homes.values()}
        self._workers = {at: w for at, w in self._workers.items() if at[0] in steps}

    def clear(self) -> None:
        """Do nothing: assignments stay valid after all engines have restarted with no requests."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step that began most recently, and the share of responses that
        have migrated since the previous call."""
        moved = self._moved / self._started if self._started else 0.0
        self._started = self._moved = 0
        return self._stats | {"pipe/moved": moved}

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain JSON, without requests in flight."""
        return {"step": self._step, "history": self._history.state(), "ranks": self._ranks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a saved `state`. The number of engines may differ from the saved run's."""
        self._step = state["step"]
        self._history.restore(state["history"])
        self._ranks = dict(state["ranks"])
