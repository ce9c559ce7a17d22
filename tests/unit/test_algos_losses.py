"""The policy losses: values worked by hand, gradients, and what must be the same between them.

Everything is float64. A test calls the loss as the learner does: tokens outside the mask are left
out by `torch.where`, aggregation weights multiply, one number comes out.

RLCORE_ALGO=my_pkg.my_loss puts a module of yours under the tests for every algorithm.
"""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore import algos
from rlcore.algos import dppo, ratio, reduce
from rlcore.tensors import LossInputs, LossOutput

F64 = torch.float64
OWN = os.environ.get("RLCORE_ALGO", "").split()
POLICY = [name for name in algos.NAMES if name != "gkd"]
"""Losses that use advantages; test_gkd.py tests gkd, which has none."""
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in (*POLICY, *OWN)],
    ("grpo", {"clip_dual": 0.0}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.15}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.15, "level": "sequence"}),
    ("cispo", {"unified_mask": True}),
    ("topr", {"level": "sequence", "positive_weight": 0.7, "negative_weight": 0.2}),
    ("decoupled_ppo", {"behave": "truncate", "behave_cap": 1.2, "clip_dual": 2.0}),
    ("decoupled_ppo", {"behave": "token_mask", "behave_cap": 1.2}),
    ("decoupled_ppo", {"behave": "none"}),
    ("dppo", {"divergence": "kl", "clip_low": 0.02, "clip_high": 0.02}),
    ("clip_cov", {"clip_cov_ratio": 0.5, "clip_cov_lb": 0.0}),
    ("kl_cov", {"kl_cov_ratio": 0.5}),
]
"""Every algorithm as it comes, and those of its options that take another path."""
every = pytest.mark.parametrize(("name", "keys"), VARIANTS)


def t(values: Any) -> Tensor:
    return torch.tensor(values, dtype=F64)


def inputs(
    log_ratio: list[float], advantage: list[float], lengths: list[int] | None = None, **given: Any
) -> LossInputs:
    """Tokens with these log(p / p_old), all in the mask, log p = -1; one sequence unless told."""
    n = len(log_ratio)
    logp = torch.full((n,), -1.0, dtype=F64)
    old = logp - t(log_ratio)
    x = LossInputs(
        log_probs=logp.requires_grad_(),
        entropy=torch.zeros(n, dtype=F64),
        mask=torch.ones(n, dtype=torch.bool),
        score=t(advantage),
        advantage=t(advantage),
        old_log_probs=old,
        rollout_log_probs=old,
        correction=torch.ones(n, dtype=F64),
        ref_log_probs=None,
        sequence=torch.repeat_interleave(torch.tensor(lengths or [n])),
        num_sequences=len(lengths or [n]),
        versions=torch.zeros(n, dtype=torch.int32),
    )
    return replace(x, **{k: torch.tensor(v, dtype=getattr(x, k).dtype) for k, v in given.items()})


def random_inputs(seed: int, lengths: list[int], spread: float = 0.4) -> LossInputs:
    """Ratios on both sides of every clip, holes in the mask, a sequence without any token left,
    sampler and correction apart; one advantage a sequence."""
    g = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(sum(lengths), generator=g, dtype=F64)

    rows = torch.repeat_interleave(torch.tensor(lengths))
    advantage = torch.randn(len(lengths), generator=g, dtype=F64)[rows]
    mask = torch.rand(sum(lengths), generator=g) < 0.8
    mask[rows == len(lengths) - 1] = len(lengths) == 1
    mask[0] = True
    old = -noise().abs() - 0.1
    return LossInputs(
        log_probs=(old + spread * noise()).requires_grad_(),
        entropy=noise().abs(),
        mask=mask,
        score=(advantage > 0).double() if seed % 2 else noise()[rows],
        advantage=advantage,
        old_log_probs=old,
        rollout_log_probs=old + spread * noise(),
        correction=(spread * noise()).exp().clamp(max=2.0),
        ref_log_probs=None,
        sequence=rows,
        num_sequences=len(lengths),
        versions=torch.zeros(sum(lengths), dtype=torch.int32),
    )


def run(name: str, x: LossInputs, **keys: Any) -> LossOutput:
    return algos.module(name).loss(x, algos.config_class(name)(**keys))


def total(out: LossOutput, x: LossInputs, mode: str) -> Tensor:
    """The loss as one number, before N."""
    weight = reduce.weights(mode, x.mask, x.sequence, x.num_sequences, 8).double()
    return torch.where(x.mask, out.per_token * weight, 0.0).sum()


