"""The loss's native ops on the CPU against torch in float64 and against the objective's own code,
and the host test of the kernels' bodies."""

import math
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rlcore.algos import correction, ppo
from rlcore.algos.objective import Objective
from rlcore.ops import native
from rlcore.tensors import LossInputs
from tests.native import host

ROOT = Path(__file__).resolve().parents[2]
OPS: Any = native.torch_ops("loss kernels") if not native._library() else None

needs_build = pytest.mark.skipif(OPS is None, reason="no native build (no compiler at set-up)")
pytestmark = pytest.mark.native

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
KL_TYPES = ("none", "k1", "k2", "k3", "abs", "low_var_kl", "k1+", "k3+")
# Rows of policy_tokens' output: csrc/loss/policy.h.
LOSS, GRAD_LOGP, GRAD_ENTROPY, RATIO, IS_WEIGHT, CLIPPED, DUAL_CLIPPED, KL, POLICY, KEPT = range(10)


class Rows(NamedTuple):
    logits: Tensor  # [T, W]
    tokens: Tensor  # [T]
    valid: int
    temperature: float


def statistic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def limit(dtype: torch.dtype) -> float:
    """Error of log-prob and entropy, relative to the larger of 1 and the value."""
    return 1e-12 if dtype is torch.float64 else 2e-6


def random_rows(
    dtype: torch.dtype, rows: int = 9, width: int = 1003, valid: int = 1000, spread: float = 4.0
) -> Rows:
    g = torch.Generator().manual_seed(rows * width + valid)
    logits = (torch.randn(rows, width, generator=g, dtype=torch.float64) * spread).to(dtype)
    tokens = torch.randint(0, max(valid, 1), (rows,), generator=g)
    return Rows(logits, tokens, valid, 0.8)


def stats(x: Rows, first: int = 0) -> Tensor:
    out = torch.full((4, len(x.tokens)), math.nan, dtype=statistic(x.logits.dtype))
    OPS.row_stats(x.logits, x.tokens, first, x.valid, x.temperature, out, 0)
    return out


def log_prob_and_entropy(s: Tensor) -> tuple[Tensor, Tensor]:
    _, total, dot, target = s
    return target - total.log(), total.log() - dot / total


def reference(x: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """[T, valid] log p, [T] log-prob and entropy, in float64."""
    logp = torch.log_softmax(x.logits.double()[:, : x.valid] / x.temperature, -1)
    entropy = -torch.special.xlogy(logp.exp(), logp.exp()).sum(-1)
    return logp, logp.gather(1, x.tokens[:, None])[:, 0], entropy


def grad(x: Rows, g: Tensor | None, h: Tensor | None, out: Tensor) -> Tensor:
    s = stats(x)
    lse, entropy = torch.stack([s[0], s[1].log()]), log_prob_and_entropy(s)[1]
    OPS.row_grad(x.logits, x.tokens, 0, x.valid, x.temperature, lse, entropy, g, h, out, 0)
    return out


def assert_near(found: Tensor, expected: Tensor, error: float) -> None:
    apart = (found.double() - expected.double()).abs() / expected.double().abs().clamp(min=1)
    assert apart.max() <= error, f"{apart.max():.1e} > {error:.1e}"


@needs_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width, valid", [(1, 1), (5, 3), (64, 64), (1003, 1000), (20011, 20001)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_prob_and_entropy_are_those_of_float64(dtype, width, valid, temperature):
    x = random_rows(dtype, 5, width, valid)._replace(temperature=temperature)
    logp, entropy = log_prob_and_entropy(stats(x))
    _, expected_logp, expected_entropy = reference(x)
    assert_near(logp, expected_logp, limit(dtype))
    assert_near(entropy, expected_entropy, limit(dtype))


@needs_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mean", "temperature"), [(40.0, 0.6), (-1000.0, 0.7), (-1000.0, 1.0)])
def test_logits_far_from_zero_lose_nothing(dtype, mean, temperature):
    """An ulp of 1000 / 0.7 in float32 is 1.2e-4: nothing may be rounded by the size of x."""
    x = random_rows(dtype, 64, 1003, 1000)
    x = Rows((x.logits.double() + mean).to(dtype), x.tokens, x.valid, temperature)
    logp, entropy = log_prob_and_entropy(stats(x))
    every, expected_logp, expected_entropy = reference(x)
    assert_near(logp, expected_logp, limit(dtype) / 2)
    assert_near(entropy, expected_entropy, limit(dtype) / 2)
    ones = torch.ones(64, dtype=logp.dtype)
    found, expected = grad(x, ones, None, torch.empty_like(x.logits)), expected_grad(x, ones, 0)
    mine, unit = every.exp() / temperature, torch.finfo(dtype).eps / 2
    # Of log p in float32: 2e-6 of a probability.
    error = (1e-12 if dtype is torch.float64 else 2e-6) * (1 + every.abs() / 8) * mine
    apart = (found.double() - expected)[:, : x.valid].abs()
    rounding = unit * expected[:, : x.valid].abs() + torch.finfo(dtype).smallest_normal * unit
    assert (apart <= 1.01 * rounding + error).all()


@needs_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 12345, 39999])
def test_a_dominant_token_does_not_swallow_the_sum_of_the_others(dtype, place):
    x = random_rows(dtype, 16, 40000, 40000, spread=3.0)._replace(temperature=1.0)
    x.logits[:, place] = 16.0
    x.tokens[:8] = place
    for found, expected in zip(log_prob_and_entropy(stats(x)), reference(x)[1:], strict=True):
        assert_near(found, expected, limit(dtype) / 4)


