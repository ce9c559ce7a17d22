"""Advantages by hand, against slow references written from the papers, and their identities."""

import math
import random
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.algos import advantage, returns
from rlcore.algos.advantage import OUTCOME, GroupRewards, outcome
from rlcore.algos.base import TOKEN_BASELINES, AlgoConfig
from rlcore.tensors import Batch, cumulative

NAN, INF = math.nan, math.inf
examples = settings(max_examples=50, deadline=None)

REWARDS = st.lists(st.floats(-5, 5, allow_subnormal=False), min_size=1, max_size=5)


@st.composite
def steps(draw, smallest: int = 1) -> list[GroupRewards]:
    """Groups of uneven size, responses of uneven length, some without trained tokens."""
    reward = st.sampled_from([0.0, 1.0, -1.0, 0.25]) | st.floats(-5, 5, allow_subnormal=False)
    row = st.tuples(reward, st.integers(0, 7))
    made = draw(st.lists(st.lists(row, min_size=smallest, max_size=5), min_size=1, max_size=4))
    return [GroupRewards(*map(tuple, zip(*rows, strict=True))) for rows in made]


def one(*rewards: float, lengths: tuple[int, ...] = ()) -> list[GroupRewards]:
    return [GroupRewards(rewards, lengths or (1,) * len(rewards))]


def of(groups: list[GroupRewards], name: str, **algo: Any) -> list[list[float]]:
    return outcome(groups, AlgoConfig(adv_estimator=name, **algo))


# one number per response


def test_grpo_divides_the_distance_to_the_mean_by_the_deviation():
    """Mean 1/4, squares 3/4, unbiased deviation 1/2."""
    assert of(one(1, 0, 0, 0), "grpo")[0] == pytest.approx(
        [0.75 / 0.500001] + [-0.25 / 0.500001] * 3, rel=1e-14
    )


def test_grpo_without_the_deviation_is_the_distance_to_the_mean():
    assert of(one(1, 0), "grpo", norm_adv_by_std=False) == [[0.5, -0.5]]


def two_terms(*rows: tuple[float, float], lengths: tuple[int, ...]) -> GroupRewards:
    """A group whose rewards are the first term and half the second."""
    sums = tuple(a + b / 2 for a, b in rows)
    return GroupRewards(sums, lengths, terms=rows, weights=(1.0, 0.5))


def test_gdpo_normalises_each_term_of_the_reward_before_the_sum():
    """The large term does not drown the small one, whose deviation is the same after division. Each
    term has the mean 1/2 and the deviations 1, 10 times sqrt(1/2); the weights are 1 and 1/2."""
    found = of([two_terms((1, 0), (0, 10), lengths=(1, 1))], "gdpo")[0]
    a = 0.5 / (math.sqrt(0.5) + 1e-6) - 0.5 * 5 / (math.sqrt(50) + 1e-6)
    assert found == pytest.approx(
        [a / math.sqrt(2 * a * a + 1e-8), -a / math.sqrt(2 * a * a + 1e-8)]
    )
    drowned = of([two_terms((1, 0), (0, 10), lengths=(1, 1))], "grpo")[0]
    assert drowned[0] < 0 < found[0]


def test_gdpo_tells_apart_responses_of_the_same_sum():
    assert of([two_terms((1, 0), (0, 2), lengths=(1, 1))], "grpo") == [[0, 0]]
    first, second = of([two_terms((1, 0), (0, 2), lengths=(1, 1))], "gdpo")[0]
    assert first > 0.7 and second == -first


def test_gdpo_is_verls():
    """Numbers of verl's compute_gdpo_outcome_advantage in float64 at 1dda039b, without the 1e-8
    beside the number of tokens in its mean."""
    groups = [
        two_terms((1, 1), (1, 0), (0, 0), (0, 1), lengths=(1, 2, 3, 4)),
        two_terms((1, 2), (0, 0), lengths=(5, 2)),
    ]
    assert [a for row in of(groups, "gdpo") for a in row] == pytest.approx(
        [
            1.3262305447844436,
            0.45322946620856214,
            -1.2927726909432002,
            -0.419771612367319,
            1.0859331124716076,
            -1.0524752586303643,
        ],
        rel=1e-14,
    )