def step(name: str, x: LossInputs, mode: str | None = None, **keys: Any) -> tuple[float, Tensor]:
    """Loss and gradient, aggregated as the algorithm's default says."""
    mode = mode or algos.config_class(name)(**keys).loss_agg_mode
    value = total(run(name, x, **keys), x, mode)
    [grad] = torch.autograd.grad(value, x.log_probs)
    return value.item(), grad


def check(
    name: str, x: LossInputs, loss: list[float], grad: list[float], metrics: dict[str, list], **keys
) -> None:
    """Per-token loss, gradient of its sum, metrics."""
    out = run(name, x, **keys)
    assert out.per_token.tolist() == pytest.approx(loss)
    [found] = torch.autograd.grad(out.per_token.sum(), x.log_probs)
    assert found.tolist() == pytest.approx(grad)
    for key, value in metrics.items():
        assert out.metrics[key].tolist() == pytest.approx(value), key


# ---- by hand. log p = -1; the gradient of a ratio r is r.

UP, DOWN, FAR = math.log(1.5), math.log(0.5), math.log(5.0)


@pytest.mark.parametrize("name", ["ppo", "grpo", "dapo", "dr_grpo"])
def test_the_clip_cuts_the_gradient_only_where_the_step_would_go_further(name):
    high = algos.config_class(name)().clip_high
    check(
        name,
        inputs([UP, UP, DOWN, DOWN], [1.0, -1.0, 1.0, -1.0]),
        loss=[-(1 + high), 1.5, -0.5, 0.8],
        grad=[0.0, 1.5, -0.5, 0.0],
        metrics={
            "actor/pg_clipfrac": [1, 0, 0, 1],
            "actor/pg_clipfrac_lower": [0, 0, 0, 0],
        },
    )


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo"])
def test_the_dual_clip_ends_the_pull_of_a_bad_token_at_three(name):
    check(
        name,
        inputs([FAR, math.log(2.5), FAR], [-2.0, -2.0, 2.0]),
        loss=[6.0, 5.0, -2 * (1 + algos.config_class(name)().clip_high)],
        grad=[0.0, 5.0, 0.0],
        metrics={
            "actor/pg_clipfrac": [0, 0, 1],
            "actor/pg_clipfrac_lower": [1, 0, 0],
        },
    )


@pytest.mark.parametrize("off", [0.0, math.inf])
def test_without_the_dual_clip_a_bad_token_pulls_by_its_ratio(off):
    x = inputs([FAR, 0.0], [-2.0, 0.0])
    check("ppo", x, loss=[10.0, 0.0], grad=[10.0, 0.0], metrics={}, clip_dual=off)
    assert "actor/pg_clipfrac_lower" not in run("ppo", x, clip_dual=off).metrics


def test_dapo_has_its_dual_clip_at_ten():
    x = inputs([FAR, math.log(12.0)], [-1.0, -1.0])
    check("dapo", x, loss=[5.0, 10.0], grad=[5.0, 0.0], metrics={})


@pytest.mark.parametrize("name", ["ppo", "sapo", "decoupled_ppo"])
def test_a_log_ratio_beyond_twenty_counts_as_twenty_and_has_no_gradient(name):
    keys = {"clip_dual": 0.0} if name != "sapo" else {}
    out = run(name, x := inputs([30.0, -30.0], [-1.0, 1.0]), **keys)
    same = run(name, inputs([20.0, -20.0], [-1.0, 1.0]), **keys)
    assert out.per_token.tolist() == same.per_token.tolist()
    assert torch.autograd.grad(out.per_token.sum(), x.log_probs)[0].tolist() == [0.0, 0.0]


def test_gspo_clips_the_sequences_ratio():
    """Log-ratios 0.2 and 0.4 make s = e^0.3, -0.2 and 0 make e^-0.1. The gradient of s by each of
    two log-probs is s / 2, and both tokens of a sequence have the same loss."""
    s, low = math.exp(0.3), math.exp(-0.1)
    x = inputs([0.2, 0.4, 0.2, 0.4, -0.2, 0.0], [1.0, 1.0, -1.0, -1.0, 1.0, 1.0], [2, 2, 2])
    for level in ("sequence", "token"):
        check(
            "gspo",
            x,
            loss=[-1.1, -1.1, s, s, -low, -low],
            grad=[0.0, 0.0, s, s, -low, -low],
            metrics={"actor/pg_clipfrac": [1, 1, 0, 0, 0, 0]},
            level=level,
            clip_low=0.1,
            clip_high=0.1,
        )


