"""HistoPipe: each worker alternates between long and short responses, so that pairs of steps
balance.

RhymeRL, arXiv:2508.18588. One step off-policy: a worker that has finished its share of step k
starts that of step k + 1 with the newest weights, without waiting for other workers.

    rank        Prompts of a step are sorted by predicted length (the longest response in the epoch
                before) and cut into ranking groups of equal size, the shortest first.
    alternate   Worker w has group w in odd steps and group W - 1 - w in even ones: the worker with
                the longest group has the shortest next.
    shares      Tier 2: GPUs are divided so that the times of the groups lie on a line. Then
                t_w + t_(W-1-w) is the same for all workers and bounds the time of two steps.
    threshold   A response beyond the P98 of its group's history migrates to another worker.

Workers and groups are numbered from 0, steps from 1.
"""

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlcore.records import GroupId, Prompt, RequestId, Work, group_of
from rlcore.sched.reward_timeout import key_of

Key = TypeVar("Key", bound=Hashable)
GROUPS = 8
QUANTILE = 0.98
"""Quantile of a group's history beyond which a response migrates."""


class LengthHistory:
    """Response lengths of the last epoch, by prompt."""

    def __init__(self) -> None:
        self._longest: dict[Hashable, int] = {}
        self._lengths: dict[Hashable, tuple[int, ...]] = {}

    def note(self, prompt: Hashable, lengths: Collection[int]) -> None:
        """Record the lengths (in tokens) of one epoch's responses to a prompt; at least one."""
        self._longest[prompt] = max(lengths)
        self._lengths[prompt] = tuple(lengths)

    def predict(self, prompt: Hashable, otherwise: int) -> int:
        """Return the predicted longest response, or `otherwise` if the prompt has no history."""
        return self._longest.get(prompt, otherwise)

    def lengths(self, prompts: Collection[Hashable]) -> list[int]:
        """Return the lengths of all responses to these prompts in the last epoch."""
        return [n for prompt in prompts for n in self._lengths.get(prompt, ())]

    def state(self) -> dict[Any, list[int]]:
        """Return what `restore` needs; plain JSON if the keys of prompts are strings."""
        return {prompt: list(lengths) for prompt, lengths in self._lengths.items()}

    def restore(self, state: Mapping[Any, Sequence[int]]) -> None:
        """Continue from `state`."""
        for prompt, lengths in state.items():
            self.note(prompt, lengths)