def test_gdpo_needs_a_weight_for_each_term():
    with pytest.raises(
        ValueError, match=r"1 weights and responses of \[2\] terms: give one weight"
    ):
        GroupRewards((1.0,), (1,), terms=((1.0, 0.0),), weights=(1.0,))


def test_passk_gives_the_best_response_its_lead_over_the_second():
    assert of(one(1, 4, 3), "grpo_passk", norm_adv_by_std=False) == [[0, 1, 0]]
    std = math.sqrt((25 + 16 + 1) / 9 / 2 * 1)  # distances to 8/3: -5/3, 4/3, 1/3
    assert of(one(1, 4, 3), "grpo_passk")[0] == pytest.approx([0, 1 / (std + 1e-6), 0])


def test_passk_gives_nothing_on_a_tie_of_the_best():
    assert of(one(1, 1, 0), "grpo_passk") == [[0, 0, 0]]


def test_maxrl_divides_the_distance_to_the_mean_by_the_mean():
    """With one success of n, n - 1 for it and -1 for the others; with half of them, 1 and -1."""
    assert of(one(1, 0, 0, 0), "maxrl")[0] == pytest.approx([3, -1, -1, -1], rel=5e-6)
    assert of(one(1, 0), "maxrl") == [[0.5 / 0.500001, -0.5 / 0.500001]]
    assert of(one(0.5, 0.25), "maxrl", norm_adv_by_std=False) == [
        [0.125 / 0.375001, -0.125 / 0.375001]
    ]


@pytest.mark.parametrize("successes", range(1, 4))
def test_maxrl_is_the_mean_score_function_of_the_successes_but_for_a_baseline(successes):
    """Theorem 2 of the paper: sum_i A_i s_i / n = (mean of the successes' s) - (mean of all s)."""
    g = torch.Generator().manual_seed(successes)
    score_functions = torch.randn(4, generator=g, dtype=torch.float64)
    rewards = [1.0] * successes + [0.0] * (4 - successes)
    found = torch.tensor(of(one(*rewards), "maxrl")[0], dtype=torch.float64)
    want = score_functions[:successes].mean() - score_functions.mean()
    assert float((found * score_functions).mean()) == pytest.approx(float(want), rel=5e-6)


def test_maxrl_refuses_a_negative_reward():
    with pytest.raises(ValueError, match="maxrl: group 1 has the reward -0.5, but all must be 0"):
        of(one(1, 0) + one(1, -0.5), "maxrl")


def test_rloo_is_the_distance_to_the_mean_of_the_others():
    assert of(one(4, 1, 1), "rloo")[0] == pytest.approx([3, -1.5, -1.5])


def test_opo_weighs_its_baseline_by_length():
    """(1 x 1 + 3 x 0) / 4 = 1/4."""
    assert of(one(1, 0, lengths=(1, 3)), "opo") == [[0.75, -0.25]]


def test_gpg_grows_with_the_share_of_responses_without_reward_over_the_step():
    groups = one(1, 0) + one(0, 0) + one(1, 0)  # two of six have a reward
    assert of(groups, "gpg") == [[1.5, -1.5], [0, 0], [1.5, -1.5]]
    assert of(one(0, 0), "gpg") == [[0, 0]]


def test_reinforce_plus_plus_baseline_is_whitened_over_tokens():
    """Centred rewards 1/2 on one token and -1/2 on three: mean -1/4, squares 3/4, by 3: 1/4."""
    found = of(one(1, 0, lengths=(1, 3)), "reinforce_plus_plus_baseline")[0]
    assert found == pytest.approx([0.75 / math.sqrt(0.25 + 1e-8), -0.25 / math.sqrt(0.25 + 1e-8)])


def test_whitening_works_on_every_estimator():
    groups = one(1, 0, lengths=(1, 3))
    plain = of(groups, "reinforce_plus_plus_baseline")
    assert of(groups, "grpo", norm_adv_by_std=False, whiten_advantages=True) == plain


