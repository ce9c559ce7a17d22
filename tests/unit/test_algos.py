"""GRPO, TIS, KL, advantages and reductions: numbers worked by hand."""

import math

import pytest
import torch

from rlcore import algos
from rlcore.algos import advantage, grpo, kl, ratio, reduce
from rlcore.tensors import Batch, LossInputs, cumulative


def inputs(logp, old, adv, mask=None, correction=None, ref=None, entropy=None) -> LossInputs:
    n = len(logp)
    t = lambda v: torch.tensor(v, dtype=torch.float64)  # noqa: E731
    return LossInputs(
        logp=t(logp).requires_grad_(),
        entropy=t(entropy or [0.5] * n).requires_grad_(),
        mask=torch.tensor(mask or [True] * n),
        advantage=t(adv),
        logp_old=t(old),
        logp_sampler=t(old),
        correction=t(correction or [1.0] * n),
        logp_ref=None if ref is None else t(ref),
        sequence=torch.zeros(n, dtype=torch.int64),
        num_sequences=1,
        versions=torch.zeros(n, dtype=torch.int32),
    )


def test_at_ratio_one_the_loss_is_minus_the_advantage_and_its_gradient_too():
    x = inputs([-1.0, -2.0], [-1.0, -2.0], [2.0, -3.0])
    out = grpo.loss(x, grpo.GRPOConfig())
    assert out.per_token.tolist() == [-2.0, 3.0]
    out.per_token.sum().backward()
    assert x.logp.grad.tolist() == [-2.0, 3.0]


def test_the_clip_cuts_the_gradient_only_where_the_step_would_go_further():
    up, down = math.log(1.5), math.log(0.5)
    x = inputs([up, up, down, down], [0.0] * 4, [1.0, -1.0, 1.0, -1.0])
    out = grpo.loss(x, grpo.GRPOConfig(clip_low=0.2, clip_high=0.28))
    assert out.per_token.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8])
    assert out.metrics["actor/pg_clipfrac"].tolist() == [1, 0, 0, 1]
    out.per_token.sum().backward()
    assert x.logp.grad.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])


def test_the_correction_scales_loss_and_gradient():
    x = inputs([0.0, 0.0], [0.0, 0.0], [1.0, 1.0], correction=[0.5, 2.0])
    grpo.loss(x, grpo.GRPOConfig()).per_token.sum().backward()
    assert x.logp.grad.tolist() == [-0.5, -2.0]


def test_kl_and_entropy_enter_the_loss_with_their_coefficients():
    cfg = grpo.GRPOConfig(kl_coef=0.1, kl_type="k1", entropy_coef=0.01)
    x = inputs([-1.0], [-1.0], [0.0], ref=[-1.5], entropy=[2.0])
    out = grpo.loss(x, cfg)
    assert out.per_token.item() == pytest.approx(0.1 * 0.5 - 0.01 * 2.0)
    out.per_token.sum().backward()
    assert x.entropy.grad.item() == pytest.approx(-0.01)


@pytest.mark.parametrize(
    ("kind", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)]
)
def test_kl_estimators(kind, value):
    got = kl.estimate(kind, torch.tensor([-1.0]), torch.tensor([-1.5]))
    assert got.item() == pytest.approx(value)


def test_k3_keeps_its_digits_for_nearly_equal_log_probs():
    """exp(d) - 1 - d is d^2 / 2 for a small d; in float32 the plain form gives 0 or noise."""
    got = kl.estimate("k3", torch.tensor([-1.0]), torch.tensor([-1.0 + 2.0**-12]))
    assert got.item() == pytest.approx(2.0**-25, rel=1e-2)


def test_group_advantages_have_mean_zero_and_the_groups_spread_as_unit():
    got = advantage.grpo([1.0, 0.0, 0.0, 0.0])
    std = math.sqrt(3 * 0.25**2 / 3 + 0.75**2 / 3)
    assert got == pytest.approx([0.75 / std, *[-0.25 / std] * 3], rel=1e-5)
    assert advantage.grpo([1.0, 0.0], norm_by_std=False) == [0.5, -0.5]


def test_an_equal_group_and_a_group_of_one():
    assert advantage.grpo([0.3, 0.3, 0.3]) == pytest.approx([0.0] * 3)
    assert advantage.is_equal([0.3, 0.3]) and not advantage.is_equal([0.3, 0.4])
    assert advantage.grpo([0.7]) == pytest.approx([0.7])


def test_equal_log_probs_make_the_correction_exactly_one():
    logp = torch.tensor([-0.1, -7.3, -20.0])
    assert ratio.token_tis(logp, logp.clone(), 2.0).tolist() == [1.0, 1.0, 1.0]


def test_the_correction_is_capped_above_only_and_carries_no_gradient():
    old = torch.tensor([0.0, 0.0, 0.0], requires_grad=True)
    sampler = torch.log(torch.tensor([0.1, 2.0, 1.0]))
    w = ratio.token_tis(old, sampler, 2.0)
    assert w.tolist() == pytest.approx([2.0, 0.5, 1.0])
    assert not w.requires_grad
    assert ratio.token_tis(old, sampler, math.inf)[0].item() == pytest.approx(10.0)


def test_mismatch_metrics_by_hand():
    old = torch.log(torch.tensor([0.5, 0.2, 0.9]))
    mu = torch.log(torch.tensor([0.25, 0.4, 0.1]))
    mask = torch.tensor([True, True, False])
    w = ratio.token_tis(old, mu, 1.5)
    m = ratio.mismatch_metrics(ratio.mismatch_sums(old, mu, w, mask, 1.5))
    assert m["rollout_corr/rollout_is_mean"] == pytest.approx((1.5 + 0.5) / 2)
    assert m["rollout_corr/rollout_is_max"] == pytest.approx(1.5)
    assert m["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5
    assert m["rollout_corr/kl"] == pytest.approx((-math.log(2) + math.log(2)) / 2, abs=1e-6)
    assert m["training/rollout_probs_diff_max"] == pytest.approx(0.25)
    assert m["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0 / 1.25)


def batch() -> Batch:
    mask = torch.tensor([0, 1, 1, 1, 0, 1], dtype=torch.bool)
    return Batch(tokens=torch.arange(6), cu_seqlens=cumulative([4, 2]), mask=mask)


@pytest.mark.parametrize(
    ("mode", "weight", "count"),
    [
        ("token-mean", [1.0, 1.0], 4.0),
        ("seq-mean-token-sum", [1.0, 1.0], 2.0),
        ("seq-mean-token-mean", [1 / 3, 1.0], 2.0),
        ("seq-mean-token-sum-norm", [0.1, 0.1], 2.0),
    ],
)
def test_aggregation_weights_and_counts(mode, weight, count):
    w = reduce.weights(mode, batch(), max_tokens=10)
    assert [w[1].item(), w[5].item()] == pytest.approx(weight)
    assert reduce.count(mode, [3, 1]) == count


def test_unknown_algorithms_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="--algo foo: allowed are grpo"):
        algos.module("foo")
    with pytest.raises(ValueError, match="cannot import no_such_package"):
        algos.module("no_such_package.loss")
    with pytest.raises(ValueError, match="has no function loss"):
        algos.module("json.decoder")
