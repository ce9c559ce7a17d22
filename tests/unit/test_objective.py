"""The whole loss that the learner is given: correction, rejection, KL, entropy, aggregation."""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch

from rlcore import algos
from rlcore.algos.base import AlgoConfig
from rlcore.algos.objective import Objective
from rlcore.data.packing import pack_samples
from rlcore.records import Branch, Sample
from rlcore.tensors import LossInputs, LossOutput

T = 12


def inputs(gap: float = 0.0, ref_gap: float = 0.3) -> LossInputs:
    """Three sequences of four tokens, the first of each a prompt; the sampler is `gap` off."""
    g = torch.Generator().manual_seed(0)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(T, generator=g, dtype=torch.float64)

    logp = -1 + noise(0.2)
    old = logp + noise(0.1)
    sequence = torch.arange(T) // 4
    return LossInputs(
        log_probs=logp.clone().requires_grad_(),
        entropy=(1 + noise(0.1)).requires_grad_(),
        mask=torch.arange(T) % 4 > 0,
        score=(sequence % 2).double(),
        advantage=torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)[sequence],
        old_log_probs=old,
        rollout_log_probs=old + noise(gap) if gap else old.clone(),
        correction=torch.ones(T, dtype=torch.float64),
        ref_log_probs=logp + noise(ref_gap),
        sequence=sequence,
        num_sequences=3,
        versions=torch.zeros(T, dtype=torch.int32),
    )