@pytest.mark.parametrize(
    "name, want",
    [
        ("grpo", 0.7 / (1 + 1e-6)),
        ("maxrl", 0.7),
        ("rloo", 0.7),
        ("opo", 0.7),
        ("gpg", 0.7),
        ("gdpo", 0.0),
        ("reinforce_plus_plus_baseline", 0.0),  # the only tokens of the step have no spread
    ],
)
def test_a_group_of_one_has_its_reward_for_an_advantage(name, want):
    assert of(one(0.7, lengths=(2,)), name)[0] == pytest.approx([want], abs=1e-15)


def test_passk_refuses_a_group_of_one():
    with pytest.raises(ValueError, match="group 1 has one response, but needs two or more; raise"):
        of(one(1, 0) + one(1), "grpo_passk")


@pytest.mark.parametrize("name", OUTCOME)
def test_a_group_without_spread_has_advantage_zero_exactly(name):
    """0.1 + 0.1 + 0.1 is not 0.3: a mean that is off by a rounding, by 1e-6, would be seen."""
    assert of(one(0.1, 0.1, 0.1) + one(0.7, 0.7), name) == [[0, 0, 0], [0, 0]]


def test_none_gives_zero():
    assert of(one(1, 0, 3) + one(2), "none") == [[0, 0, 0], [0]]


@pytest.mark.parametrize("name", OUTCOME)
def test_responses_without_trained_tokens_give_finite_advantages(name):
    found = of([GroupRewards((1.0, 0.0), (0, 0))], name)
    assert all(map(math.isfinite, found[0]))
    if name == "reinforce_plus_plus_baseline":
        assert found == [[0, 0]]


def test_responses_without_trained_tokens_count_in_no_mean_over_tokens():
    groups = one(1, 0, 9, lengths=(1, 3, 0))
    assert of(groups, "opo")[0][:2] == [0.75, -0.25]
    alone = of(one(1, 0, lengths=(1, 3)), "grpo", norm_adv_by_std=False, whiten_advantages=True)
    more = of(groups, "grpo", norm_adv_by_std=False, whiten_advantages=True)
    assert more[0][:2] == pytest.approx(alone[0])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_reward_that_is_not_finite_is_named(bad):
    with pytest.raises(ValueError, match=f"reward {bad} of response 1 of group 1: must be finite"):
        of(one(1, 0) + one(0, bad), "grpo")


def test_rewards_and_lengths_must_agree():
    with pytest.raises(ValueError, match="2 rewards and 1 lengths"):
        GroupRewards((1.0, 0.0), (1,))
    with pytest.raises(ValueError, match="0 rewards and 0 lengths"):
        GroupRewards((), ())


def test_an_estimator_per_token_is_refused():
    with pytest.raises(ValueError, match="gae: has no single advantage per response; use one of"):
        of(one(1, 0), "gae")


def test_equal_rewards_are_equal_to_rounding():
    assert advantage.is_equal([0.3, 0.3]) and not advantage.is_equal([0.3, 0.4])
    assert advantage.is_equal([0.1 + 0.2, 0.3])


def padded(groups: list[GroupRewards]) -> tuple[Tensor, Tensor, list[int]]:
    """Rewards [B], mask [B, L] and group of every response."""
    index = [i for i, g in enumerate(groups) for _ in g.rewards]
    lengths = torch.tensor([n for g in groups for n in g.lengths])
    score = torch.tensor([r for g in groups for r in g.rewards], dtype=torch.float64)
    return score, (torch.arange(8)[None] < lengths[:, None]).double(), index


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    n = mask.sum()
    start = values[mask > 0][0]  # from where the mean of equal values has no rounding
    mean = start + ((values - start) * mask).sum() / n
    var = ((values - mean) ** 2 * mask).sum() / (n - 1)
    return (values - mean) / torch.sqrt(var + 1e-8) * mask