def test_gspo_token_gives_a_tokens_advantage_to_that_token_alone():
    x = inputs([0.0, 0.0], [1.0, 3.0])
    check("gspo", x, loss=[-1.0, -3.0], grad=[-1.0, -3.0], metrics={}, level="token")
    check("gspo", x, loss=[-1.0, -3.0], grad=[-2.0, -2.0], metrics={}, level="sequence")


def test_gspo_holds_the_log_of_the_ratio_below_ten():
    x = inputs([12.0], [-1.0])
    check("gspo", x, loss=[math.exp(10)], grad=[0.0], metrics={})


def test_gmpo_clips_every_log_ratio_before_the_mean():
    """A = 1: 0.9 is held at 0.4 and -0.6 stays; A = -2: 0.9 stays and -0.6 is held at -0.4."""
    good, bad = math.exp((0.4 - 0.6) / 2), 2 * math.exp((0.9 - 0.4) / 2)
    check(
        "gmpo",
        inputs([0.9, -0.6, 0.9, -0.6], [1.0, 1.0, -2.0, -2.0], [2, 2]),
        loss=[-good, -good, bad, bad],
        grad=[0.0, -good, bad, 0.0],
        metrics={"actor/pg_clipfrac": [1, 0, 0, 0], "actor/pg_clipfrac_lower": [0, 0, 0, 1]},
    )


def test_gmpo_takes_the_geometric_mean_of_the_correction_and_the_mean_of_the_advantage():
    x = inputs([0.0, 0.0], [1.0, 3.0], correction=[0.5, 2.0])
    check("gmpo", x, loss=[-2.0, -2.0], grad=[-2.0, -2.0], metrics={})
    x = inputs([0.0, 0.0], [1.0, 3.0], correction=[0.25, 1.0])
    check("gmpo", x, loss=[-1.0, -1.0], grad=[-1.0, -1.0], metrics={})


def test_cispo_sends_no_gradient_through_the_ratio():
    """log p = -1, so the loss is weight x A and the gradient -weight x A, clipped or not."""
    check(
        "cispo",
        inputs([UP, DOWN, math.log(1.1)], [1.0, 1.0, -1.0]),
        loss=[1.2, 0.8, -1.1],
        grad=[-1.2, -0.8, 1.1],
        metrics={"actor/pg_clipfrac": [1, 1, 0], "actor/pg_clipfrac_lower": [0, 1, 0]},
    )


def test_cispo_without_a_lower_bound():
    x = inputs([math.log(0.01)], [1.0])
    check("cispo", x, loss=[0.01], grad=[-0.01], metrics={}, clip_low=10.0)


def test_the_unified_mask_silences_what_ppos_clip_would():
    check(
        "cispo",
        inputs([UP, UP, DOWN, DOWN], [1.0, -1.0, 1.0, -1.0]),
        loss=[0.0, -1.2, 0.8, 0.0],
        grad=[0.0, 1.2, -0.8, 0.0],
        metrics={"algo/silenced": [1, 0, 0, 1]},
        unified_mask=True,
    )


def test_cispo_m1_bounds_the_weight_above_only():
    check(
        "cispo_m1",
        inputs([math.log(9.0), math.log(0.01), UP], [1.0, 1.0, -1.0]),
        loss=[5.0, 0.01, -1.5],
        grad=[-5.0, -0.01, 1.5],
        metrics={"actor/pg_clipfrac": [1, 0, 0]},
    )


def test_sapo_gates_by_a_sigmoid_that_is_steeper_for_bad_tokens():
    def s(tau: float) -> float:
        return 1 / (1 + math.exp(-tau * 0.5))

    pos, neg = s(1.0), s(1.05)
    check(
        "sapo",
        inputs([UP, UP, 0.0], [2.0, -2.0, 1.0]),
        loss=[-4 * pos * 2, 4 / 1.05 * neg * 2, -2.0],
        grad=[-4 * pos * (1 - pos) * 1.5 * 2, 4 * neg * (1 - neg) * 1.5 * 2, -1.0],
        metrics={"algo/gate": [4 * pos * (1 - pos), 4 * neg * (1 - neg), 1.0]},
    )


def test_topr_tapers_the_responses_that_scored_nothing():
    """Whether a response is good is its score's matter, not the sign of the advantage."""
    check(
        "topr",
        inputs([UP, UP, DOWN, DOWN], [1.0, -1.0, -1.0, 1.0], score=[1.0, 0.0, -1.0, 0.5]),
        loss=[1.0, -1.0, -0.5, 1.0],
        grad=[-1.0, 1.0, 0.5, -1.0],
        metrics={"actor/pg_clipfrac": [0, 1, 0, 0], "algo/positive": [1, 0, 0, 1]},
    )


