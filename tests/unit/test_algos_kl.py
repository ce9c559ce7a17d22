"""KL estimators, the controller of their weight, and the critic's loss."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.algos import kl, value
from rlcore.algos.base import KL
from rlcore.tensors import ValueInputs

NAN, INF = math.nan, math.inf
KINDS = get_args(KL)
examples = settings(max_examples=50, deadline=None)


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slope(kind: str, logp: Tensor, ref: Tensor) -> Tensor:
    logp = logp.clone().requires_grad_()
    kl.estimate(kind, logp, ref).sum().backward()
    return logp.grad


# estimators


@pytest.mark.parametrize(
    "kind, want",
    [
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 0.5 - 1 + math.log(2)),
        ("abs", math.log(2)),
        ("low_var_kl", 0.5 - 1 + math.log(2)),
        ("k1+", math.log(2)),
        ("k3+", 0.5 - 1 + math.log(2)),
    ],
)
def test_a_reference_half_as_likely_by_hand(kind, want):
    found = kl.estimate(kind, double(-1.0), double(-1.0 - math.log(2)))
    assert found.item() == pytest.approx(want, rel=1e-14) and found.dtype == torch.float64


def test_k1_is_negative_and_k3_is_not_where_the_reference_is_likelier():
    p, ref = double(-2.0), double(-1.0)
    assert kl.estimate("k1", p, ref).item() == -1
    assert kl.estimate("k3", p, ref).item() == pytest.approx(math.e - 2)
    assert kl.estimate("abs", p, ref).item() == 1


def test_k3_keeps_its_digits_for_nearly_equal_log_probs():
    """d = 2^-12: the difference would round to 0 in float32."""
    for kind in ("k3", "k3+", "low_var_kl"):
        got = kl.estimate(kind, torch.tensor([-1.0]), torch.tensor([-1.0 + 2.0**-12]))
        assert got.item() == pytest.approx(2.0**-25, rel=1e-3) and got.dtype == torch.float32


def test_low_var_kl_is_clamped_inside_and_outside_where_k3_is_not():
    p, ref = double(-30.0, -1.0, -5.0), double(-1.0, -30.0, -1.0)
    assert kl.estimate("low_var_kl", p, ref).tolist() == [10, 10, 10]
    assert kl.estimate("k3", p, ref).tolist() == pytest.approx(
        [math.exp(29) - 30, math.exp(-29) + 28, math.exp(4) - 5]
    )
    p, ref = double(-1000.0, -30.0, -5.0), double(-1.0, -1.0, -1.0)  # exp(999) is inf
    assert slope("low_var_kl", p, ref).tolist() == [0, 0, 0]


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="KL estimator k4: unknown; take k1, k2"):
        kl.estimate("k4", double(0.0), double(0.0))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "low_var_kl"])
def test_gradients_agree_with_finite_differences(kind):
    g = torch.Generator().manual_seed(0)
    logp, ref = torch.randn(2, 20, generator=g, dtype=torch.float64)
    h = 1e-6
    up, down = kl.estimate(kind, logp + h, ref), kl.estimate(kind, logp - h, ref)
    torch.testing.assert_close(slope(kind, logp, ref), (up - down) / (2 * h), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_plus_has_the_value_of_its_kind_and_the_gradient_of_k2(kind):
    logp, ref = torch.randn(2, 50, dtype=torch.float64)
    assert torch.equal(kl.estimate(kind + "+", logp, ref), kl.estimate(kind, logp, ref))
    assert torch.equal(slope(kind + "+", logp, ref), slope("k2", logp, ref))


def expectations(kind: str) -> tuple[Tensor, Tensor]:
    """Expected value and gradient (to the logits) of an estimator under p itself, tokens all
    enumerated."""
    g = torch.Generator().manual_seed(3)
    logits, ref = torch.randn(2, 7, generator=g, dtype=torch.float64)
    logits.requires_grad_()
    logp, ref = logits.log_softmax(0), ref.log_softmax(0)
    estimates = kl.estimate(kind, logp, ref)
    p = logp.exp().detach()
    (p * estimates).sum().backward()
    return (p * estimates).sum().detach(), logits.grad


def exact(forward: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    logits, ref = torch.randn(2, 7, generator=g, dtype=torch.float64)
    logits.requires_grad_()
    logp, ref = logits.log_softmax(0), ref.log_softmax(0)
    found = (logp.exp() * (logp - ref)) if forward else (ref.exp() * (ref - logp))
    found.sum().backward()
    return found.sum().detach(), logits.grad


@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_k1_and_k3_are_unbiased(kind):
    torch.testing.assert_close(expectations(kind)[0], exact(True)[0], rtol=1e-12, atol=1e-12)


def test_the_expected_gradients_are_those_that_the_table_says():
    near = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(expectations("k1")[1], torch.zeros(7).double(), **near)
    torch.testing.assert_close(expectations("k3")[1], exact(False)[1], **near)
    for kind in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(expectations(kind)[1], exact(True)[1], **near)


@examples
@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k2_k3_and_abs_are_never_negative_and_zero_for_equal_log_probs(p, ref):
    for kind in ("k2", "k3", "abs", "low_var_kl", "k3+"):
        assert kl.estimate(kind, double(p), double(ref)).item() >= 0
    for kind in KINDS:
        assert kl.estimate(kind, double(p), double(p)).item() == 0


# controller


def test_the_controller_answers_the_error_over_its_horizon():
    control = kl.AdaptiveController(0.1, 100)
    control.update(0.11, 50)  # 10 % too high, half a horizon
    assert control.scale == pytest.approx(1.05)
    control.update(0.09, 100)
    assert control.scale == pytest.approx(1.05 * 0.9)


def test_the_answer_is_limited_to_a_fifth():
    for found, want in ((9.0, 1.02), (0.0, 0.98), (-5.0, 0.98)):
        control = kl.AdaptiveController(0.1, 100)
        control.update(found, 10)
        assert control.scale == pytest.approx(want)


def test_more_samples_than_the_horizon_count_as_one_horizon():
    control = kl.AdaptiveController(0.1, 10)
    control.update(0.0, 10_000)
    assert control.scale == pytest.approx(0.8)


def test_without_a_target_the_factor_stays_one():
    control = kl.AdaptiveController(0.0, 10)
    control.update(5.0, 10)
    assert control.scale == 1


def test_a_kl_that_is_not_finite_changes_nothing():
    control = kl.AdaptiveController(0.1, 10)
    for bad in (NAN, INF):
        control.update(bad, 10)
    assert control.scale == 1


def test_a_restored_controller_goes_on_where_it_was():
    control = kl.AdaptiveController(0.1, 10)
    control.update(1.0, 5)
    again = kl.AdaptiveController(0.1, 10)
    again.restore(control.state())
    assert again.scale == control.scale == pytest.approx(1.1)


# the critic's loss


def critic(now: list[float], old: list[float], returns: list[float], mask=None) -> ValueInputs:
    n = len(now)
    return ValueInputs(
        value=double(*now).requires_grad_(),
        value_old=double(*old),
        returns=double(*returns),
        mask=torch.tensor(mask or [True] * n),
        sequence=torch.zeros(n, dtype=torch.int64),
        num_sequences=1,
    )


def test_a_value_within_the_clip_has_half_its_squared_error():
    x = critic([1.2], [1.0], [3.0])
    out = value.loss(x, 0.5)
    assert out.per_token.tolist() == pytest.approx([1.8**2 / 2])
    out.per_token.sum().backward()
    assert x.value.grad.tolist() == pytest.approx([-1.8])
    assert out.metrics["critic/vf_clipfrac"].tolist() == [0]


def test_a_move_beyond_the_clip_towards_the_return_has_no_gradient():
    """From 1 to 2 on the way to 3 with c = 1/2: the loss is that of 1.5."""
    x = critic([2.0], [1.0], [3.0])
    out = value.loss(x, 0.5)
    assert out.per_token.tolist() == [1.5**2 / 2]
    out.per_token.sum().backward()
    assert x.value.grad.tolist() == [0]
    assert out.metrics["critic/vf_clipfrac"].tolist() == [1]


def test_a_move_beyond_the_clip_away_from_the_return_is_pulled_back():
    x = critic([0.0], [1.0], [3.0])
    out = value.loss(x, 0.5)
    assert out.per_token.tolist() == [4.5]
    out.per_token.sum().backward()
    assert x.value.grad.tolist() == [-3]


def test_an_infinite_clip_is_the_squared_error():
    x = critic([2.0, -7.0], [1.0, 0.0], [3.0, 1.0])
    assert value.loss(x, INF).per_token.tolist() == [0.5, 32]


def test_metrics_are_per_token_and_detached():
    out = value.loss(critic([1.0, 2.0], [1.0, 2.0], [2.0, 2.0]), 0.2)
    assert {k: v.tolist() for k, v in out.metrics.items()} == {
        "critic/vf_loss": [0.5, 0],
        "critic/vf_clipfrac": [0, 0],
        "critic/vpred_mean": [1, 2],
    }
    assert not any(v.requires_grad for v in out.metrics.values()) and out.mask is None


def test_the_value_gradient_agrees_with_finite_differences():
    g = torch.Generator().manual_seed(0)
    now, old, returns = torch.randn(3, 200, generator=g, dtype=torch.float64).tolist()
    x = critic(now, old, returns)
    value.loss(x, 0.3).per_token.sum().backward()
    h = 1e-6
    up = value.loss(critic([v + h for v in now], old, returns), 0.3).per_token
    down = value.loss(critic([v - h for v in now], old, returns), 0.3).per_token
    torch.testing.assert_close(x.value.grad, ((up - down) / (2 * h)).detach(), rtol=1e-7, atol=1e-7)


@examples
@given(st.lists(st.tuples(*[st.floats(-9, 9)] * 3), min_size=1, max_size=20), st.floats(0, 3))
def test_the_value_loss_agrees_with_the_formula(rows, clip):
    now, old, returns = map(list, zip(*rows, strict=True))
    found = value.loss(critic(now, old, returns), clip).per_token.tolist()
    want = [max((v - r) ** 2, (min(max(v, o - clip), o + clip) - r) ** 2) / 2 for v, o, r in rows]
    assert found == pytest.approx(want, rel=1e-12, abs=1e-12)


def test_garbage_outside_the_mask_reaches_neither_loss_nor_gradient_nor_metrics():
    x = critic(
        [1.0, NAN, INF, 1.0], [1.0, 0.0, NAN, INF], [2.0, INF, 0.0, NAN], [True] + [False] * 3
    )
    out = value.loss(x, 0.2)
    out.per_token.sum().backward()
    assert out.per_token.tolist() == [0.5, 0, 0, 0]
    assert x.value.grad.tolist() == [-1, 0, 0, 0]
    assert [v.tolist()[1:] for v in out.metrics.values()] == [[0, 0, 0]] * 3


def test_an_all_masked_row_costs_nothing():
    x = critic([NAN, 2.0], [1.0, 1.0], [1.0, 1.0], [False, False])
    assert value.loss(x, 0.2).per_token.tolist() == [0, 0]


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_the_mean():
    returns, mask = double(1.0, 2.0, 3.0, NAN), torch.tensor([True, True, True, False])
    for guess, want in ((double(1.0, 2.0, 3.0, INF), 1.0), (double(2.0, 2.0, 2.0, INF), 0.0)):
        sums = value.variance_sums(guess, returns, mask)
        assert value.explained_variance(sums.tolist()) == pytest.approx(want, abs=2e-5)
    assert value.explained_variance([0.0] * 5) == 0
    assert value.explained_variance([1.0, 2.0, 4.0, 1.0, 1.0]) == 0


def test_explained_variance_agrees_with_the_variances_of_the_whole_from_two_shards():
    guess, returns = torch.randn(2, 60, dtype=torch.float64)
    mask = torch.arange(60) % 4 > 0
    shards = [slice(0, 25), slice(25, 60)]
    sums = sum(value.variance_sums(guess[s], returns[s], mask[s]) for s in shards)
    left, spread = (returns - guess)[mask].var(), returns[mask].var()
    want = 1 - left / (spread + 1e-5)
    assert value.explained_variance(sums.tolist()) == pytest.approx(want.item(), rel=1e-10)