def slow(name: str, groups: list[GroupRewards], by_std: bool, whitens: bool) -> Tensor:
    """[B, L] as the papers write it: one response after the other, each against its group."""
    score, mask, index = padded(groups)
    out = torch.zeros_like(mask)
    for i in range(len(score)):
        mine = [j for j in range(len(score)) if index[j] == index[i]]
        others = [j for j in mine if j != i]
        r = score[mine]
        alone = not others
        mean = 0.0 if alone else r.sum() / len(r)
        std = 1.0 if alone else torch.sqrt(((r - r.mean()) ** 2).sum() / (len(r) - 1))
        scale = std + 1e-6 if by_std else 1.0
        if name in ("grpo", "gdpo"):  # a single reward
            a = (score[i] - mean) / scale
        elif name == "grpo_passk":
            best = all(score[i] > score[j] for j in others)
            a = (score[i] - max(score[j] for j in others)) / scale if best else 0.0
        elif name == "maxrl":
            a = (score[i] - mean) / (1.0 if alone else mean + 1e-6)
        elif name == "rloo":
            a = score[i] - (sum(score[j] for j in others) / len(others) if others else 0.0)
        elif name == "opo":
            tokens = mask[mine].sum()
            base = (mask[mine].sum(1) * r).sum() / tokens if tokens and others else 0.0
            a = score[i] - base
        elif name == "gpg":
            a = (score[i] - mean) * len(score) / max(int((score != 0).sum()), 1)
        else:
            a = score[i] - mean
        out[i] = a * mask[i]
    if name in ("gdpo", "reinforce_plus_plus_baseline") or whitens:
        out = whiten(out, mask) if mask.sum() > 1 else torch.zeros_like(out)
    return out


def settled(groups: list[GroupRewards]) -> list[GroupRewards]:
    """Without spreads so small that the 1e-6 beside them makes a rounding of the mean visible."""
    return [
        g
        if max(g.rewards) - min(g.rewards) > 1e-2
        else GroupRewards((g.rewards[0],) * len(g.rewards), g.lengths)
        for g in groups
    ]


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("whitens", [True, False])
@pytest.mark.parametrize("name", [name for name in OUTCOME if name != "none"])
def test_every_estimator_agrees_with_the_slow_reference(name, whitens, by_std):
    draw = random.Random(f"{name} {whitens} {by_std}")
    # Sums of 64ths have no rounding, which 1e-6 and 1e-8 in denominators would blow up to 1e-12.
    for _ in range(20):
        smallest = 2 if name == "grpo_passk" else 1
        groups = []
        for _ in range(draw.randint(1, 4)):
            n = draw.randint(smallest, 5)
            least = 0 if name == "maxrl" else -200
            rewards = tuple(draw.choice([0, 64, draw.randint(least, 200)]) / 64 for _ in range(n))
            groups.append(GroupRewards(rewards, tuple(draw.randint(0, 7) for _ in range(n))))
        found = of(groups, name, norm_adv_by_std=by_std, whiten_advantages=whitens)
        _, mask, _ = padded(groups)
        flat = torch.tensor([a for row in found for a in row], dtype=torch.float64)
        want = slow(name, groups, by_std, whitens)
        torch.testing.assert_close(flat[:, None] * mask, want, rtol=1e-12, atol=1e-12)


@examples
@given(REWARDS)
def test_rloo_is_the_reward_minus_the_mean_of_the_others(rewards):
    found = of(one(*rewards), "rloo")[0]
    for i, a in enumerate(found):
        others = rewards[:i] + rewards[i + 1 :]
        base = math.fsum(others) / len(others) if others else 0.0
        assert a == pytest.approx(rewards[i] - base, abs=1e-12)


@examples
@given(steps(smallest=2), st.booleans())
def test_grpo_advantages_of_a_group_sum_to_zero(groups, by_std):
    for row in of(settled(groups), "grpo", norm_adv_by_std=by_std):
        assert math.fsum(row) == pytest.approx(0.0, abs=1e-11)


@examples
@given(steps(smallest=2))
def test_opo_advantages_of_a_group_sum_to_zero_over_its_tokens(groups):
    for g, row in zip(groups, of(groups, "opo"), strict=True):
        tokens = math.fsum(n * a for n, a in zip(g.lengths, row, strict=True))
        assert tokens == pytest.approx(0.0, abs=1e-11)


