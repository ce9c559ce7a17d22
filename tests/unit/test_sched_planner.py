"""Sizes of engines and deadlines of rewards, by hand."""

import pytest

from rlcore.sched.planner import FixedSizes, TPPlanner
from rlcore.sched.reward_timeout import AdaptiveTimeout


def sizes(planner: TPPlanner, preemptions: list[int], kind: str = "short") -> list[int]:
    return [planner.after(kind, n) for n in preemptions]


def test_a_rise_of_preemptions_doubles_and_a_twentieth_more_is_no_rise():
    assert sizes(TPPlanner(1, 8), [100, 105, 106]) == [1, 1, 1]  # 106 < 1.05 * 105
    assert sizes(TPPlanner(1, 8), [100, 106, 200, 300, 400]) == [1, 2, 4, 8, 8]


def test_the_first_round_has_nothing_to_be_compared_with():
    assert sizes(TPPlanner(1, 8), [5000]) == [1]


def test_four_calm_rounds_in_a_row_halve():
    assert sizes(TPPlanner(4, 8), [0, 0, 0, 0, 0, 0, 0, 0]) == [4, 4, 4, 2, 2, 2, 2, 1]
    assert sizes(TPPlanner(4, 8), [0, 0, 0, 1, 0, 0, 0]) == [4, 4, 4, 8, 8, 8, 8]


def test_nothing_is_halved_below_one_or_while_caches_are_full():
    assert sizes(TPPlanner(1, 8), [0] * 9) == [1] * 9
    planner = TPPlanner(2, 8)
    assert [planner.after("short", 0, cache_used=0.95) for _ in range(6)] == [2] * 6
    assert planner.after("short", 0, cache_used=0.5) == 1


def test_nothing_is_halved_below_the_smallest_size_that_has_room():
    assert sizes(TPPlanner(4, 8, min_tp=2), [0] * 12) == [4] * 3 + [2] * 9
    with pytest.raises(ValueError, match="tp 1: must be a power of two from 2"):
        TPPlanner(1, 8, min_tp=2)


def test_listed_sizes_are_of_rounds_and_the_last_one_holds():
    listed, found = FixedSizes([1, 2, 1, 4]), []
    for _ in range(6):
        found.append(listed.size("all"))
        listed.after("all", 0)
    assert found == [1, 2, 1, 4, 4, 4]
    again = FixedSizes([1, 2, 1, 4])
    again.restore({"rounds": 1})
    assert again.size("short") == 2 and again.state() == {"rounds": 1}


def test_short_and_long_rounds_do_not_know_of_each_other():
    """Alternating, their preemptions would look like a sudden rise in every other round."""
    planner = TPPlanner(2, 8)
    for _ in range(3):
        assert planner.after("short", 4000) == 2
        assert planner.after("long", 2000) == 2
    assert planner.after("long", 3000) == 4
    assert (planner.size("short"), planner.size("long")) == (2, 4)


def test_the_published_growth():
    """14B on 16 GPUs while answers grow: 1 to 2 at step 3, to 4 at step 8."""
    preempted = [10, 10, 40, 40, 40, 41, 41, 90, 90]
    assert sizes(TPPlanner(1, 8), preempted) == [1, 1, 2, 2, 2, 2, 2, 4, 4]


def test_a_restored_planner_goes_on():
    one, two = TPPlanner(4, 8), TPPlanner(1, 8)
    sizes(one, [5, 0, 0, 0])
    two.restore(one.state())
    assert sizes(two, [0]) == sizes(one, [0]) == [2]
    with pytest.raises(ValueError, match="engines of 2 ranks for short rounds, but this run"):
        TPPlanner(1, 1).restore(one.state())


@pytest.mark.parametrize("tp", [0, 3, 16])
def test_sizes_that_cannot_be_are_refused(tp):
    with pytest.raises(ValueError, match=f"tp {tp}: must be a power of two from 1 to 8"):
        TPPlanner(tp, 8)


def test_the_deadline_follows_the_slowest_right_answer_within_its_bounds():
    rule = AdaptiveTimeout(least_s=2.0, most_s=30.0, factor=1.5)
    assert rule.timeout_s("p") == 30.0  # nothing is known
    rule.scored("p", 25.0, is_right=False)
    assert rule.timeout_s("p") == 30.0
    rule.scored("p", 0.1, is_right=True)
    assert rule.timeout_s("p") == 2.0
    rule.scored("p", 4.0, is_right=True)
    rule.scored("p", 3.0, is_right=True)
    assert rule.timeout_s("p") == 6.0
    rule.scored("p", 24.0, is_right=True)
    assert rule.timeout_s("p") == 30.0
    assert rule.timeout_s("q") == 30.0
    other = AdaptiveTimeout(least_s=2.0, most_s=30.0, factor=1.5)
    other.restore(rule.state())
    assert other.timeout_s("p") == 30.0