def of(name: str, x: LossInputs, **settings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum of the loss over what is kept, its gradient, and the kept mask."""
    cfg = algos.config_class(name)(**settings)
    assert not cfg.problems()
    out = Objective(algos.module(name), cfg, max_tokens=10)(x)
    kept = x.mask & out.mask
    total = torch.where(kept, out.per_token, 0.0).sum()
    (gradient,) = torch.autograd.grad(total, x.log_probs)
    return total.detach(), gradient, kept


CORRECTIONS = [
    {"rollout_is": "token"},
    {"rollout_is": "sequence"},
    {"rollout_is": "geometric"},
    {"rollout_is": "token", "rollout_is_threshold": float("inf")},
    {"rollout_rs": ("token_k1", "seq_mean_k1", "seq_mean_k3")},
]


@pytest.mark.parametrize("name", [n for n in algos.NAMES if n != "gkd"])
@pytest.mark.parametrize("settings", CORRECTIONS)
def test_with_equal_log_probs_every_correction_is_exactly_nothing(name, settings):
    if name == "decoupled_ppo":
        settings = settings | {"rollout_is": "none"}
    want, found = of(name, inputs(), rollout_is="none"), of(name, inputs(), **settings)
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", [n for n in algos.NAMES if n not in ("decoupled_ppo", "gkd")])
def test_an_infinite_cap_is_vanilla_importance_sampling(name):
    """No weight is cut: the loss with the weights by hand, and no more than float64's rounding.
    decoupled_ppo weighs by p_old / p_sampler itself, and refuses a second weight."""
    x = inputs(gap=1.5)
    found = of(name, x, rollout_is_threshold=float("inf"))
    cfg = algos.config_class(name)(rollout_is="none")
    weighed = replace(x, correction=(x.old_log_probs - x.rollout_log_probs).exp())
    out = Objective(algos.module(name), cfg, max_tokens=10)(weighed)
    total = torch.where(x.mask, out.per_token, 0.0).sum()
    (gradient,) = torch.autograd.grad(total, x.log_probs)
    assert found[0] == pytest.approx(total.item(), rel=1e-12)
    assert torch.allclose(found[1], gradient, rtol=1e-12, atol=0)


def test_ppo_is_has_its_ratio_against_the_sampler_and_no_weight():
    x = inputs(gap=0.4)
    found = of("ppo", x, bypass_mode=True)
    want = of("ppo", replace(x, old_log_probs=x.rollout_log_probs), rollout_is="none")
    assert torch.equal(found[1], want[1])


def test_a_loss_without_a_ratio_is_weighed_by_this_very_pass_in_bypass_mode():
    x = inputs(gap=0.4)
    _, gradient, _ = of("reinforce", x, bypass_mode=True, rollout_is_threshold=float("inf"))
    w = (x.log_probs - x.rollout_log_probs).exp().detach()
    assert torch.allclose(gradient, torch.where(x.mask, -w * x.advantage, 0.0), rtol=1e-12)


def test_rejected_tokens_leave_loss_gradient_and_the_count_of_their_sequence():
    x = inputs()
    sampler = x.rollout_log_probs.clone()
    sampler[5] += 3.0  # one token of the second sequence
    x = replace(x, rollout_log_probs=sampler)
    _, gradient, kept = of(
        "grpo", x, rollout_is="none", rollout_rs=("token_k1",), loss_agg_mode="seq-mean-token-mean"
    )
    assert kept.tolist() == [bool(m) and t != 5 for t, m in enumerate(x.mask)]
    assert gradient[5] == 0
    plain = of("grpo", x, rollout_is="none", loss_agg_mode="seq-mean-token-mean")[1]
    assert torch.allclose(gradient[6:8], plain[6:8] * 3 / 2, rtol=1e-12)
    assert torch.equal(gradient[8:], plain[8:])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "low_var_kl", "k1+", "k3+"])
def test_a_reference_far_away_outside_the_mask_is_nothing(kind):
    x = inputs()
    far = x.ref_log_probs.clone()
    far[~x.mask] = 500.0
    settings = {"kl_coef": 0.1, "kl_type": kind}
    near, found = of("grpo", x, **settings), of("grpo", replace(x, ref_log_probs=far), **settings)
    assert torch.equal(found[0], near[0]) and torch.equal(found[1], near[1])


def test_kl_and_entropy_enter_with_their_coefficients():
    x = inputs()
    cfg = algos.config_class("grpo")(kl_coef=0.1, kl_type="k2", entropy_coef=0.01)
    plain = Objective(algos.module("grpo"), algos.config_class("grpo")(), max_tokens=10)(x)
    out = Objective(algos.module("grpo"), cfg, max_tokens=10, kl_scale=2.0)(x)
    kl = (x.ref_log_probs - x.log_probs).square() / 2
    want = plain.per_token + 0.2 * kl - 0.01 * x.entropy
    assert torch.allclose(out.per_token[x.mask], want[x.mask], rtol=1e-12)
    out.per_token[x.mask].sum().backward()
    assert torch.allclose(x.entropy.grad[x.mask], torch.tensor(-0.01, dtype=torch.float64))


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean"])
def test_the_off_policy_mask_drops_the_policy_loss_of_drifted_bad_responses_alone(agg):
    """log(p_sampler / p) has mean 0.4 in the responses 1 (A = -0.5) and 2 (A = 2), and 0 in 0."""
    x = inputs()
    gap = torch.tensor([0, 0, 0, 0, 9, 0.2, 0.4, 0.6, 9, 0.2, 0.4, 0.6], dtype=torch.float64)
    x = replace(x, rollout_log_probs=x.log_probs.detach() + gap)
    settings = {"rollout_is": "none", "loss_agg_mode": agg}
    plain = of("grpo", x, **settings)
    for threshold, masked in ((0.41, []), (0.39, [5, 6, 7])):
        _, gradient, kept = of("grpo", x, off_policy_mask_threshold=threshold, **settings)
        want = plain[1].clone()
        want[masked] = 0
        assert torch.equal(gradient, want) and plain[1][5:8].all()
        assert torch.equal(kept, x.mask), "masked tokens stay in the denominators"


def masked_share(x: LossInputs, threshold: float, **settings) -> list[float]:
    """The mask's metric at the trained tokens."""
    cfg = algos.config_class("grpo")(off_policy_mask_threshold=threshold, **settings)
    out = Objective(algos.module("grpo"), cfg, max_tokens=10)(x)
    found = out.metrics["rollout_corr/off_policy_masked_fraction"]
    return found[x.mask].tolist()


def test_the_off_policy_mask_takes_the_mean_over_all_trained_tokens_before_rejection():
    x = inputs()
    own = x.log_probs.detach()
    sampler, old = own.clone(), own.clone()
    sampler[5] += 3.0
    x = replace(x, rollout_log_probs=sampler, old_log_probs=old)
    rejects = {"rollout_rs": ("token_k1",)}
    assert not of("grpo", x, rollout_is="none", **rejects)[2][5], "token 5 is rejected"
    assert masked_share(x, 0.99, **rejects) == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert masked_share(x, 1.01, **rejects) == [0] * 9


def test_the_off_policy_mask_compares_the_sampler_with_the_policy_in_training():
    """An old policy far from both plays no part; a sampler below the policy is no drift."""
    x = inputs()
    own = x.log_probs.detach()
    assert masked_share(replace(x, rollout_log_probs=own, old_log_probs=own + 5), 0.1) == [0] * 9
    assert masked_share(replace(x, rollout_log_probs=own - 5, old_log_probs=own), 0.1) == [0] * 9


def test_the_off_policy_mask_is_of_each_token_where_advantages_are():
    x = inputs()
    signs = torch.tensor([-1, 1, -1, 0] * 3, dtype=torch.float64)
    x = replace(x, advantage=signs, rollout_log_probs=x.log_probs.detach() + 1)
    assert masked_share(x, 0.5) == [0, 1, 0] * 3


def test_the_off_policy_mask_sees_the_advantages_that_a_teacher_has_changed():
    x = inputs()
    x = replace(x, rollout_log_probs=x.log_probs.detach() + 1, advantage=torch.zeros_like(x.score))
    x = replace(x, teacher_log_probs=x.old_log_probs - 1)
    assert masked_share(x, 0.5, teacher_kl_coef=1.0) == [1] * 9


def test_a_masked_token_keeps_its_kl_and_its_entropy():
    x = replace(inputs(), rollout_log_probs=inputs().log_probs.detach() + 1)
    keys = {"kl_coef": 0.1, "entropy_coef": 0.01, "rollout_is": "none"}
    cfg = algos.config_class("grpo")(off_policy_mask_threshold=0.5, **keys)
    out = Objective(algos.module("grpo"), cfg, max_tokens=10)(x)
    d = x.ref_log_probs - x.log_probs
    want = 0.1 * (d.exp() - 1 - d) - 0.01 * x.entropy
    assert torch.allclose(out.per_token[5:8], want[5:8], rtol=1e-12)


def test_a_nan_is_not_masked_so_that_the_loss_shows_it():
    x = inputs()
    own = x.log_probs.detach().clone()
    own[5] = float("nan")
    found = Objective(
        algos.module("grpo"),
        algos.config_class("grpo")(off_policy_mask_threshold=0.5),
        max_tokens=10,
    )(replace(x, log_probs=own))
    assert found.per_token[5].isnan()


def outcomes(**settings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Value and gradient (by the logits) of the expected KL term under p_old, all outcomes
    enumerated; then those of KL(p || p_ref)."""
    g = torch.Generator().manual_seed(3)
    logits, old, ref = torch.randn(3, 7, generator=g, dtype=torch.float64)
    logits.requires_grad_()
    logp, old, ref = logits.log_softmax(0), old.log_softmax(0), ref.log_softmax(0)
    one = torch.ones(7, dtype=torch.float64)
    x = LossInputs(
        log_probs=logp,
        entropy=one,
        mask=torch.ones(7, dtype=torch.bool),
        score=one,
        advantage=0 * one,
        old_log_probs=old,
        rollout_log_probs=old,
        correction=one,
        ref_log_probs=ref,
        sequence=torch.arange(7),
        num_sequences=7,
        versions=torch.zeros(7, dtype=torch.int32),
    )
    cfg = algos.config_class("grpo")(kl_coef=1.0, **settings)
    out = Objective(algos.module("grpo"), cfg, max_tokens=10)(x)
    expected, exact = (old.exp() * out.per_token).sum(), (logp.exp() * (logp - ref)).sum()
    both = [torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (expected, exact)]
    return expected.detach(), both[0], exact.detach(), both[1]


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
def test_the_unbiased_kl_has_value_and_gradient_of_the_kl_on_samples_of_the_old_policy(kind):
    value, gradient, exact, slope = outcomes(kl_type=kind, kl_unbiased=True)
    torch.testing.assert_close(value, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-12)
    value, gradient, _, _ = outcomes(kl_type=kind)
    assert (value - exact).abs() > 0.01 and (gradient - slope).abs().max() > 0.01


def test_a_ratio_far_away_outside_the_mask_is_nothing_to_the_unbiased_kl():
    x = inputs()
    far = torch.where(x.mask, x.old_log_probs, -1e30)
    keys = {"kl_coef": 0.1, "kl_unbiased": True}
    near, found = of("grpo", x, **keys), of("grpo", replace(x, old_log_probs=far), **keys)
    assert torch.equal(found[0], near[0]) and torch.equal(found[1], near[1])


@pytest.mark.parametrize("kind", ["k2", "abs", "k1+", "k3+"])
def test_an_estimator_that_the_ratio_makes_wrong_is_refused(kind):
    cfg = algos.config_class("dapo")(kl_coef=0.1, kl_type=kind, kl_unbiased=True)
    [said] = cfg.problems()
    assert said.startswith(f"--algo.kl_type {kind}: multiplied by p / p_old")


@dataclass(frozen=True, kw_only=True)
class Dropping(AlgoConfig):
    drops_tokens: ClassVar[bool] = True


def dropping(x: LossInputs, cfg: AlgoConfig) -> LossOutput:
    return LossOutput(per_token=-x.log_probs, metrics={}, mask=x.advantage > 0)


def test_a_loss_that_drops_tokens_must_say_so():
    module = ModuleType("my_loss")
    module.loss = dropping
    assert Objective(module, Dropping(), max_tokens=10).rejects
    out = Objective(module, Dropping(), max_tokens=10)(inputs())
    assert out.mask.tolist() == (inputs().advantage > 0).tolist()
    with pytest.raises(ValueError, match="my_loss: .* drops_tokens = True"):
        Objective(module, AlgoConfig(), max_tokens=10)(inputs())


def test_entropy_has_a_gradient_only_for_those_who_use_it():
    @dataclass(frozen=True, kw_only=True)
    class Curious(AlgoConfig):
        uses_entropy: ClassVar[bool] = True

    assert Objective(ModuleType("m"), Curious(), max_tokens=1).needs_entropy_grad
    assert Objective(ModuleType("m"), AlgoConfig(entropy_coef=0.1), max_tokens=1).needs_entropy_grad
    assert not Objective(ModuleType("m"), AlgoConfig(), max_tokens=1).needs_entropy_grad


def episode() -> LossInputs:
    """An episode of two rows with an observed token. The learner's probabilities of the sampled
    tokens are 1.2, 1.5 and, in the second row, 0.55 and 3 times the sampler's."""
    row = {
        "prompt": np.array([1], np.int32),
        "tokens": np.array([2, 3, 4], np.int32),
        "logps": np.array([-1, 0, -2], np.float32),
        "versions": np.array([0, -1, 1], np.int32),
    }
    further = Branch(
        prompt=np.array([1, 2], np.int32),
        tokens=np.array([5, 6], np.int32),
        logps=np.array([-3, -1], np.float32),
        versions=np.array([1, 1], np.int32),
    )
    batch = pack_samples([Sample(id="t0.0", finish="stop", branches=(further,), **row)])
    assert batch.rollout_log_probs is not None and batch.versions is not None
    sampler = batch.rollout_log_probs.double()
    ratio = torch.tensor([1, 1.2, 7, 1.5, 1, 1, 0.55, 3], dtype=torch.float64)
    old, ones = sampler + ratio.log(), torch.ones(8, dtype=torch.float64)
    return LossInputs(
        log_probs=old.clone().requires_grad_(),
        entropy=ones.clone().requires_grad_(),
        mask=batch.mask,
        score=ones,
        advantage=-2 * ones,
        old_log_probs=old,
        rollout_log_probs=sampler,
        correction=ones,
        ref_log_probs=old,
        sequence=batch.sequence_index,
        num_sequences=batch.num_sequences,
        versions=batch.versions,
    )


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("token", [1.2, 1.5, 0.55, 2]),
        ("sequence", [1.8, 1.8, 1.65, 1.65]),
        ("geometric", [1.8**0.5, 1.8**0.5, 1.65**0.5, 1.65**0.5]),
    ],
)
def test_correction_weights_are_of_each_token_or_each_row_of_an_episode(kind, weights):
    _, plain, _ = of("grpo", episode(), rollout_is="none")
    _, found, kept = of("grpo", episode(), rollout_is=kind, rollout_is_threshold=2.0)
    assert kept.nonzero().flatten().tolist() == [1, 3, 6, 7]
    torch.testing.assert_close(
        found[kept] / plain[kept], torch.tensor(weights, dtype=torch.float64)
    )
    assert not found[~kept].any()


@pytest.mark.parametrize(("rule", "left"), [("token_k1", [1, 3, 6]), ("seq_sum_k1", [1, 3, 6, 7])])
def test_rejection_is_of_each_token_or_each_row_of_an_episode(rule, left):
    """Over the whole episode the product is 2.97, outside of the bounds."""
    _, _, kept = of("grpo", episode(), rollout_is="none", rollout_rs=(rule,))
    assert kept.nonzero().flatten().tolist() == left