@examples
@given(steps(), st.sampled_from(sorted(set(OUTCOME) - {"grpo_passk", "maxrl"})))
def test_whitened_advantages_have_mean_zero_and_variance_one_over_tokens(groups, name):
    groups = settled(groups)
    found = of(groups, name, whiten_advantages=True)
    flat = [a for row in found for a in row]
    plain = [
        a for a, n in zip(flat, chain(*(g.lengths for g in groups)), strict=True) for _ in range(n)
    ]
    tokens = len(plain)
    before = [a for row in of(groups, name) for a in row]
    if tokens < 2 or max(before) - min(before) < 1e-2 or max(plain) - min(plain) < 1e-3:
        return  # hardly any spread: the 1e-8 in the denominator has its say
    assert math.fsum(plain) / tokens == pytest.approx(0.0, abs=1e-9)
    assert math.fsum(a * a for a in plain) / (tokens - 1) == pytest.approx(1.0, abs=1e-2)


# one number per token


def batch_of(masks: list[list[int]], **values: Any) -> Batch:
    """Packed sequences by their masks, for example [0, 1, 1]."""
    mask = torch.tensor([m for row in masks for m in row], dtype=torch.bool)
    values = {k: torch.tensor(v, dtype=torch.float64) for k, v in values.items()}
    return Batch(
        tokens=torch.zeros(len(mask), dtype=torch.int64),
        cu_seqlens=cumulative([len(row) for row in masks]),
        mask=mask,
        **values,
    )


def test_the_reward_stands_on_the_last_trained_token_and_the_penalty_on_all():
    batch = batch_of([[0, 1, 1, 0], [0, 0], [1]])
    penalty = torch.tensor([NAN, 0.25, 0.5, INF, NAN, NAN, 1.0], dtype=torch.float64)
    found = returns.token_rewards(batch, [2.0, NAN, -1.0], penalty)
    assert found.tolist() == [0, -0.25, 1.5, 0, 0, 0, -2] and found.dtype == torch.float64
    plain = returns.token_rewards(batch, [2.0, 3.0, -1.0], None)
    assert plain.tolist() == [0, 0, 2, 0, 0, 0, -1] and plain.dtype == torch.float32


def test_every_sequence_needs_a_reward():
    with pytest.raises(ValueError, match="1 rewards for 2 sequences"):
        returns.token_rewards(batch_of([[1], [1]]), [1.0], None)


def test_reinforce_plus_plus_discounts_over_trained_tokens_only():
    """1/2 per step back from the reward 8; the tool's output between is no step."""
    batch = batch_of([[0, 1, 1, 0, 1]])
    reward = returns.token_rewards(batch, [8.0], torch.zeros(5).double())
    cfg = AlgoConfig(adv_estimator="reinforce_plus_plus", gamma=0.5)
    found, gains = returns.advantages(batch, reward, cfg, None)
    assert found.tolist() == [0, 2, 4, 0, 8] and gains.tolist() == found.tolist()


def test_remax_takes_the_reward_of_the_greedy_response_off():
    batch = batch_of([[0, 1, 1], [0, 0], [1, 1]])
    reward = torch.tensor([0, -0.5, 2, 0, 0, 0, 1]).double()
    cfg = AlgoConfig(adv_estimator="remax", gamma=0.5)  # has no discount
    found, gains = returns.advantages(batch, reward, cfg, [1.0, NAN, 3.0])
    assert gains.tolist() == [0, 1.5, 2, 0, 0, 1, 1]
    assert found.tolist() == [0, 0.5, 1, 0, 0, -2, -2]


def test_gae_by_hand():
    """gamma 1/2, lambda 1/2, values 1 and 2, reward 4 at the end: d_2 = 2, d_1 = 0 + 1 - 1."""
    batch = batch_of([[0, 1, 1]], value_old=[9, 1, 2])
    reward = torch.tensor([0, 0, 4]).double()
    cfg = AlgoConfig(adv_estimator="gae", gamma=0.5, lam=0.5)
    found, gains = returns.advantages(batch, reward, cfg, None)
    assert found.tolist() == [0, 0.5, 2] and gains.tolist() == [0, 1.5, 4]


def test_an_estimator_per_response_is_refused_here():
    batch = batch_of([[1]])
    with pytest.raises(ValueError, match="grpo: has one advantage per response; use one of"):
        returns.advantages(batch, torch.zeros(1), AlgoConfig(), None)


