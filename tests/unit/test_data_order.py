"""Epochs, mixtures, resuming, and what a changed data set says."""

import json
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlcore.cli.settings import parse
from rlcore.config import rules
from rlcore.data.data_order import ShuffledEpochs, WeightedEpochs

sizes = st.integers(1, 30)
steps = st.lists(st.integers(0, 40), max_size=6)
mixtures = st.lists(st.tuples(sizes, st.integers(1, 50)), min_size=1, max_size=8)


@settings(deadline=None, max_examples=50)
@given(sizes, st.integers(0, 100), st.booleans(), steps)
def test_every_epoch_has_every_row_once_however_it_is_cut(num_rows, seed, shuffle, cuts):
    sampler = ShuffledEpochs(num_rows, seed, shuffle)
    got = [pair for n in cuts for pair in sampler.next(n)]
    assert got == ShuffledEpochs(num_rows, seed, shuffle).next(sum(cuts))
    assert sampler.rows(0, sum(cuts)) == got and sampler.position == sum(cuts)
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


@settings(deadline=None, max_examples=100)
@example([(1, 1), (1, 22), (1, 24), (1, 45), (1, 48)], 0, False, [4, 40, 40])  # 27 rows exactly
@given(mixtures, st.integers(0, 100), st.booleans(), steps)
def test_a_mixture_is_always_within_one_row_of_its_proportions(mixture, seed, shuffle, cuts):
    sizes, weights = zip(*mixture, strict=True)
    sampler = WeightedEpochs(sizes, weights, seed, shuffle)
    got = [pair for n in cuts for pair in sampler.next(n)]
    assert got == WeightedEpochs(sizes, weights, seed, shuffle).next(sum(cuts))
    assert sampler.position == len(got) == len(set(got)), "a row comes once in an epoch"
    firsts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    drawn = [[] for _ in sizes]
    for n, (epoch, row) in enumerate(got, 1):
        i = next(i for i in range(len(sizes)) if row < firsts[i + 1])
        drawn[i].append((epoch, row - firsts[i]))
        for rows, weight in zip(drawn, weights, strict=True):
            assert abs(len(rows) - Fraction(weight * n, sum(weights))) < 1
    for rows, size in zip(drawn, sizes, strict=True):
        assert [epoch for epoch, _ in rows] == [i // size for i in range(len(rows))]
        whole = rows[: len(rows) // size * size]
        assert sorted(whole) == [(e, r) for e in range(len(whole) // size) for r in range(size)]
        assert shuffle or rows == sorted(rows)


def test_a_mixture_worked_by_hand():
    sampler = WeightedEpochs([4, 2], [3, 1], 0, shuffle=False)
    assert sampler.next(8) == [(0, 0), (0, 1), (0, 2), (0, 4), (0, 3), (1, 0), (1, 1), (0, 5)]
    assert (sampler.position, sampler.epoch) == (8, 1)
    assert sampler.state()["num_rows"] == 6


def test_the_data_sets_of_a_mixture_have_orders_of_their_own():
    rows = [row for _, row in WeightedEpochs([50, 50], [1, 1], 0).next(100)]
    first, second = [r for r in rows if r < 50], [r - 50 for r in rows if r >= 50]
    assert sorted(first) == sorted(second) and first != second


@settings(deadline=None, max_examples=50)
@given(mixtures, st.integers(0, 100), st.integers(0, 90), st.integers(0, 90))
def test_a_restored_mixture_goes_on_as_if_nothing_had_happened(mixture, seed, before, after):
    sizes, weights = zip(*mixture, strict=True)
    straight = WeightedEpochs(sizes, weights, seed)
    straight.next(before)
    other = WeightedEpochs(sizes, weights, seed)
    other.restore(json.loads(json.dumps(straight.state())))
    assert other.state() == straight.state()
    assert other.next(after) == straight.next(after)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (WeightedEpochs([3, 2], [1, 2], 0), "rows in data.train: the checkpoint has 6, this run"),
        (WeightedEpochs([2, 4], [1, 2], 0), "each entry .*the checkpoint has .4, 2., this run has"),
        (WeightedEpochs([4, 2], [1, 3], 0), "data.weights: the checkpoint has .1.0, 2.0., this"),
        (WeightedEpochs([4, 2], [1, 2], 1), "run.seed: the checkpoint has 0, this run has 1"),
        (WeightedEpochs([4, 2], [1, 2], 0, False), "data.shuffle: the checkpoint has True, this"),
        (ShuffledEpochs(6, 0), "rows in each entry of data.train: the checkpoint has .4, 2., this"),
    ],
)
def test_a_changed_mixture_is_refused(other, sentence):
    with pytest.raises(ValueError, match=sentence):
        other.restore(WeightedEpochs([4, 2], [1, 2], 0).state())


def test_a_mixture_refuses_a_checkpoint_without_weights():
    with pytest.raises(ValueError, match="the checkpoint has None, this run has .4, 2., so the"):
        WeightedEpochs([4, 2], [1, 2], 0).restore(ShuffledEpochs(6, 0).state())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("a.jsonl b.jsonl --data.weights 3 1", ""),
        ("a.jsonl b.jsonl --data.weights 3 0.5 1", "3 0.5 1: must be one number for each entry of"),
        ("a.jsonl b.jsonl --data.weights 1 0", "--data.weights 1 0: each must be above 0"),
    ],
)
def test_weights_are_positive_and_one_for_each_entry(words, sentence):
    cfg = parse(["--model.path", "m", "--eval.every", "0", "--data.train", *words.split()])
    found = "\n".join(rules.broken(cfg))
    assert sentence in found if sentence else not found