def test_weighted_topr():
    x = inputs([DOWN, DOWN], [1.0, -1.0], score=[1.0, 0.0])
    keys = {"positive_weight": 0.7, "negative_weight": 0.2}
    check("topr", x, loss=[0.7, -0.1], grad=[-0.7, 0.1], metrics={}, **keys)


def test_topr_of_sequences_tapers_by_the_product():
    """0.5 x 0.5 = 1/4 on both tokens; 0.5 x 5 = 2.5 is held at 1."""
    x = inputs([DOWN, DOWN, DOWN, FAR], [-1.0] * 4, [2, 2])
    check(
        "topr",
        x,
        loss=[-0.25, -0.25, -1.0, -1.0],
        grad=[0.25, 0.25, 1.0, 1.0],
        metrics={"actor/pg_clipfrac": [0, 0, 1, 1]},
        level="sequence",
    )


@pytest.mark.parametrize(
    ("behave", "weight"),
    [("token_mask", [0.5, 4.0, 0.0]), ("truncate", [0.5, 4.0, 5.0]), ("none", [1.0, 1.0, 1.0])],
)
def test_decoupled_ppo_weighs_by_the_way_from_the_sampler(behave, weight):
    """p_prox / p_behave is 0.5, 4 and 8 with a cap of 5; the clip is around p_prox."""
    sampler = [-1 - UP - math.log(w) for w in (0.5, 4.0, 8.0)]
    out = {"algo/behave_over_cap": [0, 0, 1]}
    if behave != "none":
        out["algo/behave_weight"] = weight
    x = inputs([UP, UP, UP], [1.0, -1.0, -1.0], rollout_log_probs=sampler)
    check(
        "decoupled_ppo",
        x,
        loss=[-1.2 * weight[0], 1.5 * weight[1], 1.5 * weight[2]],
        grad=[0.0, 1.5 * weight[1], 1.5 * weight[2]],
        metrics=out,
        behave=behave,
    )
    assert run("decoupled_ppo", x, behave=behave).mask is None, "they stay in the denominator"


def test_tis_ratio01_holds_the_weight_between_zero_and_one():
    check(
        "tis_ratio01",
        inputs([UP, DOWN], [1.0, -1.0]),
        loss=[1.0, -0.5],
        grad=[-1.0, 0.5],
        metrics={"actor/pg_clipfrac": [1, 0], "actor/pg_clipfrac_lower": [0, 0]},
    )


def test_kimi15_pulls_back_by_the_squared_log_ratio():
    """A log p = -2 and 0.1 / 2 x 4 = 0.2; the pull's gradient is 0.1 x 2, also far away."""
    check(
        "kimi15",
        inputs([2.0, -30.0], [2.0, 0.0]),
        loss=[2.2, 45.0],
        grad=[-2.0 + 0.2, -3.0],
        metrics={"algo/pull": [0.2, 45.0]},
    )
    x = inputs([2.0], [2.0], correction=[0.5])
    check("kimi15", x, loss=[1.1], grad=[-0.9], metrics={})


def test_vespo_weighs_whole_responses_smoothly():
    """W is 1.5 x 0.5 = 3/4 twice; phi = W^2 e^(3/4) for A > 0 and W^3 e^(2/4) for A < 0."""
    good, bad = 0.75**2 * math.exp(0.75), 0.75**3 * math.exp(0.5)
    check(
        "vespo",
        inputs([UP, DOWN, UP, DOWN], [1.0, 1.0, -2.0, -2.0], [2, 2]),
        loss=[good, good, -2 * bad, -2 * bad],
        grad=[-good, -good, 2 * bad, 2 * bad],
        metrics={"algo/phi": [good, good, bad, bad]},
    )


def test_vespo_forgets_responses_far_off_and_holds_their_log_ratios_at_twenty():
    x = inputs([900.0, -900.0, -15.0, -15.0], [1.0, 1.0, 1.0, 1.0], [1, 1, 2])
    low = math.exp(0.1 * -20 + 3)
    check(
        "vespo",
        x,
        loss=[0.0, low, low, low],
        grad=[0.0, -low, -low, -low],
        metrics={},
        k_pos=0.1,
    )