def slow_tokens(
    cfg: AlgoConfig, reward: list[float], value: list[float], mask: list[int], base: float
) -> tuple[list[float], list[float]]:
    """One sequence, from its last token to its first, as the papers write it."""
    found, gains = [0.0] * len(mask), [0.0] * len(mask)
    after, next_value, gain = 0.0, 0.0, 0.0
    for t in reversed(range(len(mask))):
        if not mask[t]:
            continue
        if cfg.adv_estimator == "gae":
            delta = reward[t] + cfg.gamma * next_value - value[t]
            after = delta + cfg.gamma * cfg.lam * after
            next_value = value[t]
            found[t], gains[t] = after, after + value[t]
        else:
            gamma = cfg.gamma if cfg.adv_estimator == "reinforce_plus_plus" else 1.0
            gain = reward[t] + gamma * gain
            gains[t] = gain
            found[t] = gain - (base if cfg.adv_estimator == "remax" else 0.0)
    return found, gains


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("name", returns.TOKEN)
def test_returns_agree_with_the_loop_over_time_whatever_stands_outside_the_mask(name, gamma, lam):
    g = torch.Generator().manual_seed(0)
    masks = [
        (torch.rand(n, generator=g) < 0.8).int().tolist() for n in (1, 3, 17, 64, 33, 5, 0, 129)
    ]
    masks[1] = [0, 0, 0]
    size = sum(map(len, masks))
    mask = torch.tensor([m for row in masks for m in row]).bool()
    reward, value = torch.randn(2, size, generator=g, dtype=torch.float64)
    base = torch.randn(len(masks), generator=g, dtype=torch.float64).tolist()
    cfg = AlgoConfig(adv_estimator=name, gamma=gamma, lam=lam)
    batch = batch_of(masks, value_old=torch.where(mask, value, NAN).tolist())
    found, gains = returns.advantages(batch, torch.where(mask, reward, INF), cfg, base)
    lengths = [len(row) for row in masks]
    for i, (a, ret, r, v) in enumerate(
        zip(*(t.split(lengths) for t in (found, gains, reward, value)), strict=True)
    ):
        want = slow_tokens(cfg, r.tolist(), v.tolist(), masks[i], base[i])
        torch.testing.assert_close(a.tolist(), want[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ret.tolist(), want[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", returns.TOKEN)
def test_a_rank_without_rows_and_rows_without_trained_tokens_give_zeros(name):
    cfg = AlgoConfig(adv_estimator=name)
    for masks in ([], [[0, 0], [0]]):
        batch = batch_of(masks, value_old=[NAN] * sum(map(len, masks)))
        reward = returns.token_rewards(batch, [NAN] * len(masks), None)
        found, gains = returns.advantages(batch, reward, cfg, [NAN] * len(masks))
        assert not found.any() and not gains.any() and len(found) == batch.num_tokens
        sums = returns.whitening_sums(found, batch.mask)
        assert sums.tolist() == [0, 0, 0]
        assert not returns.whitened(found, batch.mask, sums).any()


def test_float32_in_gives_float32_out():
    batch = batch_of([[1, 1]], value_old=[0.5, 0.25])
    for name in returns.TOKEN:
        cfg = AlgoConfig(adv_estimator=name)
        found, gains = returns.advantages(batch, torch.zeros(2), cfg, [0.0])
        assert found.dtype == gains.dtype == torch.float32
        sums = returns.whitening_sums(found, batch.mask)
        assert sums.dtype == torch.float64
        assert returns.whitened(found, batch.mask, sums).dtype == torch.float32


def test_one_token_is_whitened_to_zero():
    values, mask = torch.tensor([3.0, NAN]), torch.tensor([True, False])
    sums = returns.whitening_sums(values, mask)
    assert returns.whitened(values, mask, sums).tolist() == [0, 0]


@examples
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=40), st.data())
def test_two_shards_are_whitened_as_the_whole(numbers, data):
    values = torch.tensor(numbers, dtype=torch.float64)
    keep = data.draw(st.lists(st.booleans(), min_size=len(numbers), max_size=len(numbers)))
    mask = torch.tensor(keep)
    cut = data.draw(st.integers(0, len(numbers)))
    noisy = torch.where(mask, values, NAN)
    parts = [(noisy[:cut], mask[:cut]), (noisy[cut:], mask[cut:])]
    sums = sum(returns.whitening_sums(*part) for part in parts)
    found = torch.cat([returns.whitened(*part, sums) for part in parts])
    whole = returns.whitened(noisy, mask, returns.whitening_sums(noisy, mask))
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)
    inside = values[mask]
    if len(inside) > 1:
        scale = torch.rsqrt(inside.var() + 1e-8)
        want = torch.zeros_like(values).masked_scatter(mask, (inside - inside.mean()) * scale)
        torch.testing.assert_close(found, want, rtol=1e-7, atol=1e-7)