@needs_build
def test_the_statistics_of_a_row_worked_by_hand():
    logits = torch.tensor([[0.0, math.log(2), math.log(5), 99.0]])  # the last one is padding
    out = stats(Rows(logits, torch.tensor([1]), 3, 1.0))
    sums = [math.log(5), 8 / 5, (math.log(1 / 5) + 2 * math.log(2 / 5)) / 5, math.log(2 / 5)]
    torch.testing.assert_close(out[:, 0], torch.tensor(sums))


@needs_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_combine_to_the_whole_vocabulary(dtype):
    x = random_rows(dtype, 6, 90, 77)
    parts = [
        stats(Rows(x.logits[:, a:b], x.tokens, min(max(77 - a, 0), b - a), x.temperature), first=a)
        for a, b in ((0, 40), (40, 77), (77, 90))
    ]
    top, total, dot, target = torch.stack(parts).double().unbind(1)
    most = top.amax(0)
    scale = (top - most).exp()
    gap = torch.where(top > -math.inf, top - most, 0.0)
    whole = torch.stack(
        [most, (total * scale).sum(0), ((dot + gap * total) * scale).sum(0), (target + gap).amax(0)]
    )
    for found, expected in zip(log_prob_and_entropy(whole), reference(x)[1:], strict=True):
        assert_near(found, expected, 1e-5 if dtype is not torch.float64 else 1e-12)
    assert (target > -math.inf).sum(0).eq(1).all()


@needs_build
def test_a_shard_of_padding_alone_counts_nothing():
    out = stats(random_rows(torch.float32, 3, 8, 0))
    assert out.tolist() == [[-math.inf] * 3, [0.0] * 3, [0.0] * 3, [-math.inf] * 3]


@needs_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minus_infinity_has_probability_zero_and_nan_spreads(dtype):
    x = random_rows(dtype, 4, 50, 50)
    x.logits[0, 0], x.logits[1, 7], x.logits[2, 49] = -math.inf, math.nan, math.inf
    x = x._replace(tokens=torch.full((4,), 20))
    logp, entropy = log_prob_and_entropy(stats(x))
    ones = torch.ones(4, dtype=logp.dtype)
    out = grad(x, ones, ones, torch.empty_like(x.logits))
    for values in (logp, entropy, out.sum(1)):
        assert values.isnan().tolist() == [False, True, True, False]
    assert out[0, 0] == 0 and out[1:3].isnan().all()


