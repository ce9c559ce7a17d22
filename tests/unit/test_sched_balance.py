"""Which split of the ranks is best? Numbers worked by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.sched.balance import Balance, Rates, best, measured

FULL = Rates(
    samples=100, tokens=6000, longest=600, step_s=0.01, running=1, train_s=30, sync_s=1, places=10
)
"""Ten places, a step of which takes .1 s where arithmetic decides: a token is .01 s of a rank."""


def test_a_step_of_a_split_is_its_slower_side_and_without_staleness_their_sum() -> None:
    """60 rank-seconds of sampling and 30 of training; the longest needs 600 steps of .1 s."""
    assert FULL.decode_s(10) == pytest.approx(0.1)
    assert FULL.train_share(10, alpha=2) == pytest.approx(1 / 3)
    assert FULL.seconds(5, 10, alpha=2) == pytest.approx(6 + 60 / 3 + 1)
    assert FULL.seconds(1, 10, alpha=2) == pytest.approx(30 + 1)
    assert FULL.seconds(5, 10, alpha=0) == pytest.approx(6 + 6 + 60 + 1)


def test_engines_that_wait_for_memory_take_more_requests_for_little() -> None:
    """An empty step takes .008 s and a request .0008: with 10 requests .016 s, with 50 .048 s."""
    rates = replace(FULL, step_s=0.0088, load=0.1, places=50)
    assert rates.decode_s(10) == pytest.approx(0.016)
    assert rates.decode_s(50) == pytest.approx(0.048)
    assert rates.requests(30, alpha=2) == pytest.approx(10)  # 300 over thirty engines
    assert rates.requests(2, alpha=2) == 50
    assert rates.seconds(9, 30, alpha=2) == pytest.approx(6000 / 300 * 0.016 + 9.6 / 3 + 1, rel=0.1)


ROW = {
    "timing_s/step": 10.0,
    "timing_s/update_weights": 0.5,
    "timing_s/pause_engines": 0.5,
    "sched/trainer_idle": 0.4,
    "sched/busy_s": 24.0,
    "sched/decode_steps": 2400.0,
    "sched/decode_tokens": 9600.0,
    "response_length/max": 300.0,
}
KNOWN = {"samples": 64, "places": 8.0, "load": math.inf}


def test_rates_are_those_of_the_ranks_that_worked() -> None:
    """Of 10 s the two train ranks waited 4 and stood 1 in the push; a step of .01 s made 4
    tokens."""
    rates = measured(ROW, train=2, tp=2, **KNOWN)
    assert rates == Rates(
        samples=64,
        tokens=9600.0,
        longest=300.0,
        step_s=0.01,
        running=4.0,
        train_s=10.0,
        sync_s=1.0,
        places=8.0,
        tp=2,
    )
    assert measured({"val-core/a/acc/mean@1": 0.5}, train=2, tp=2, **KNOWN) is None
    assert measured(ROW | {"sched/decode_tokens": 0.0}, train=2, tp=2, **KNOWN) is None


def test_the_proposal_nears_beta_star_and_keeps_to_what_is_possible() -> None:
    rates = replace(FULL, longest=0)
    assert best(rates, 12, 4, range(1, 12)) == 8
    assert best(rates, 12, 4, [2, 6, 10]) == 6
    with_a_tail = replace(FULL, longest=200)  # 20 s, half of which counts
    assert [best(with_a_tail, 12, 1, range(1, n)) for n in (12, 10, 9)] == [9, 8, 8]


@given(
    st.floats(1, 1e6),
    st.floats(1, 1e4),
    st.floats(0, 1e4),
    st.floats(1e-3, 1e3),
    st.sampled_from([0, 0.5, 1, 2, 8]),
)
def test_no_other_split_is_much_better_than_the_proposal(
    tokens: float, train: float, longest: float, load: float, alpha: float
) -> None:
    rates = replace(FULL, tokens=tokens, train_s=train, longest=longest, load=load)
    chosen = best(rates, 16, alpha, range(1, 16))
    steps = [rates.seconds(16 - r, r, alpha) for r in range(1, 16)]
    assert rates.seconds(16 - chosen, chosen, alpha) <= 1.05 * min(steps)
    assert 0 < rates.train_share(chosen, alpha) < 1


def test_metrics_and_the_sentence_say_the_same_of_a_run() -> None:
    """A rank-pair decodes 400 tokens a second, so three need 8 s, and the longest 300 steps of
    .02 s; training needs 10 rank-seconds."""
    known = {"samples": 64, "places": 8.0, "possible": [2, 4, 6]}
    balance = Balance(ranks=8, rollout=6, tp=2, alpha=2, **known)
    assert balance.metrics({}) == {}
    found = balance.metrics(ROW)
    now = max(10 / 2, 9600 / 400 / 3 + 300 * 0.02 / 3) + 1
    assert found == {
        "balance/train_share": pytest.approx(10 / (10 + 2 * 9600 / 400)),
        "balance/rollout_ranks": 6.0,
        "balance/step_s": pytest.approx(now),
        "balance/speed_up": pytest.approx(1.0),
    }
    assert "no other split is much faster" in balance.sentence([ROW], "the last run")
    few = Balance(ranks=8, rollout=2, tp=2, alpha=2, **known)
    said = few.sentence([ROW], "the last run")
    assert "6 ranks train and 2 sample: 27 s per step" in said
    assert "--cluster.rollout_ranks 4 would take 15 s" in said
