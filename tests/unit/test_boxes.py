"""Rectangles of a flattened range, and their overlaps, against index arithmetic."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.mcore.boxes import Box, boxes

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(SHAPES, st.data())
def test_a_range_is_divided_into_rectangles_of_consecutive_values(shape, data):
    whole = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(0, whole.numel()))
    found = list(boxes(shape, start, stop))
    assert len(found) <= 2 * len(shape)
    at = start
    for box, first in found:
        assert first == at
        values = whole[Box((0,) * len(shape), tuple(shape)).slices(box)]
        assert values.flatten().tolist() == list(range(at, at + box.numel))
        at += box.numel
    assert at == max(start, stop) if start < stop else not found


@given(SHAPES, st.data())
def test_the_overlap_holds_the_values_of_both(shape, data):
    def draw() -> Box:
        offset = [data.draw(st.integers(0, n - 1)) for n in shape]
        size = [data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)]
        return Box(tuple(offset), tuple(size))

    whole, one, other = torch.arange(math.prod(shape)).view(shape), draw(), draw()
    full = Box((0,) * len(shape), tuple(shape))
    values = [set(whole[full.slices(box)].flatten().tolist()) for box in (one, other)]
    common = one.overlap(other)
    got = set() if common is None else set(whole[full.slices(common)].flatten().tolist())
    assert got == values[0] & values[1]
    if common is not None:
        mine = whole[full.slices(one)][one.slices(common)]
        assert set(mine.flatten().tolist()) == got