def expected_grad(x: Rows, g: Tensor, h: Tensor | float) -> Tensor:
    leaf = x.logits.double().requires_grad_()
    _, logp, entropy = reference(x._replace(logits=leaf))
    h = torch.as_tensor(h, dtype=torch.float64)
    return torch.autograd.grad((logp * g.double() + entropy * h).sum(), leaf)[0]


@needs_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width, valid", [(1, 1), (5, 3), (64, 64), (1003, 1000)])
def test_gradients_are_those_of_autograd_in_float64(dtype, width, valid):
    x = random_rows(dtype, 6, width, valid)
    g, h = torch.randn(2, 6, dtype=statistic(dtype), generator=torch.Generator().manual_seed(1))
    found = grad(x, g, h, torch.empty_like(x.logits))
    expected = expected_grad(x, g, h)
    # Half an ulp of the result, and that of the terms by the rounding of x and of lse to float32.
    info = torch.finfo(dtype)
    ulps = 4 if dtype is torch.float64 else 0.51  # the reference rounds as well
    rounding = ulps * info.eps * (expected.abs() + info.smallest_normal)
    logp, _, entropy = reference(x)
    logp = logp.clamp(min=-100)
    terms = logp.exp() * (g.abs()[:, None] + h.abs()[:, None] * (1 + entropy[:, None] - logp)) / 0.8
    error = 1e-12 if dtype is torch.float64 else 1e-6 + 1.2e-7 * (40 - logp)
    apart = (found.double() - expected).abs()
    assert (apart[:, :valid] <= rounding[:, :valid] + error * terms).all()
    assert (found[:, valid:] == 0).all()


@needs_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_in_place_and_with_strides_have_the_same_bits(dtype):
    x = random_rows(dtype)
    g, h = torch.randn(2, 9, dtype=statistic(dtype), generator=torch.Generator().manual_seed(1))
    expected = grad(x, g, h, torch.empty_like(x.logits))
    wide = torch.full((9, 1010), 3.0, dtype=dtype)
    inner = wide[:, 1:1004]
    inner.copy_(x.logits)
    strided = x._replace(logits=inner)
    assert torch.equal(stats(strided), stats(x))
    assert torch.equal(grad(strided, g, h, torch.empty_like(x.logits)), expected)
    assert torch.equal(grad(strided, g, h, inner), expected)
    assert (wide[:, 0] == 3).all() and (wide[:, 1004:] == 3).all()


@needs_build
def test_a_row_without_gradient_is_zeroed_and_not_read():
    x = random_rows(torch.float32, 3)
    x.logits[1] = math.nan
    g = torch.tensor([1.0, 0.0, 1.0])
    out = grad(x, g, None, torch.empty_like(x.logits))
    assert (out[1] == 0).all() and (out[0] != 0).any() and not out.isnan().any()


class LogProbs(torch.autograd.Function):
    """What the ops are made for, as short as it can be."""

    @staticmethod
    def forward(ctx, logits, tokens):
        s = stats(Rows(logits, tokens, logits.size(1), 0.7))
        ctx.save_for_backward(logits, tokens)
        return log_prob_and_entropy(s)

    @staticmethod
    def backward(ctx, g, h):
        logits, tokens = ctx.saved_tensors
        x = Rows(logits, tokens, logits.size(1), 0.7)
        return grad(x, g.contiguous(), h.contiguous(), torch.empty_like(logits)), None


@needs_build
def test_gradcheck_in_float64():
    x = random_rows(torch.float64, 3, 7, 7)
    assert torch.autograd.gradcheck(LogProbs.apply, (x.logits.requires_grad_(), x.tokens))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@needs_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_depend_neither_on_the_run_nor_on_the_number_of_threads(dtype):
    x = random_rows(dtype, 40)
    ones = torch.ones(40, dtype=statistic(dtype))
    made = []
    for count in (1, 2, 2):
        with threads(count):
            made.append((stats(x), grad(x, ones, ones, torch.empty_like(x.logits))))
    for s, g in made[1:]:
        assert torch.equal(s, made[0][0]) and torch.equal(g, made[0][1])


