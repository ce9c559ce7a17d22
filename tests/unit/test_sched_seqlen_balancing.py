"""Balanced partitions: by hand, and against every partition there is."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.sched.seqlen_balancing import balanced_partitions

lengths = st.lists(st.integers(0, 40), max_size=40)
few = st.lists(st.integers(0, 40), min_size=1, max_size=7)
parts = st.integers(1, 9)


def sums(xs, lists):
    return [sum(xs[i] for i in one) for one in lists]


def test_five_lengths_in_two_parts_as_in_the_textbook():
    # 8-7 = 1, 6-5 = 1, 4-1 = 3, 3-1 = 2: the sums differ by 2 (the best is 0: 8+7 and 6+5+4)
    assert balanced_partitions([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]]


def test_a_long_sample_is_alone():
    assert balanced_partitions([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]


def test_a_filled_solution_joins_one_that_is_not():
    assert balanced_partitions([1, 2, 2, 3], 3) == [[0, 2], [1], [3]]


def test_more_parts_than_lengths_leaves_empty_parts_at_the_end():
    assert balanced_partitions([2, 2], 3) == [[0], [1], []]
    assert balanced_partitions([], 2) == [[], []]


@pytest.mark.parametrize("bad", [([1], 0), ([1, -2], 1)])
def test_what_makes_no_sense_is_refused(bad):
    with pytest.raises(ValueError, match="num_parts 0|length -2"):
        balanced_partitions(*bad)


@given(lengths, parts)
def test_every_index_is_in_one_list_and_lists_are_in_order(xs, k):
    lists = balanced_partitions(xs, k)
    assert len(lists) == k
    assert sorted(itertools.chain(*lists)) == list(range(len(xs)))
    assert all(one == sorted(one) for one in lists)
    heads = [one[0] if one else math.inf for one in lists]
    assert heads == sorted(heads)
    assert min(map(len, lists)) > 0 or len(xs) < k


@given(few, st.integers(1, 3))
def test_the_largest_part_is_within_four_thirds_of_the_best(xs, k):
    best = sum(xs)
    for choice in itertools.product(range(k), repeat=len(xs)):
        loads = [0] * k
        for x, part in zip(xs, choice, strict=True):
            loads[part] += x
        best = min(best, max(loads))
    assert max(sums(xs, balanced_partitions(xs, k))) <= best * 4 / 3