def test_whitening_agrees_with_two_passes_to_rounding():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.arange(1000) % 3 > 0
    found = returns.whitened(values, mask, returns.whitening_sums(values, mask))
    torch.testing.assert_close(found, whiten(values, mask.double()), rtol=1e-12, atol=1e-12)


# baselines of tokens


def with_terms(masks: list[list[int]], seed: int = 0) -> Batch:
    """Random log-probs of two policies, and sums of squares that suit them."""
    g = torch.Generator().manual_seed(seed)
    size = sum(map(len, masks))
    p, u = torch.rand(2, size, generator=g, dtype=torch.float64).clamp(min=0.01)
    mismatch = 0.5 * torch.randn(size, generator=g, dtype=torch.float64)
    return batch_of(masks).with_(
        old_log_probs=p.log(),
        rollout_log_probs=p.log() - mismatch,
        log_sum_pi_squared=(p**2 + (1 - p) ** 2 * u).log(),
    )


def above(batch: Batch, reward: Tensor, cfg: AlgoConfig, groups: list[int]) -> Tensor:
    terms = returns.baseline_terms(batch, reward, cfg, groups)
    longest = int(terms.place.max()) + 1 if len(terms.place) else 0
    sums = returns.baseline_sums(terms, max(groups, default=-1) + 1, longest)
    return returns.above_baseline(terms, reward, sums)[0]


def slow_above(batch: Batch, rewards: list[float], cfg: AlgoConfig, groups: list[int]) -> Tensor:
    """One token after the other, against all responses of its group."""
    of_row = []
    names = ("mask", "old_log_probs", "rollout_log_probs", "log_sum_pi_squared")
    parts = [getattr(batch, name).split(batch.lengths) for name in names]
    for mask, old, sampler, squares in zip(*parts, strict=True):
        trained = [t for t, m in enumerate(mask.tolist()) if m]
        log_w = [float(old[t] - sampler[t]) for t in trained]
        places, total = {}, 0.0
        for n, t in enumerate(trained):
            gap = math.fsum(log_w) if cfg.rollout_is == "sequence" else log_w[n]
            rho = 1.0 if cfg.rollout_is == "none" else min(math.exp(gap), 2.0)
            p = math.exp(float(old[t]))
            total += (1 - 2 * p + math.exp(float(squares[t]))) * rho**2
            place = n if cfg.adv_estimator.startswith("tir") else t - trained[0]
            places[place] = (t, total)
        of_row.append(places)
    out = [torch.zeros(n, dtype=torch.float64) for n in batch.lengths]
    for i, places in enumerate(of_row):
        for place, (t, _) in places.items():
            mine = [j for j, g in enumerate(groups) if g == groups[i] and place in of_row[j]]
            weights = [of_row[j][place][1] for j in mine]
            base = sum(w * rewards[j] for w, j in zip(weights, mine, strict=True))
            base = base / (sum(weights) + 1e-8) if len(mine) > 1 else 0.0
            out[i][t] = rewards[i] - base
    return torch.cat(out)


def test_a_baseline_weighs_responses_by_the_uncertainty_so_far():
    """Two responses of rewards 4 and 0, p 1/2 of two tokens: w = 1 - 1 + 1/2. The second token of
    the first is certain (w = 0): B_1 = 2, B_2 = 4 (1/2) / (1/2 + 1)."""
    half = math.log(0.5)
    batch = batch_of(
        [[0, 1, 1], [0, 1, 1]],
        old_log_probs=[9, half, 0, 9, half, half],
        rollout_log_probs=[9, half, 0, 9, half, half],
        log_sum_pi_squared=[9, half, 0, 9, half, half],
    )
    reward = torch.tensor([0, 0, 4, 0, 0, 0]).double()
    for name in TOKEN_BASELINES:
        found = above(batch, reward, AlgoConfig(adv_estimator=name), [0, 0])
        assert found.tolist() == pytest.approx([0, 2, 4 - 4 / 3, 0, -2, -4 / 3], rel=1e-7)