@needs_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows_and_no_columns_are_legal(dtype):
    for rows, width in ((0, 5), (3, 0), (0, 0)):
        x = Rows(
            torch.empty(rows, width, dtype=dtype), torch.zeros(rows, dtype=torch.int64), 0, 1.0
        )
        assert stats(x)[1].tolist() == [0.0] * rows
        zeros = torch.zeros(rows, dtype=statistic(dtype))
        grad(x, zeros, None, torch.empty_like(x.logits))


def params(cfg: ppo.PPOConfig, *, mean: float = 1.0, kl_scale: float = 1.0, own: bool = False):
    """The settings of an objective in the order of csrc/loss/policy.h."""
    low, high = -math.inf, math.inf
    if cfg.rollout_rs:
        _, low, high = correction.thresholds(cfg)[0]
    mode = (cfg.rollout_is != "none") + 2 * bool(cfg.rollout_rs)
    kl_type = KL_TYPES.index(cfg.kl_type) if cfg.kl_coef else 0
    return [
        *(cfg.clip_low, cfg.clip_high, cfg.clip_dual),
        *(mode, cfg.rollout_is_threshold, low, high, mean),
        *(kl_type, cfg.kl_coef * kl_scale, cfg.entropy_coef, 20.0, float(own)),
    ]


