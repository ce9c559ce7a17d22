"""Find the cheapest split of a few jobs into groups, by dynamic programming over subsets."""

from collections.abc import Callable, Sequence
from functools import cache

MOST_JOBS = 12
"""Maximum number of jobs. 12 jobs usually take 0.01 s; each further job triples the worst case."""


def cheapest_partition(
    count: int, cost_of: Callable[[tuple[int, ...]], float | None]
) -> tuple[float, list[tuple[int, ...]]]:
    """Return the cost and the parts of the cheapest partition of the numbers 0 to count - 1.

    `cost_of` returns the cost of a part, or None if the part is impossible. All supersets of an
    impossible part must be impossible. A part of one number must be possible.

    Raises:
        ValueError: `count` is more than 12.
    """
    if count > MOST_JOBS:
        raise ValueError(f"{count} jobs: must be at most {MOST_JOBS} for an exact partition")
    parts: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    level: list[tuple[int, ...]] = [(n,) for n in range(count)]
    while level:
        grown = []
        for members in level:
            cost = cost_of(members)
            if cost is None:
                continue
            parts[members[0]].append((sum(1 << n for n in members), cost))
            grown += [(*members, n) for n in range(members[-1] + 1, count)]
        level = grown

    @cache
    def best(mask: int) -> tuple[float, int]:
        """Return the least cost of a partition of the set `mask`. Also return the part that has the
        lowest number of the set."""
        if not mask:
            return 0.0, 0
        lowest = (mask & -mask).bit_length() - 1
        return min(
            (cost + best(mask ^ part)[0], part)
            for part, cost in parts[lowest]
            if part & mask == part
        )

    mask = (1 << count) - 1
    total, chosen = best(mask)[0], []
    while mask:
        part = best(mask)[1]
        chosen.append(_members(part, range(count)))
        mask ^= part
    return total, chosen


def _members(mask: int, names: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in names if mask >> n & 1)