def test_dppo_bounds_the_move_of_the_probability_not_the_ratio():
    """p is 1/2 and p_old 0.3, then 0.7: 0.2 away. A move of 0.2 in the wrong direction is free."""
    logs = [math.log(0.5 / 0.3)] * 2 + [math.log(0.5 / 0.7)] * 2
    x = replace(inputs(logs, [1.0, -1.0, 1.0, -1.0]), log_probs=t([math.log(0.5)] * 4))
    x = replace(x, old_log_probs=t([0.3, 0.3, 0.7, 0.7]).log())
    x.log_probs.requires_grad_()
    slopes = [-0.5 / 0.3, 0.5 / 0.3, -0.5 / 0.7, 0.5 / 0.7]
    for low, high, cut in ((0.19, 0.19, [1, 0, 0, 1]), (0.21, 0.19, [1, 0, 0, 0])):
        grad = [s * (1 - c) for s, c in zip(slopes, cut, strict=True)]
        check(
            "dppo",
            x,
            loss=[s * math.log(0.5) for s in grad],
            grad=grad,
            metrics={"actor/pg_clipfrac": cut},
            clip_low=low,
            clip_high=high,
        )


def test_dppo_by_kl_of_token_or_not():
    """KL((0.3, 0.7) || (0.5, 0.5)) = 0.0823, the same for 0.7."""
    x = inputs([0.0] * 4, [1.0, -1.0, 1.0, -1.0])
    x = replace(
        x,
        log_probs=t([math.log(0.5)] * 4),
        old_log_probs=t([0.3, 0.3, 0.7, 0.7]).log(),
    )
    far = 0.3 * math.log(0.3 / 0.5) + 0.7 * math.log(0.7 / 0.5)
    for bound, cut in ((far - 1e-4, [1, 0, 0, 1]), (far + 1e-4, [0, 0, 0, 0])):
        out = run("dppo", x, divergence="kl", clip_low=bound, clip_high=bound)
        assert out.metrics["actor/pg_clipfrac"].tolist() == cut
        assert (out.per_token == 0).tolist() == [bool(c) for c in cut]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dppo_by_kl_is_finite_where_rounding_makes_a_probability_one_or_more(dtype):
    """A token that became certain has risen by a large KL."""
    new, old = (torch.tensor(v, dtype=dtype) for v in ([0.0, 1e-7, 0.0], [-1.0, -1.0, 0.0]))
    found = dppo.divergence("kl", new, old)
    assert found.isfinite().all() and (found[:2] > 10).all() and found[2] == 0


def test_dppo_caps_the_weight_of_a_rare_token():
    x = inputs([0.0, 0.0], [-1.0, -1.0])
    x = replace(x, log_probs=t([-8.0, -8.0]).requires_grad_(), old_log_probs=t([-12.0, -9.0]))
    check(
        "dppo",
        x,
        loss=[20 * -8.0, math.e * -8.0],
        grad=[20.0, math.e],
        metrics={"actor/pg_clipfrac": [0, 0], "actor/pg_clipfrac_lower": [1, 0]},
    )


def test_the_covariance_is_that_of_advantage_and_log_prob_over_the_mask():
    """Means over the first three tokens: A 1, log p -2."""
    x = inputs([0.0] * 4, [0.0, 0.0, 3.0, 50.0], mask=[True, True, True, False])
    x = replace(x, log_probs=t([-3.0, -2.0, -1.0, -9.0]))
    assert ratio.covariance(x).tolist() == [1.0, 0.0, 2.0, -math.inf]


@pytest.mark.parametrize(
    ("share", "cut"), [(0.01, 1), (0.25, 1), (0.5, 2), (0.75, 3), (0.99, 3), (1.0, 3)]
)
def test_clip_cov_cuts_that_share_of_the_tokens_within_the_bounds(share, cut):
    """Covariances 12, 12, 12 and 108 of four tokens; the bounds are 11 and 13."""
    x = inputs([0.0] * 4, [1.0, 1.0, 1.0, 13.0])
    x = replace(x, log_probs=t([-2.0, -2.0, -2.0, 14.0]), old_log_probs=t([-2.0, -2.0, -2.0, 14.0]))
    assert ratio.covariance(x).tolist() == [12.0, 12.0, 12.0, 108.0]
    out = run("clip_cov", x, clip_cov_ratio=share, clip_cov_lb=11.0, clip_cov_ub=13.0)
    chosen = out.metrics["algo/cov_clipped"]
    assert chosen.sum() == cut and chosen[3] == 0
    assert torch.equal(out.per_token, torch.where(chosen > 0, 0.0, -x.advantage))
    assert out.mask is None, "they stay in the denominators"


