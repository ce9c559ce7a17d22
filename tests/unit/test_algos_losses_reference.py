"""The policy losses against slow references: the papers' formulas, one token after the other, with
their derivatives worked out by hand. No torch, no autograd.

A reference sees the trained tokens of one sequence and returns the loss of each, and the derivative
of sum_t u_t L_t by each log-prob. u is arbitrary, so every cross term of a sequence shows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rlcore import algos
from rlcore.tensors import LossInputs


@dataclass
class Sequence:
    """Trained tokens of one response; d = log(p / p_old)."""

    logp: list[float]
    d: list[float]
    behave: list[float]  # log(p_old / p_sampler)
    a: list[float]
    w: list[float]  # correction
    u: list[float]
    score: float


Found = tuple[list[float], list[float]]  # losses, derivatives


def by_token(s: Sequence, rule: Callable[[int], tuple[float, float]]) -> Found:
    """A loss whose tokens do not know each other: `rule` gives L_t and dL_t / dlogp_t before w."""
    pairs = [rule(i) for i in range(len(s.a))]
    losses = [loss * w for (loss, _), w in zip(pairs, s.w, strict=True)]
    slopes = [slope * w * u for (_, slope), w, u in zip(pairs, s.w, s.u, strict=True)]
    return losses, slopes


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def clip(r: float, a: float, low: float, high: float, dual: float) -> tuple[float, float]:
    """-min(r a, clip(r) a), below -dual a for a < 0; and its derivative by log r."""
    if a > 0 and r > 1 + high:
        return -(1 + high) * a, 0.0
    if a < 0 and r < 1 - low:
        return -(1 - low) * a, 0.0
    if a < 0 and dual and r > dual:
        return -dual * a, 0.0
    return -r * a, -r * a


def ppo(s: Sequence, low: float = 0.2, high: float = 0.2, dual: float = 3.0) -> Found:
    return by_token(s, lambda i: clip(math.exp(s.d[i]), s.a[i], low, high, dual))


def weighed(s: Sequence, weight: Callable[[int], float]) -> Found:
    """-sg(weight) a log p."""
    return by_token(s, lambda i: (-weight(i) * s.a[i] * s.logp[i], -weight(i) * s.a[i]))


def gspo(s: Sequence, low: float, high: float, level: str = "token") -> Found:
    ratio = math.exp(mean(s.d))
    pairs = [clip(ratio, a, low, high, 0) for a in s.a]
    losses = [loss * w for (loss, _), w in zip(pairs, s.w, strict=True)]
    own = [slope * w * u for (_, slope), w, u in zip(pairs, s.w, s.u, strict=True)]
    if level == "token":
        return losses, own
    return losses, [math.fsum(own) / len(own)] * len(own)


def gmpo(s: Sequence, low: float = 0.4, high: float = 0.4) -> Found:
    n = len(s.a)
    kept, flows = [], []
    for d, a in zip(s.d, s.a, strict=True):
        cut = d > high if a > 0 else d < -low
        kept.append((high if a > 0 else -low) if cut else d)
        flows.append(not cut)
    weight = math.prod(s.w) ** (1 / n)
    loss = -mean(s.a) * math.prod(math.exp(k) for k in kept) ** (1 / n) * weight
    return [loss] * n, [math.fsum(s.u) * loss / n if flow else 0.0 for flow in flows]


def cispo(s: Sequence, low: float = 0.2, high: float = 0.2, masked: bool = False) -> Found:
    def weight(i: int) -> float:
        r, a = math.exp(s.d[i]), s.a[i]
        if masked and ((a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)):
            return 0.0
        return min(max(r, 1 - low), 1 + high)

    return weighed(s, weight)


def sapo(s: Sequence, pos: float = 1.0, neg: float = 1.05) -> Found:
    def rule(i: int) -> tuple[float, float]:
        r, tau = math.exp(s.d[i]), pos if s.a[i] > 0 else neg
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return -4 / tau * gate * s.a[i], -4 * gate * (1 - gate) * r * s.a[i]

    return by_token(s, rule)


def topr(s: Sequence, pos: float = 1.0, neg: float = 1.0, whole: bool = False) -> Found:
    def weight(i: int) -> float:
        if s.score > 0:
            return pos
        return neg * min(math.prod(map(math.exp, s.d)) if whole else math.exp(s.d[i]), 1.0)

    return weighed(s, weight)


def decoupled(s: Sequence, above: Callable[[float], float]) -> Found:
    ratio = [math.exp(b) for b in s.behave]
    s.w = [w * above(r) for w, r in zip(s.w, ratio, strict=True)]
    return ppo(s, dual=0)


def kimi15(s: Sequence, tau: float = 0.1) -> Found:
    return by_token(
        s,
        lambda i: (
            -s.a[i] * s.logp[i] + tau / 2 * s.d[i] ** 2,
            -s.a[i] + tau * s.d[i],
        ),
    )


def vespo(s: Sequence, pos: tuple[float, float], neg: tuple[float, float]) -> Found:
    ratio = math.exp(min(max(math.fsum(s.d), -20.0), 20.0))

    def weight(i: int) -> float:
        k, decay = pos if s.a[i] >= 0 else neg
        return ratio**k * math.exp(decay * (1 - ratio))

    return weighed(s, weight)


def dppo(s: Sequence, kind: str, low: float, high: float, cap: float = 20.0) -> Found:
    def weight(i: int) -> float:
        new, old = math.exp(s.logp[i]), math.exp(s.logp[i] - s.d[i])
        size = abs(new - old)
        if kind == "kl":
            size = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
        if (s.a[i] > 0 and new > old and size > high) or (s.a[i] < 0 and new < old and size > low):
            return 0.0
        return min(math.exp(s.d[i]), cap)

    return weighed(s, weight)


CASES: dict[str, tuple[str, dict[str, Any], Callable[[Sequence], Found]]] = {
    "ppo": ("ppo", {}, ppo),
    "ppo, no dual": ("ppo", {"clip_dual": 0.0, "clip_low": 0.1}, lambda s: ppo(s, 0.1, 0.2, 0)),
    "grpo": ("grpo", {}, lambda s: ppo(s, high=0.28)),
    "dapo": ("dapo", {}, lambda s: ppo(s, high=0.28, dual=10)),
    "dr_grpo": ("dr_grpo", {}, ppo),
    "gspo": ("gspo", {}, lambda s: gspo(s, 3e-4, 4e-4)),
    "gspo, wide": (
        "gspo",
        {"clip_low": 0.2, "clip_high": 0.3},
        lambda s: gspo(s, 0.2, 0.3),
    ),
    "gspo, sequence": (
        "gspo",
        {"level": "sequence", "clip_low": 0.2, "clip_high": 0.3},
        lambda s: gspo(s, 0.2, 0.3, "sequence"),
    ),
    "gmpo": ("gmpo", {}, gmpo),
    "gmpo, uneven": ("gmpo", {"clip_low": 0.1, "clip_high": 0.3}, lambda s: gmpo(s, 0.1, 0.3)),
    "cispo": ("cispo", {}, cispo),
    "cispo, no lower bound": ("cispo", {"clip_low": 10.0}, lambda s: cispo(s, low=10.0)),
    "cispo, masked": ("cispo", {"unified_mask": True}, lambda s: cispo(s, masked=True)),
    "cispo_m1": ("cispo_m1", {}, lambda s: weighed(s, lambda i: min(math.exp(s.d[i]), 5.0))),
    "sapo": ("sapo", {}, sapo),
    "topr": ("topr", {}, topr),
    "topr, weighted": (
        "topr",
        {"positive_weight": 0.3, "negative_weight": 2.0},
        lambda s: topr(s, 0.3, 2.0),
    ),
    "topr, sequence": ("topr", {"level": "sequence"}, lambda s: topr(s, whole=True)),
    "decoupled_ppo": (
        "decoupled_ppo",
        {"behave_cap": 1.5},
        lambda s: decoupled(s, lambda r: 0.0 if r > 1.5 else r),
    ),
    "decoupled_ppo, truncate": (
        "decoupled_ppo",
        {"behave_cap": 1.5, "behave": "truncate"},
        lambda s: decoupled(s, lambda r: min(r, 1.5)),
    ),
    "decoupled_ppo, none": (
        "decoupled_ppo",
        {"behave": "none"},
        lambda s: decoupled(s, lambda r: 1.0),
    ),
    "tis_ratio01": ("tis_ratio01", {}, lambda s: weighed(s, lambda i: min(math.exp(s.d[i]), 1.0))),
    "kimi15": ("kimi15", {}, kimi15),
    "vespo": ("vespo", {}, lambda s: vespo(s, (2, 3), (3, 2))),
    "vespo, others": (
        "vespo",
        {"k_pos": 0.5, "lambda_pos": 1.0, "k_neg": 1.5, "lambda_neg": 0.2},
        lambda s: vespo(s, (0.5, 1.0), (1.5, 0.2)),
    ),
    "dppo": ("dppo", {}, lambda s: dppo(s, "tv", 0.15, 0.15)),
    "dppo, uneven": (
        "dppo",
        {"clip_low": 0.1, "clip_high": 0.3, "clip_max": 2.0},
        lambda s: dppo(s, "tv", 0.1, 0.3, 2.0),
    ),
    "dppo, kl": (
        "dppo",
        {"divergence": "kl", "clip_low": 0.05, "clip_high": 0.1},
        lambda s: dppo(s, "kl", 0.05, 0.1),
    ),
    "gpg": ("gpg", {}, lambda s: weighed(s, lambda i: 1.0)),
    "reinforce": ("reinforce", {}, lambda s: weighed(s, lambda i: 1.0)),
}


def batch(seed: int, per_token_advantage: bool) -> tuple[LossInputs, torch.Tensor]:
    """Five sequences of 1 to 9 tokens with holes in the mask, ratios from e^-3 to e^3; and u."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (5,), generator=g)
    rows = torch.repeat_interleave(lengths)

    def noise(n: int = len(rows)) -> torch.Tensor:
        return torch.randn(n, generator=g, dtype=torch.float64)

    old, advantage = -noise().abs(), noise(5)[rows]
    x = LossInputs(
        log_probs=(old + noise().clamp(-3, 3)).clamp(max=-1e-3).requires_grad_(),
        entropy=noise(),
        mask=torch.rand(len(rows), generator=g) < 0.7,
        score=noise(5)[rows],
        advantage=noise() if per_token_advantage else advantage,
        old_log_probs=old,
        rollout_log_probs=old + 0.5 * noise(),
        correction=noise().exp().clamp(max=2),
        ref_log_probs=None,
        sequence=rows,
        num_sequences=5,
        versions=torch.zeros(len(rows), dtype=torch.int32),
    )
    return x, noise()