def rank(prompts: Sequence[Key], predicted: Mapping[Key, int], groups: int) -> list[list[Key]]:
    """Divide prompts into ranking groups, the shortest first, whose sizes differ by at most one.
    Equal predictions keep their order. If there are fewer prompts than groups, raise ValueError."""
    if not 1 <= groups <= len(prompts):
        raise ValueError(
            f"{groups} ranking groups for {len(prompts)} prompts: must be from 1 to the number of "
            "prompts"
        )
    order = sorted(prompts, key=lambda p: predicted[p])
    ends = [len(order) * (g + 1) // groups for g in range(groups)]
    return [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def group_of_worker(worker: int, step: int, groups: int) -> int:
    """Return the ranking group that a worker has in a step."""
    return worker if step % 2 else groups - 1 - worker


def two_steps(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of two steps whose groups take `seconds` each: with a barrier between the
    steps, and with workers that alternate groups."""
    pairs = [a + b for a, b in zip(seconds, reversed(seconds), strict=True)]
    return 2 * max(seconds), max(pairs)


def off_line(seconds: Sequence[float]) -> float:
    """Return the maximum distance of the values from their best-fitting line (in the Chebyshev
    sense)."""
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
    """Return how many of `units` (GPUs or engines) each ranking group gets, at least `least`.

    `seconds(g, n)` is the time of group g over n units; it does not rise with n. The search starts
    from equal shares and moves one unit at a time. A move must make two paired steps shorter, or
    keep them equal and bring the times nearer to a line.

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
    """Return the length beyond which a response migrates, such that by rank `quantile` of the
    history does not. If the history is empty, raise ValueError."""
    if not lengths:
        raise ValueError("threshold needs lengths, which the first epoch does not have")
    order = sorted(lengths)
    return order[min(len(order) - 1, math.ceil(quantile * len(order)) - 1)]


def jumps(before: Sequence[Sequence[Key]], after: Sequence[Sequence[Key]]) -> tuple[float, float]:
    """Return the share of prompts that moved to a higher ranking group, and which share of these
    moved by exactly one group."""
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
    """Length beyond which a response migrates; 0: it never does."""


class HistoPipe:
    """Router and migration policy of HistoPipe in `--mode async`.

    Every `batch` started prompts form a step. Its ranking groups are assigned to the engines by
    their shares, in ascending order in odd steps and descending order in even ones. With equal
    shares, the engine with the longest group has the shortest next. An engine begins a step as soon
    as it has room, independent of the others.

    A response beyond its group's threshold continues on an engine of a higher ranking group, from
    the tokens decoded so far. Responses of the highest group stay; their engine has the lowest
    group next.

    A group over n engines of `rows` slots each is estimated to take max(its longest response, all
    of its tokens / (n rows)) decode steps, a lower bound.
    """

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
            longest: maximum response length; the prediction for prompts without history.
            rows: number of requests that an engine decodes at a time.
            groups: maximum number of ranking groups, capped by the engines and the prompts.
        """
        self._engines, self._batch = tuple(engines), batch
        self._longest, self._rows = longest, rows
        self._groups = min(groups, len(engines), batch)
        self._history = LengthHistory()
        self._ranks: dict[str, int] = {}
        """Last ranking group of each prompt."""
        self._step = 0
        self._homes: dict[GroupId, _Home] = {}
        self._workers: dict[tuple[int, int], tuple[int, ...]] = {}  # step, rank -> engines
        self._away: set[RequestId] = set()
        self._started = self._moved = 0
        self._stats: dict[str, float] = {}

    def order(self, work: Sequence[Work]) -> None:
        """Assign engines to prompts that start now."""
        for at in range(0, len(work), self._batch):
            part = work[at : at + self._batch]
            if len(part) == self._batch:  # an incomplete step is routed by load
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
        """Record the lengths of a prompt's complete responses, for the prediction in the next
        epoch."""
        self._history.note(key_of(prompt), lengths)

    def leave(self, lengths: Mapping[RequestId, int]) -> list[RequestId]:
        """Return the running requests that should migrate now; each migrates once."""
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
        """Return the engines of higher ranking groups of the same step."""
        ranks = range(home.rank + 1, self._groups)
        return [r for k in ranks for r in self._workers.get((home.step, k), ()) if r != home.engine]

    def choose(self, request: RequestId, load: Mapping[int, int]) -> int | None:
        """Route a request, as in `sched.roles.Place`. A request without an assigned engine goes to
        the least loaded."""
        home = self._homes.get(group_of(request))
        if home is not None and request not in self._away and home.engine in load:
            return home.engine
        among = self._higher(home) if home is not None and request in self._away else []
        there = [r for r in among if r in load] or load
        return min(there, key=lambda r: (load[r], r), default=None)

    def forget(self, group: GroupId) -> None:
        """Forget a group that has no more requests."""
        self._homes.pop(group, None)
        self._away = {i for i in self._away if group_of(i) != group}
        steps = {home.step for home in self._homes.values()}
        self._workers = {at: w for at, w in self._workers.items() if at[0] in steps}

    def clear(self) -> None:
        """Keep the assignments after all engines have restarted with no requests."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last step that began, and the share of responses that migrated
        since the last call."""
        moved = self._moved / self._started if self._started else 0.0
        self._started = self._moved = 0
        return self._stats | {"pipe/moved": moved}

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain JSON. Requests in flight are not included."""
        return {"step": self._step, "history": self._history.state(), "ranks": self._ranks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, with the engines that there are now."""
        self._step = state["step"]
        self._history.restore(state["history"])
        self._ranks = dict(state["ranks"])