def test_where_one_response_alone_has_tokens_there_is_no_baseline():
    """The rest of the longest response, and a group of one."""
    batch = with_terms([[1, 1, 1], [1, 1], [1]])
    reward = returns.token_rewards(batch, [3.0, 3.0, 5.0], torch.zeros(6).double())
    for name in TOKEN_BASELINES:
        found = above(batch, reward, AlgoConfig(adv_estimator=name), [0, 0, 1])
        assert found.tolist() == pytest.approx([0, 0, 3, 0, 0, 5], abs=1e-4)


def test_places_count_tokens_of_tools_or_not():
    """In the second response a tool speaks at place 1, so the first has that place alone."""
    batch = with_terms([[0, 1, 1, 1], [0, 1, 0, 1]])
    reward = returns.token_rewards(batch, [1.0, 0.0], torch.zeros(8).double())
    by_place, by_count = (
        above(batch, reward, AlgoConfig(adv_estimator=name, rollout_is="none"), [0, 0])
        for name in TOKEN_BASELINES
    )
    assert by_place[2] == 1.0 and by_count[3] == 1.0
    assert 0 < by_place[3] < 1 and 0 < by_count[2] < 1 and by_place[1] == by_count[1]


@pytest.mark.parametrize("rollout_is", ["none", "token", "sequence"])
@pytest.mark.parametrize("name", TOKEN_BASELINES)
def test_baselines_agree_with_the_loop_over_tokens(name, rollout_is):
    g = torch.Generator().manual_seed(1)
    lengths = [1, 7, 33, 12, 0, 64, 5, 9]
    masks = [[0, *(torch.rand(n, generator=g) < 0.7).int().tolist()] for n in lengths]
    masks[6] = [0] * 6
    groups, rewards = [0, 1, 1, 2, 1, 1, 2, 2], torch.randn(8, generator=g).tolist()
    cfg = AlgoConfig(adv_estimator=name, rollout_is=rollout_is)
    batch = with_terms(masks)
    noisy = batch.with_(
        **{
            f: torch.where(batch.mask, getattr(batch, f), NAN)
            for f in ("old_log_probs", "rollout_log_probs", "log_sum_pi_squared")
        }
    )
    zeros = torch.zeros(len(batch.mask), dtype=torch.float64)
    reward = returns.token_rewards(batch, rewards, zeros)
    want = slow_above(batch, rewards, cfg, groups)
    for packed in (batch, noisy):
        found = above(packed, reward, cfg, groups)
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)


def test_weights_that_float32_rounds_below_0_count_as_0():
    """The sum of squares of the first response is less than p^2 by rounding, so that the weights of
    both would nearly cancel; B stays within the gains."""
    tiny = torch.full((4,), -1e-7)
    squares = torch.tensor([-6e-7, -2e-7, 1.95e-7, -2e-7])
    batch = batch_of([[1, 1], [1, 1]]).with_(
        old_log_probs=tiny, rollout_log_probs=tiny, log_sum_pi_squared=squares
    )
    reward = torch.tensor([0.0, 1.0, 0.0, 0.0])
    found = above(batch, reward, AlgoConfig(adv_estimator="optimal_token_baseline"), [0, 0])
    assert found.dtype == torch.float32 and (found[:2] <= 1).all() and (found[:2] >= 0).all()


@pytest.mark.parametrize("name", TOKEN_BASELINES)
def test_a_batch_without_trained_tokens_has_no_terms(name):
    for masks in ([], [[0, 0], [0]]):
        batch = with_terms(masks)
        reward = torch.zeros(batch.num_tokens)
        found = above(batch, reward, AlgoConfig(adv_estimator=name), [0] * len(masks))
        assert len(found) == batch.num_tokens and not found.any()