def test_clip_cov_leaves_out_what_the_clip_has_cut():
    x = inputs([UP, 0.0, 0.0], [4.0, 1.0, 1.0])
    x = replace(x, log_probs=t([-1.0, -4.0, -4.0]), old_log_probs=t([-1.0 - UP, -4.0, -4.0]))
    assert ratio.covariance(x).tolist() == [4.0, 1.0, 1.0]
    keys = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.5}
    out = run("clip_cov", x, **keys)
    assert out.metrics["algo/cov_clipped"].tolist() == [0, 1, 1]
    assert out.metrics["actor/pg_clipfrac"].tolist() == [1, 0, 0]


def test_clip_cov_draws_at_random_and_the_same_again():
    """All 400 tokens may be cut and 100 are, at random: about 50 in each half, and the same ones in
    a second call."""
    n = 400
    x = inputs([0.0] * n, [1.0, -1.0] * (n // 2))
    logp = t([-1.0, -3.0] * (n // 2))
    x = replace(x, log_probs=logp, old_log_probs=logp)
    keys = {"clip_cov_ratio": 0.25, "clip_cov_lb": 0.5}
    cut = run("clip_cov", x, **keys).metrics["algo/cov_clipped"]
    assert cut.sum() == 100 and 30 < cut[: n // 2].sum() < 70
    assert torch.equal(run("clip_cov", x, **keys).metrics["algo/cov_clipped"], cut)
    other = replace(x, rollout_log_probs=logp - 0.01)
    others = run("clip_cov", other, **keys).metrics["algo/cov_clipped"]
    assert others.sum() == 100 and 10 < (cut * others).sum() < 40  # 25 by chance


def test_kl_cov_pulls_the_tokens_of_largest_covariance_back():
    """Covariances 1.5, 0, 0 and 2.5; the first and the last token are the largest two."""
    x = inputs([UP, UP, DOWN, DOWN], [1.0, 0.0, 0.0, -3.0])
    x = replace(x, log_probs=t([-1.0, -2.0, -2.0, -3.0]).requires_grad_())
    old = x.log_probs.detach() - t([UP, UP, DOWN, DOWN])
    x = replace(x, old_log_probs=old)
    assert ratio.covariance(x).tolist() == [1.5, 0.0, 0.0, 2.5]
    check(
        "kl_cov",
        x,
        loss=[-1.5, 0.0, 0.0, 1.5 + 0.1 * math.log(2)],
        grad=[-1.5, 0.0, 0.0, 1.5 - 0.1],
        metrics={"algo/cov_pulled": [0, 0, 0, 1]},
        ppo_kl_coef=0.1,
    )
    check(
        "kl_cov",
        x,
        loss=[-1.5 + UP, 0.0, 0.0, 1.5 + math.log(2)],
        grad=[-1.5 + 1, 0.0, 0.0, 1.5 - 1],
        metrics={"algo/cov_pulled": [1, 0, 0, 1]},
        kl_cov_ratio=0.5,
    )


@pytest.mark.parametrize("name", ["gpg", "reinforce"])
def test_the_plain_policy_gradient(name):
    x = inputs([UP, DOWN], [2.0, -3.0], correction=[1.0, 0.5])
    check(name, x, loss=[2.0, -1.5], grad=[-2.0, 1.5], metrics={})
    assert run(name, x).metrics == {}


# ---- for every algorithm


@every
def test_the_correction_weight_multiplies_the_loss(name, keys):
    x = random_inputs(3, [4, 3, 5, 2])
    [plain, half] = [
        run(name, replace(x, correction=torch.full_like(x.correction, c)), **keys).per_token
        for c in (1.0, 0.5)
    ]
    torch.testing.assert_close(half, plain / 2, rtol=1e-14, atol=0)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_that_goes_in_comes_out(name, keys, dtype):
    x = random_inputs(3, [4, 3])
    floats = [
        "log_probs",
        "entropy",
        "score",
        "advantage",
        "old_log_probs",
        "rollout_log_probs",
        "correction",
    ]
    out = run(name, replace(x, **{f: getattr(x, f).to(dtype) for f in floats}), **keys)
    assert out.per_token.dtype == dtype


@every
def test_a_loss_is_per_token_and_its_metrics_carry_no_gradient(name, keys):
    x = random_inputs(4, [4, 3, 2])
    out = run(name, x, **keys)
    assert out.per_token.shape == x.log_probs.shape
    for key, value in out.metrics.items():
        assert value.shape == x.log_probs.shape and not value.requires_grad, key
        assert key in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower") or key.startswith("algo/")


@every
def test_a_loss_changes_none_of_its_inputs(name, keys):
    x = random_inputs(5, [4, 3, 2])
    before = {f: getattr(x, f).clone() for f in x.__slots__ if isinstance(getattr(x, f), Tensor)}
    run(name, x, **keys)
    assert all(torch.equal(getattr(x, f), v) for f, v in before.items())


@every
def test_a_token_that_nobody_trains_gives_names_and_no_nan(name, keys):
    """What the learner asks on stages that have no logits."""
    x = inputs([0.0], [0.0], mask=[False])
    out = run(name, x, **keys)
    assert out.per_token.isfinite().all()
    assert out.metrics.keys() == run(name, random_inputs(1, [3, 2]), **keys).metrics.keys()


class Replayed:
    """`Tensor.detach` that remembers its results and gives them again, in the order of the calls.

    Stop-gradient terms are functions of log p that the gradient does not see, so a finite
    difference of the loss itself is not its gradient. While this is in place a loss computes, at
    any log p, with the constants of the first log p: the surrogate whose slope the gradient is.
    """

    def __init__(self) -> None:
        self._real, self._kept, self._next = Tensor.detach, [], None

    def __enter__(self) -> "Replayed":
        def detach(value: Tensor) -> Tensor:
            if self._next is None:
                self._kept.append(self._real(value).clone())
                return self._kept[-1]
            return next(self._next)

        Tensor.detach = detach
        return self

    def again(self) -> None:
        """From here on results are given again, from the first."""
        self._next = iter(self._kept)

    def __exit__(self, *_: object) -> None:
        Tensor.detach = self._real


def slopes(function: Callable[[Tensor], Tensor], at: Tensor, width: float = 1e-6) -> Tensor:
    """Central differences of `function`, its stop-gradient terms held at `at`."""
    out = torch.zeros_like(at)
    with Replayed() as constants, torch.no_grad():
        function(at)
        for i in range(at.numel()):
            sides = []
            for sign in (1, -1):
                moved = at.clone()
                moved[i] += sign * width
                constants.again()
                sides.append(function(moved))
            out[i] = (sides[0] - sides[1]) / (2 * width)
    return out


@every
@pytest.mark.parametrize("seed", [1, 3])
def test_the_gradient_is_the_slope_of_the_surrogate_with_its_constants_held(name, keys, seed):
    x = random_inputs(seed, [5, 3, 1, 4])
    mode = algos.config_class(name)().loss_agg_mode

    def loss(logp: Tensor) -> Tensor:
        moved = replace(x, log_probs=logp)
        return total(run(name, moved, **keys), moved, mode)

    _, grad = step(name, x, **keys)
    found = slopes(loss, x.log_probs.detach().clone())
    torch.testing.assert_close(found, grad, rtol=1e-7, atol=1e-8)
    assert grad.abs().sum() > 0


def test_the_slopes_do_hold_constants():
    """A stop-gradient that is forgotten is found by the values by hand, and by the slow references
    of test_algos_losses_reference.py; the check above is of everything else."""
    at = t([2.0, 3.0])
    assert slopes(lambda v: (v * v.detach()).sum(), at).tolist() == pytest.approx([2.0, 3.0])
    assert slopes(lambda v: (v * v).sum(), at).tolist() == pytest.approx([4.0, 6.0])


GARBAGE = st.sampled_from([0.0, 1.0, -1.0, 1e3, -1e3, 1e30, -1e30])


@every
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 999), data=st.data())
def test_tokens_outside_the_mask_change_nothing(name, keys, seed, data):
    """Not a bit of loss, gradient or metrics, whatever finite values they have."""
    x = random_inputs(seed, [4, 2, 3, 2])
    fields = [
        "log_probs",
        "entropy",
        "score",
        "advantage",
        "old_log_probs",
        "rollout_log_probs",
        "correction",
    ]
    n = x.log_probs.numel()
    changed = {}
    for f in fields:
        junk = t(data.draw(st.lists(GARBAGE, min_size=n, max_size=n), label=f))
        changed[f] = torch.where(x.mask, getattr(x, f).detach(), junk)
    changed["log_probs"].requires_grad_()
    y = replace(x, **changed)
    (loss, grad), (other, other_grad) = step(name, x, **keys), step(name, y, **keys)
    assert other == loss
    assert torch.equal(other_grad, grad)
    assert (grad[~x.mask] == 0).all()
    want, got = run(name, x, **keys).metrics, run(name, y, **keys).metrics
    for key in want:
        assert torch.equal(got[key][x.mask], want[key][x.mask]), key


@pytest.mark.parametrize("name", [name for name in POLICY if name != "clip_cov"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999))
def test_at_ratio_one_the_gradient_is_that_of_reinforce(name, seed):
    """-A times the token's share in the aggregation, for every algorithm as it comes. clip_cov cuts
    tokens at any ratio."""
    x = random_inputs(seed, [4, 2, 3, 2])
    own = x.log_probs.detach()
    x = replace(x, old_log_probs=own, rollout_log_probs=own, correction=torch.ones_like(own))
    mode = algos.config_class(name)().loss_agg_mode
    weight = reduce.weights(mode, x.mask, x.sequence, x.num_sequences, 8).double()
    _, grad = step(name, x)
    torch.testing.assert_close(grad, torch.where(x.mask, -x.advantage * weight, 0.0))


# ---- identities


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), length=st.integers(1, 6), count=st.integers(1, 5))
def test_dapo_with_equal_clips_and_lengths_is_grpo_as_published(seed, length, count):
    """GRPO averages over a response first, DAPO over all tokens: with N both are one number."""
    x = random_inputs(seed, [length] * count)
    x = replace(x, mask=torch.ones_like(x.mask))
    clips = {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": 3.0}
    dapo, grad = step("dapo", x, "token-mean", **clips)
    tokens = length * count
    for name in ("grpo", "ppo", "dr_grpo"):
        loss, other = step(name, x, "seq-mean-token-mean", **clips)
        assert loss / count == pytest.approx(dapo / tokens, abs=1e-7)  # 1 / |o_i| is float32
        torch.testing.assert_close(other / count, grad / tokens, rtol=1e-6, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), clip=st.sampled_from([3e-4, 0.05, 0.3]))
def test_both_levels_of_gspo_are_one_where_a_sequence_has_one_advantage(seed, clip):
    x = random_inputs(seed, [4, 1, 3, 2])
    x = replace(x, correction=torch.ones_like(x.correction))
    both = [step("gspo", x, level=v, clip_low=clip, clip_high=clip) for v in ("token", "sequence")]
    assert both[0][0] == pytest.approx(both[1][0], rel=1e-14)
    torch.testing.assert_close(both[0][1], both[1][1], rtol=1e-12, atol=1e-15)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999))
