"""Epochs, resuming, and what a changed data set says."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data.data_order import ShuffledEpochs

sizes = st.integers(1, 30)
steps = st.lists(st.integers(0, 40), max_size=6)


@settings(deadline=None, max_examples=50)
@given(sizes, st.integers(0, 100), st.booleans(), steps)
def test_every_epoch_has_every_row_once_however_it_is_cut(num_rows, seed, shuffle, cuts):
    sampler = ShuffledEpochs(num_rows, seed, shuffle)
    got = [pair for n in cuts for pair in sampler.next(n)]
    assert got == ShuffledEpochs(num_rows, seed, shuffle).next(sum(cuts))
    assert [epoch for epoch, _ in got] == [i // num_rows for i in range(len(got))]
    for epoch in range(len(got) // num_rows):
        rows = [row for e, row in got if e == epoch]
        assert sorted(rows) == list(range(num_rows))
        assert shuffle or rows == list(range(num_rows))
    assert sampler.epoch == sum(cuts) // num_rows


@settings(deadline=None, max_examples=50)
@given(sizes, st.integers(0, 100), st.integers(0, 90), st.integers(0, 90))
def test_a_restored_sampler_goes_on_as_if_nothing_had_happened(num_rows, seed, before, after):
    straight = ShuffledEpochs(num_rows, seed)
    straight.next(before)
    other = ShuffledEpochs(num_rows, seed)
    other.restore(json.loads(json.dumps(straight.state())))
    assert other.next(after) == straight.next(after)


def test_epochs_and_seeds_have_orders_of_their_own():
    sampler = ShuffledEpochs(50, 0)
    first, second = ([row for _, row in sampler.next(50)] for _ in range(2))
    assert first != second
    assert first != [row for _, row in ShuffledEpochs(50, 1).next(50)]


def test_an_endless_set_counts_up():
    sampler = ShuffledEpochs(None, 0)
    assert sampler.next(3) == [(0, 0), (0, 1), (0, 2)]
    other = ShuffledEpochs(None, 0)
    other.restore(sampler.state())
    assert other.next(2) == [(0, 3), (0, 4)]
    assert other.epoch == 0


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (ShuffledEpochs(11, 0), "rows in data.train: the checkpoint has 10, this run has 11"),
        (ShuffledEpochs(None, 0), "rows in data.train: the checkpoint has 10, this run has None"),
        (ShuffledEpochs(10, 1), "run.seed: the checkpoint has 0, this run has 1"),
        (ShuffledEpochs(10, 0, False), "data.shuffle: the checkpoint has True, this run has False"),
    ],
)
def test_a_changed_data_set_is_refused(other, sentence):
    with pytest.raises(ValueError, match=sentence):
        other.restore(ShuffledEpochs(10, 0).state())


def test_an_empty_data_set_is_refused():
    with pytest.raises(ValueError, match="a data set of 0 rows"):
        ShuffledEpochs(0, 0)
