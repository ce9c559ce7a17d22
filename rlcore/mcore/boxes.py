"""Rectangular parts of tensors, and the division of a flattened range into rectangles."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Offset = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Rectangular part of a tensor."""

    offset: Offset
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """Return the intersection of this and another rectangle; None if it is empty."""
        first = tuple(map(max, self.offset, other.offset))
        ends = ((o + n for o, n in zip(b.offset, b.shape, strict=True)) for b in (self, other))
        last = map(min, *ends)
        shape = tuple(end - start for start, end in zip(first, last, strict=True))
        return Box(first, shape) if all(n > 0 for n in shape) else None

    def slices(self, part: "Box") -> tuple[slice, ...]:
        """Return slices that select the rectangle `part` from the values of this rectangle."""
        starts = [p - o for p, o in zip(part.offset, self.offset, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(starts, part.shape, strict=True))


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Divide the values `start : stop` of a flattened tensor into rectangles of consecutive values.
    Yield each rectangle with its first value's position: at most two rectangles per dimension."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,), (stop - start,)), start
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows: first to last - 1
    if first > last:  # the range lies within one row
        yield from _row(shape, last, start, stop)
        return
    yield from _row(shape, first - 1, start, first * row)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Box((first, *zeros), (last - first, *shape[1:])), first * row
    yield from _row(shape, last, last * row, stop)


def _row(shape: Sequence[int], number: int, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    base = number * math.prod(shape[1:])
    for box, at in boxes(shape[1:], start - base, stop - base):
        yield Box((number, *box.offset), (1, *box.shape)), base + at