def test_luspo_is_gspo_with_every_response_times_its_length(seed):
    x = random_inputs(seed, [4, 1, 3, 2])
    keys = {"level": "sequence", "clip_low": 2e-3, "clip_high": 2.5e-3}
    length = torch.zeros(4).double().index_add(0, x.sequence, x.mask.double())[x.sequence]
    longer = replace(x, correction=x.correction * length)
    gspo = step("gspo", longer, "seq-mean-token-mean", **keys)
    luspo = step("gspo", x, "seq-mean-token-sum", **keys)
    assert luspo[0] == pytest.approx(gspo[0], rel=1e-5)  # 1 / |o_i| is float32
    torch.testing.assert_close(luspo[1], gspo[1], rtol=1e-6, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999))
def test_sequence_ratios_of_single_tokens_are_token_ratios(seed):
    x = random_inputs(seed, [1] * 6)
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    for level in ("token", "sequence"):
        gspo = run("gspo", x, level=level, **clips).per_token[x.mask]
        torch.testing.assert_close(gspo, run("ppo", x, clip_dual=0, **clips).per_token[x.mask])
    topr = [run("topr", x, level=v).per_token[x.mask] for v in ("token", "sequence")]
    torch.testing.assert_close(*topr)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), cap=st.sampled_from([1.0, 1.3, 5.0, math.inf]))
def test_decoupled_ppo_truncated_is_ppo_with_that_correction(seed, cap):
    """verl's way to write it: rollout_is token with this threshold."""
    x = random_inputs(seed, [4, 3, 2])
    weight = (x.old_log_probs - x.rollout_log_probs).exp().clamp(max=cap)
    one = torch.ones_like(weight)
    ours = run("decoupled_ppo", replace(x, correction=one), behave="truncate", behave_cap=cap)
    ppo = run("ppo", replace(x, correction=weight), clip_dual=0)
    torch.testing.assert_close(ours.per_token, ppo.per_token)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999))
def test_both_cispos_are_one_under_a_bound_that_both_have(seed):
    x = random_inputs(seed, [4, 3, 2])
    m1 = run("cispo_m1", x, clip_max=1.25).per_token
    torch.testing.assert_close(run("cispo", x, clip_low=1.0, clip_high=0.25).per_token, m1)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999))
def test_topr_of_responses_that_all_failed_is_tis_ratio01(seed):
    x = random_inputs(seed, [4, 3, 2])
    x = replace(x, score=torch.zeros_like(x.score))
    torch.testing.assert_close(run("topr", x).per_token, run("tis_ratio01", x).per_token)