def test_every_algorithm_has_a_reference():
    assert {name for name, _, _ in CASES.values()} == set(algos.NAMES) - {
        "opd",
        "gkd",  # test_gkd.py
        "clip_cov",
        "kl_cov",  # below
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("per_token_advantage", [False, True])
def test_loss_and_gradient_equal_the_slow_reference(case, per_token_advantage):
    name, keys, reference = CASES[case]
    seen = 0
    for seed in range(12):
        x, u = batch(seed, per_token_advantage)
        out = algos.module(name).loss(x, algos.config_class(name)(**keys))
        [grad] = torch.autograd.grad(torch.where(x.mask, out.per_token * u, 0.0).sum(), x.log_probs)
        for row in range(5):
            at = (x.mask & (x.sequence == row)).nonzero().flatten()
            if len(at) == 0:
                continue
            d, behave = (
                x.log_probs.detach() - x.old_log_probs,
                x.old_log_probs - x.rollout_log_probs,
            )
            columns = (x.log_probs.detach(), d, behave, x.advantage, x.correction, u)
            losses, slopes = reference(
                Sequence(*(c[at].tolist() for c in columns), score=x.score[at[0]].item())
            )
            assert out.per_token[at].tolist() == pytest.approx(losses, rel=1e-12, abs=1e-13)
            assert grad[at].tolist() == pytest.approx(slopes, rel=1e-12, abs=1e-13)
            seen += sum(s != 0 for s in slopes)
    assert seen > 20, "the gradient of hardly any token was compared"


@pytest.mark.parametrize("share", [1e-3, 0.3, 1.0])
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_losses_by_covariance_equal_the_slow_reference(name, share):
    """The reference ranks all tokens of the micro-batch. clip_cov chooses at random: its metric
    names the cut tokens, and the test checks their number and that each may be cut."""
    seen = 0
    for seed in range(12):
        x, u = batch(seed, per_token_advantage=seed % 2 == 0)
        at = x.mask.nonzero().flatten().tolist()
        columns = (x.log_probs.detach(), x.old_log_probs, x.advantage, x.correction, u)
        logp, old, a, w, u_t = (c[at].tolist() for c in columns)
        cov = [(a_t - mean(a)) * (p - mean(logp)) for a_t, p in zip(a, logp, strict=True)]
        count = max(1, int(share * len(at)))
        keys = {f"{name}_ratio": share}
        if name == "clip_cov":
            keys |= {"clip_cov_lb": 0.1, "clip_cov_ub": 0.9}
        out = algos.module(name).loss(x, algos.config_class(name)(**keys))
        [grad] = torch.autograd.grad(torch.where(x.mask, out.per_token * u, 0.0).sum(), x.log_probs)
        pairs = []
        if name == "clip_cov":
            cut = (out.metrics["algo/cov_clipped"][at] > 0).tolist()
            plain = [
                clip(math.exp(p - q), a_t, 0.2, 0.2, 0)
                for p, q, a_t in zip(logp, old, a, strict=True)
            ]
            allowed = [
                0.1 < c < 0.9 and (slope != 0 or a_t == 0)
                for c, (_, slope), a_t in zip(cov, plain, a, strict=True)
            ]
            assert sum(cut) == min(count, sum(allowed))
            assert all(ok for ok, chosen in zip(allowed, cut, strict=True) if chosen)
            pairs = [(0.0, 0.0) if c else p for c, p in zip(cut, plain, strict=True)]
        else:
            bound = sorted(cov)[-count]
            for p, q, a_t, c in zip(logp, old, a, cov, strict=True):
                r, sign = math.exp(p - q), math.copysign(1.0, p - q)
                pull = 1.0 if c >= bound else 0.0
                pairs.append((-r * a_t + pull * abs(p - q), -r * a_t + pull * sign))
        want = [loss * w_t for (loss, _), w_t in zip(pairs, w, strict=True)]
        slopes = [s * w_t * v for (_, s), w_t, v in zip(pairs, w, u_t, strict=True)]
        assert out.per_token[at].tolist() == pytest.approx(want, rel=1e-12, abs=1e-13)
        assert grad[at].tolist() == pytest.approx(slopes, rel=1e-12, abs=1e-13)
        seen += count
    assert seen >= 12
