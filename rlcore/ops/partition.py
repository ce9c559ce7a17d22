"""Split sample lengths into parts of nearly equal sums: data-parallel ranks, micro-batches.

The largest differencing method of Karmarkar and Karp: keep partial solutions, and join the two with
the largest spread, heaviest part of one with lightest of the other, until one is left. The largest
part ends within 4/3 of the best possible (parts of equal size: no such bound). C++
(`csrc/partition`) where it is built; the Python text below gives the same lists, 5 to 50 times
slower.

Own code instead of the package prtpy: saves the dependency, and the C++ is quick.
"""

import heapq
from collections.abc import Sequence

from rlcore.ops import native


def balanced(lengths: Sequence[int], parts: int, equal_size: bool = False) -> list[list[int]]:
    """Indices of `lengths` in `parts` lists whose sums are nearly equal.

    With `equal_size` the lists differ by at most one in size; without it, no list is empty as long
    as there are `parts` lengths. Lists are ascending and ordered by their first index, empty ones
    last. Ties go by index: the same answer everywhere. ValueError on parts < 1 or negative lengths.
    """
    lengths = [int(n) for n in lengths]
    if parts < 1:
        raise ValueError(f"parts {parts}: at least 1 is needed")
    if lengths and min(lengths) < 0:
        raise ValueError(f"length {min(lengths)}: lengths are 0 or more")
    core = native.load("partition")
    if core is None:
        return reference(lengths, parts, equal_size)
    return core.balanced(lengths, parts, equal_size)


# (-sum, -count, smallest index, indices): plain tuple order is heaviest first, and the smallest
# index is unique, so the order is total.
Bin = tuple[int, int, int, list[int]]


def reference(lengths: Sequence[int], parts: int, equal_size: bool = False) -> list[list[int]]:
    """What `balanced` does, in Python."""
    heap: list[tuple[int, int, list[Bin]]] = []  # (-spread, smallest index, filled bins)

    def add(bins: list[Bin]) -> None:
        bins.sort()
        least = bins[-1][0] if len(bins) == parts else 0
        heapq.heappush(heap, (bins[0][0] - least, min(b[2] for b in bins), bins))

    singles: list[Bin] = [(-n, -1, i, [i]) for i, n in enumerate(lengths)]
    if equal_size:
        fill = range(len(lengths), len(lengths) + -len(lengths) % parts)
        singles = sorted(singles + [(0, -1, i, [i]) for i in fill])
        for row in range(0, len(singles), parts):
            add(singles[row : row + parts])
    else:
        for single in singles:
            add([single])
    while len(heap) > 1:
        add(_join(heapq.heappop(heap)[2], heapq.heappop(heap)[2], parts))
    bins = heap[0][2] if heap else []
    lists = [sorted(i for i in b[3] if i < len(lengths)) for b in bins]
    lists = sorted(one for one in lists if one)
    return lists + [[] for _ in range(parts - len(lists))]


def _join(a: list[Bin], b: list[Bin], parts: int) -> list[Bin]:
    """The heaviest bin of `a` takes the lightest of `b`, and so on."""
    a, filled = list(a), len(a)
    for j, light in enumerate(b):
        partner = parts - 1 - j
        if partner >= filled:
            a.append(light)
        else:
            x = a[partner]
            a[partner] = (x[0] + light[0], x[1] + light[1], min(x[2], light[2]), x[3] + light[3])
    return a