def policy_inputs(count: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Tokens near and far from their old, sampler's and reference log-probs; some advantages 0."""
    g = torch.Generator().manual_seed(count)

    def noise(*scales: float) -> Tensor:
        spread = torch.tensor(scales, dtype=torch.float64).repeat(count // len(scales))
        return torch.randn(count, generator=g, dtype=torch.float64) * spread

    logp = -8 * torch.rand(count, generator=g, dtype=torch.float64)
    old = logp + noise(0, 0.1, 1, 15)
    made = {
        "logp": logp,
        "entropy": noise(1.0).abs(),
        "old_log_probs": old,
        "rollout_log_probs": old + noise(0, 3, 0.1, 1),
        "ref_log_probs": logp + noise(3.0),
        "advantage": noise(1, 1, 1, 0.0001),
        "weight": (torch.rand(count, generator=g) > 0.3).double(),
    }
    made["advantage"][::7] = 0
    return {name: value.to(dtype) for name, value in made.items()}


def policy_tokens(x: dict[str, Tensor], settings: list[float]) -> Tensor:
    out = torch.full((10, len(x["logp"])), math.nan, dtype=x["logp"].dtype)
    OPS.policy_tokens(*x.values(), settings, out, 0)
    return out


@needs_build
@pytest.mark.parametrize("kl_type", KL_TYPES)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_the_policy_of_a_token_is_the_objective_of_the_trainer(kl_type, entropy_coef):
    for dual, weigh, reject, own in product((0.0, 3.0), (0, 1), (0, 1), (False, True)):
        cfg = ppo.PPOConfig(
            adv_estimator="grpo",
            clip_high=0.28,
            clip_dual=dual,
            rollout_is="token" if weigh else "none",
            rollout_rs=("token_k1",) if reject else (),
            kl_coef=0.0 if kl_type == "none" else 0.1,
            kl_type="k3" if kl_type == "none" else kl_type,
            entropy_coef=entropy_coef,
        )
        mean = 1.1 if weigh else 1.0
        x = policy_inputs(400)
        logp, entropy = x["logp"].clone().requires_grad_(), x["entropy"].clone().requires_grad_()
        old = x["logp"] if own else x["old_log_probs"]
        mask = x["weight"] > 0
        objective = Objective(ppo, cfg, max_tokens=100, correction_mean=mean, kl_scale=1.5)
        expected = objective(
            LossInputs(
                log_probs=logp,
                entropy=entropy,
                mask=mask,
                score=x["advantage"],
                advantage=x["advantage"],
                old_log_probs=old,
                rollout_log_probs=x["rollout_log_probs"],
                correction=torch.ones_like(old),
                ref_log_probs=x["ref_log_probs"],
                sequence=torch.zeros(400, dtype=torch.int64),
                num_sequences=1,
                versions=torch.zeros(400, dtype=torch.int32),
            )
        )
        kept = mask & expected.mask
        torch.where(kept, expected.per_token, 0.0).sum().backward()
        if own:
            x["old_log_probs"] = torch.full_like(old, math.nan)  # must not be read
        out = policy_tokens(x, params(cfg, mean=mean, kl_scale=1.5, own=own))

        def same(row: int, value: Tensor | None, where: Tensor = kept, out: Tensor = out) -> None:
            value = torch.zeros_like(out[row]) if value is None else value.to(out.dtype)
            torch.testing.assert_close(
                out[row][where], value.detach()[where], rtol=1e-12, atol=1e-13
            )

        everywhere = torch.ones_like(mask)
        same(LOSS, expected.per_token)
        same(GRAD_LOGP, logp.grad, everywhere)
        same(GRAD_ENTROPY, entropy.grad, everywhere)
        same(CLIPPED, expected.metrics["actor/pg_clipfrac"])
        same(POLICY, expected.metrics["actor/pg_loss"], mask)
        same(KEPT, expected.mask, mask)
        if dual:
            same(DUAL_CLIPPED, expected.metrics["actor/pg_clipfrac_lower"])
        if cfg.kl_coef:
            same(KL, expected.metrics["actor/kl_loss"], mask)


@needs_build
def test_a_token_worked_by_hand():
    """p = 0.3, p_old = 0.2, p_sampler = 0.1: ratio 1.5 held at 1.28, weight 2 cut at 1.8."""
    names = (
        "logp",
        "entropy",
        "old_log_probs",
        "rollout_log_probs",
        "ref_log_probs",
        "advantage",
        "weight",
    )
    values = (math.log(0.3), 1.0, math.log(0.2), math.log(0.1), math.log(0.3), 2.0, 0.5)
    x = {n: torch.tensor([v], dtype=torch.float64) for n, v in zip(names, values, strict=True)}
    cfg = ppo.PPOConfig(clip_high=0.28, rollout_is_threshold=1.8, entropy_coef=0.1)
    out = policy_tokens(x, params(cfg))[:, 0]
    assert out[LOSS] == pytest.approx(-1.8 * 1.28 * 2 - 0.1)
    assert out[GRAD_LOGP] == 0 and out[GRAD_ENTROPY] == pytest.approx(-0.05)
    assert out[RATIO] == pytest.approx(1.5) and out[IS_WEIGHT] == pytest.approx(1.8)
    assert (out[CLIPPED], out[DUAL_CLIPPED], out[KEPT]) == (1, 0, 1)


@needs_build
def test_a_token_of_weight_zero_is_nothing_whatever_its_inputs():
    x = policy_inputs(4)
    x["weight"][:] = 0
    x["ref_log_probs"][0], x["rollout_log_probs"][1], x["advantage"][2] = (
        math.inf,
        math.nan,
        math.nan,
    )
    cfg = ppo.PPOConfig(kl_coef=0.1, entropy_coef=0.1)
    out = policy_tokens(x, params(cfg))
    for row in (LOSS, GRAD_LOGP, GRAD_ENTROPY, KL):
        assert (out[row] == 0).all()


@needs_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_whole_rows_give_what_the_single_ops_give(dtype, own):
    x = random_rows(dtype, 8)
    real = statistic(dtype)
    cfg = ppo.PPOConfig(kl_coef=0.1, entropy_coef=0.01, rollout_is_threshold=1.5)
    logp, entropy = log_prob_and_entropy(stats(x))
    tokens = policy_inputs(8, real)
    shift = logp - tokens["logp"]
    tokens["logp"], tokens["entropy"] = logp, entropy
    for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs"):
        tokens[name] = tokens[name] + shift
    tokens["weight"] = torch.tensor([1, 0.5, 0, 1, 0.25, 1, 1, 0], dtype=real)
    settings = params(cfg, own=own)
    out = policy_tokens(tokens, settings)
    expected = grad(
        x, out[GRAD_LOGP].contiguous(), out[GRAD_ENTROPY].contiguous(), x.logits.clone()
    )
    made, found = torch.empty(2, 8, dtype=real), torch.empty(10, 8, dtype=real)
    logits, rest = x.logits.clone(), [tokens[n] for n in list(tokens)[2:]]
    logits[2] = math.nan  # of weight 0: not read
    where = (x.tokens, 0, x.valid, x.temperature)
    OPS.policy_rows(logits, *where, *rest, settings, made, found, 0)
    trained = tokens["weight"] > 0
    assert_near(made[:, trained], torch.stack([logp, entropy])[:, trained], limit(dtype))
    assert (made[:, ~trained] == 0).all()
    error = 1e-12 if dtype is torch.float64 else 1e-5
    assert_near(found[:, trained], out[:, trained], error)
    eps = torch.finfo(dtype).eps
    close = dict(rtol=max(2 * eps, 100 * error), atol=2 * eps * 1e-3)
    torch.testing.assert_close(logits, expected, **close)
    assert (logits[~trained] == 0).all()


def call_stats(**changes: Any) -> None:
    x = random_rows(torch.float32, 3, 8, 8)
    given = dict(
        logits=x.logits,
        tokens=x.tokens,
        first=0,
        valid=8,
        temperature=1.0,
        out=torch.empty(4, 3),
        stream=0,
    )
    OPS.row_stats(*(given | changes).values())


@needs_build
@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"logits": torch.zeros(3, 8, dtype=torch.int32)}, "logits: dtype"),
        ({"logits": torch.zeros(8, 3).t()}, "logits: stride"),
        ({"logits": torch.zeros(24)}, "logits: 1 dimensions"),
        ({"tokens": torch.zeros(3)}, "tokens: dtype"),
        ({"tokens": torch.zeros(2, dtype=torch.int64)}, "tokens: one for each of the 3 rows"),
        ({"first": -1}, "first -1"),
        ({"valid": 9}, "valid 9"),
        ({"temperature": 0.0}, "temperature 0"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"out": torch.empty(4, 2)}, "out: 2 tokens"),
        ({"out": torch.empty(3, 3)}, "out: 3 rows"),
        ({"out": torch.empty(4, 3, dtype=torch.float64)}, "out: dtype"),
        ({"out": torch.empty(3, 4).t()}, "out: must be contiguous"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        call_stats(**changes)


def emptied(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    value = torch.zeros(*shape, dtype=dtype)
    value.untyped_storage().resize_(0)
    return value


@needs_build
@pytest.mark.parametrize(
    "changes",
    [
        {"logits": emptied(3, 8)},
        {"tokens": emptied(3, dtype=torch.int64)},
        {"out": emptied(4, 3)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_tensor_whose_storage_was_emptied_is_refused(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name}: its storage of 0 bytes"):
        call_stats(**changes)


@needs_build
def test_a_gradient_on_overlapping_memory_is_refused():
    ones, tokens = torch.ones(3), torch.zeros(3, dtype=torch.int64)
    lse, memory = torch.ones(2, 3), torch.zeros(100)

    def call(logits: Tensor, out: Tensor) -> None:
        OPS.row_grad(logits, tokens, 0, 8, 1.0, lse, ones, ones, None, out, 0)

    matrix = memory.as_strided((3, 8), (20, 1))
    for out in (
        matrix,
        memory.as_strided((3, 8), (20, 1), 8),
        memory.as_strided((3, 8), (20, 1), 12),
        memory.as_strided((3, 8), (8, 1), 70),
    ):
        call(matrix, out)
        call(out, matrix)
    for out in (
        memory.as_strided((3, 8), (16, 1)),
        memory.as_strided((3, 8), (20, 1), 7),
        memory.as_strided((3, 8), (20, 1), 13),
        memory.as_strided((3, 8), (8, 1), 8),
    ):
        with pytest.raises(ValueError, match="out: overlaps logits in part"):
            call(matrix, out)
        with pytest.raises(ValueError, match="out: overlaps logits in part"):
            call(out, matrix)
    for stride in (0, 7):
        call(memory.as_strided((3, 8), (stride, 1)), torch.empty(3, 8))  # reading is no matter
        with pytest.raises(ValueError, match=f"out: rows of 8 columns have stride {stride}"):
            call(torch.zeros(3, 8), memory.as_strided((3, 8), (stride, 1)))
    inputs = [torch.ones(3)] * 5
    rest = (params(ppo.PPOConfig()), torch.empty(2, 3), torch.empty(10, 3), 0)
    with pytest.raises(ValueError, match="logits: rows of 8 columns have stride 7 and overlap"):
        OPS.policy_rows(memory.as_strided((3, 8), (7, 1)), tokens, 0, 8, 1.0, *inputs, *rest)


@needs_build
def test_settings_that_make_no_sense_are_refused():
    x = policy_inputs(4)
    good = params(ppo.PPOConfig())
    for index, value, sentence in (
        (3, 4.0, "is_mode 4"),
        (8, 8.0, "kl_type 8"),
        (8, 0.5, "kl_type"),
    ):
        with pytest.raises(ValueError, match=sentence):
            policy_tokens(x, [*good[:index], value, *good[index + 1 :]])
    with pytest.raises(ValueError, match="params: 12 numbers"):
        policy_tokens(x, good[:-1])
    with pytest.raises(ValueError, match="kl_coef 0.1 needs ref_log_probs"):
        policy_tokens(x | {"ref_log_probs": None}, params(ppo.PPOConfig(kl_coef=0.1)))


@pytest.mark.parametrize(
    "flags",
    [
        # Not optimised: that would take three times as long to compile.
        pytest.param("-O0 -fsanitize=address,undefined -fno-sanitize-recover=all", id="sanitized"),
        pytest.param("-O2", id="optimised"),
    ],
)
@pytest.mark.slow
def test_the_host_test_of_the_kernels_bodies_passes(flags, tmp_path):
    sources = ["loss/row_host.cpp", "tests/loss_row_test.cpp"]
    said = host.run(host.build(tmp_path, sources, f"{flags} {host.STRICT}"))
    print(said)  # the instruction sets that this machine has not are "not run"
    assert "run: baseline" in said.splitlines()


BARRIERS = {"stats": 2, "grad": 2, "rows": 2 * 4}
"""Barriers of the block that each kernel's body passes; one block takes both rows of "rows"."""


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels' bodies on real threads, under ThreadSanitizer."""
    flags = f"-O1 -g -fsanitize=thread {host.STRICT}"
    program = host.build(tmp_path_factory.mktemp("races"), ["tests/loss_race_test.cpp"], flags)
    said = subprocess.run([program, "stats", "0"], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in said.stderr:
        pytest.skip("this kernel's vm.mmap_rnd_bits is too large for this compiler's sanitizer")
    return program


def test_no_barrier_is_missing_between_the_threads_of_a_kernel(races: Path) -> None:
    said = host.run(races)
    assert said.splitlines() == [f"{body} {count}" for body, count in BARRIERS.items()]


@pytest.mark.parametrize(
    "body, barrier", [(b, str(i + 1)) for b, count in BARRIERS.items() for i in range(count)]
)
def test_a_kernel_without_one_of_its_barriers_is_caught(races: Path, body: str, barrier: str):
    said = subprocess.run(
        [races, body, barrier],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
    )
    assert said.returncode == 66 and "ThreadSanitizer: data race" in said.stderr
