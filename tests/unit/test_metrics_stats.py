"""Statistics against numbers worked by hand and against enumeration."""

import itertools
import math

import numpy as np
import pytest

from rlcore.metrics import stats


def test_summary_of_three_numbers():
    found = stats.summary("response_length", np.array([1, 2, 6], dtype=np.int32))
    assert found == {
        "response_length/mean": 3.0,
        "response_length/max": 6.0,
        "response_length/min": 1.0,
    }


def test_summary_of_nothing_is_nothing():
    assert stats.summary("x", []) == {}


def test_standard_error_of_independent_values():
    # variance of 1, 2, 3, 4 is 5/3, so the error of the mean is sqrt(5/3/4)
    assert stats.standard_error([1, 2, 3, 4]) == pytest.approx(math.sqrt(5 / 12))
    assert math.isnan(stats.standard_error([1.0]))


def test_standard_error_of_equal_clusters_is_that_of_the_cluster_means():
    values, clusters = [1, 1, 0, 0, 1, 0], ["a", "a", "b", "b", "c", "c"]
    means = [1.0, 0.0, 0.5]
    assert stats.standard_error(values, clusters) == pytest.approx(stats.standard_error(means))


def test_standard_error_with_a_cluster_each_is_the_plain_one():
    values = [0.0, 1.0, 1.0, 0.5, 0.25]
    assert stats.standard_error(values, range(5)) == pytest.approx(stats.standard_error(values))


def test_standard_error_refuses_a_wrong_number_of_clusters():
    with pytest.raises(ValueError, match="3 values but 2 clusters"):
        stats.standard_error([1, 2, 3], ["a", "b"])


def test_pass_at_k_counts_the_subsets_with_a_right_answer():
    for n, right in itertools.product(range(1, 7), range(7)):
        if right > n:
            continue
        answers = [1] * right + [0] * (n - right)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(answers, k))
            expected = sum(any(s) for s in subsets) / len(subsets)
            assert stats.pass_at_k(n, right, k) == pytest.approx(expected)


def test_best_at_k_averages_the_best_of_every_subset():
    scores = [0.3, -1.0, 0.3, 2.0, 0.5]
    for k in range(1, 6):
        expected = np.mean([max(s) for s in itertools.combinations(scores, k)])
        assert stats.best_at_k(scores, k) == pytest.approx(expected)


def test_more_samples_than_drawn_are_refused():
    with pytest.raises(ValueError, match="k 5: must be from 1 to the number of samples, 4"):
        stats.pass_at_k(4, 1, 5)
    with pytest.raises(ValueError, match="5 correct of 4"):
        stats.pass_at_k(4, 5, 1)


def test_evaluation_of_two_prompts_with_two_samples_each():
    found = stats.evaluation("gsm8k", {7: [1.0, 0.0], 9: [1.0, 1.0]})
    assert found == {
        "val-core/gsm8k/acc/mean@2": 0.75,
        "val-aux/gsm8k/num_prompts": 2.0,
        "val-aux/gsm8k/acc/std_err@2": pytest.approx(0.25),
        "val-core/gsm8k/acc/pass@1": 0.75,
        "val-core/gsm8k/acc/pass@2": 1.0,
        "val-core/gsm8k/acc/best@2": 1.0,
    }


def test_evaluation_refuses_prompts_with_different_numbers_of_samples():
    with pytest.raises(ValueError, match=r"evaluation of x: samples per prompt differ, \[1, 2\]"):
        stats.evaluation("x", {0: [1.0], 1: [1.0, 0.0]})
    with pytest.raises(ValueError, match=r"samples per prompt differ, \[\]"):
        stats.evaluation("x", {})


@pytest.mark.parametrize(
    ("scores", "answers", "found"),
    [
        ([0.0, 1.0, 1.0], ["7", "8", "8"], 1.0),
        ([0.0, 1.0, 0.0], ["7", "8", "7"], 0.0),
        ([0.0, 1.0], ["7", "8"], 0.0),  # of equal votes the earliest
        ([0.0, 0.5, 0.0], ["", "8", ""], 0.5),  # no answer is no vote
        ([0.0, 0.0], ["", ""], 0.0),
        ([1.0, 1.0], (), 0.0),
    ],
)
def test_the_majority_has_the_score_of_the_most_frequent_answer(scores, answers, found):
    assert stats.majority(scores, answers) == found


def test_an_evaluation_with_answers_has_the_vote():
    scores, answers = {"a": [1.0, 0.0, 1.0], "b": [0.0, 0.0, 1.0]}, {"a": ["1", "2", "1"]}
    assert stats.evaluation("s", scores, answers)["val-core/s/acc/maj@3"] == 0.5
    assert "val-core/s/acc/maj@3" not in stats.evaluation("s", scores)
