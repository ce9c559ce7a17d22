"""Compute the clipped policy loss with rollout correction, KL and entropy, and its gradient.

For every row of logits, the op computes log-prob, entropy and loss of the row's token, and
overwrites the row with its gradient.

    log r  = logp - old_log_probs              clamped to +-log_limit, no gradient outside
    policy = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
    policy = min(policy, -clip_dual A)    where A < 0; clip_dual 0 or inf: off
    w      = min(p_old / p_sampler, is_threshold) / is_mean; 1 if is_threshold is None
    keep   = bounds[0] <= log(p_sampler / p_old) <= bounds[1]; true if bounds is None
    loss_t = keep (w policy + kl_coef KL - entropy_coef H)    w and keep have no gradient
    loss   = sum_t weight_t loss_t

A token of weight 0 is not trained on: its row is skipped, and its log-prob, entropy and loss are 0.
Other losses (per sequence, other algorithms) run in torch on `log_probs` from logprob.py.
`algos/objective.py` translates the run's settings; `csrc/loss/policy.h` is the native code.

If the vocabulary is not split, `policy_rows_` does all steps. If it is split, four steps follow:
row_stats, one all-gather of all ranks' statistics, `policy_tokens`, row_grad.

Own kernels instead of `torch.compile`: .202 s instead of 1.48 s. The logits are read once and
written once (`tools/results/bench_loss.json`).
"""

from math import isfinite
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.ops import logprob, native
from rlcore.tensors import PolicyInputs, PolicySpec

KL_TYPES = ("none", "k1", "k2", "k3", "abs", "low_var_kl", "k1+", "k3+")
"""KL estimators, in the order of csrc/loss/policy.h."""

PARAMS = (
    "clip_low",
    "clip_high",
    "clip_dual",
    "is_mode",
    "is_threshold",
    "is_low",
    "is_high",
    "is_mean",
    "kl_type",
    "kl_coef",
    "entropy_coef",
    "log_limit",
    "old_is_own",
)
"""Names of the settings that the native ops take as floats, in the order of csrc/loss/policy.h."""

ROWS = (
    "loss",
    "grad_logp",
    "grad_entropy",
    "ratio",
    "is_weight",
    "clipped",
    "dual_clipped",
    "kl",
    "policy_loss",
    "kept",
)
"""Names of the rows of the ops' output [len(ROWS), T], in order. The gradients include the token's
weight; the loss does not."""


class PolicyLoss(NamedTuple):
    loss: Tensor
    """Weighted sum of the tokens' losses, a scalar with a gradient."""
    logp: Tensor
    """Log-prob of each token, [T], detached; 0 for a token of weight 0."""
    entropy: Tensor
    """Entropy at each token, [T], detached; 0 for a token of weight 0."""
    tokens: Tensor
    """Outputs per token in the order of ROWS, [len(ROWS), T], detached."""


def policy_loss(
    logits: Tensor,
    tokens: Tensor,
    inputs: PolicyInputs,
    spec: PolicySpec,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    in_place: bool = False,
    unit_upstream: bool = False,
) -> PolicyLoss:
    """Compute the policy loss of packed tokens, and the logits' gradient in the same call.

    Args:
        logits: [T, V/tp], this rank's part of the vocabulary; padding comes last.
        tokens: [T] int64, ids in the whole vocabulary. An invalid id raises ValueError on the CPU
            and gives nan on a GPU.
        group: tensor-parallel group, None or of size 1 for unsplit logits.
        in_place: overwrite the logits with the gradient, in this call.
        unit_upstream: the caller runs backward on the loss itself, not on a multiple. Backward with
            in_place then checks this instead of scaling the gradient.

    Raises:
        ValueError: an argument is invalid.
        RuntimeError: in a second backward with `in_place`, or if the gradient was overwritten.
    """
    shard = logprob.check(logits, tokens, vocab_size, temperature, group, in_place)
    logprob.check_tokens(tokens, vocab_size)
    check_spec(spec, inputs)
    given, params = prepared(inputs, spec, logits.size(0), logits)
    # Ids on a GPU are not checked, and an invalid id must not be taken for another rank's token.
    given = guarded(given, tokens, vocab_size)
    wanted = torch.is_grad_enabled() and logits.requires_grad
    where = (*shard, temperature)
    loss, stats, out = _PolicyLoss.apply(
        logits, tokens, where, given, params, group, in_place, unit_upstream, wanted
    )
    return PolicyLoss(loss, stats[0], stats[1], out)


def check_spec(spec: PolicySpec, inputs: PolicyInputs) -> None:
    """Raise ValueError if a setting is invalid or a required input is None."""
    if spec.kl_type not in KL_TYPES:
        raise ValueError(f"kl_type {spec.kl_type}: unknown; take one of {', '.join(KL_TYPES)}")
    for name in ("clip_low", "clip_high"):
        value = getattr(spec, name)
        if not value >= 0:
            raise ValueError(f"{name} {value}: must be 0 or more; inf does not clip")
    if not (spec.clip_dual == 0 or spec.clip_dual > 1):
        raise ValueError(f"clip_dual {spec.clip_dual}: must be above 1; 0 turns it off")
    if spec.is_threshold is not None and not spec.is_threshold > 0:
        raise ValueError(
            f"is_threshold {spec.is_threshold}: must be above 0; None leaves the weight out"
        )
    if spec.bounds is not None and not spec.bounds[0] <= spec.bounds[1]:
        raise ValueError(f"bounds {spec.bounds}: must be a lower and an upper bound, or None")
    for name in ("is_mean", "log_limit"):
        value = getattr(spec, name)
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} {value}: must be a finite number above 0")
    for name in ("kl_coef", "entropy_coef"):
        value = getattr(spec, name)
        if not isfinite(value):
            raise ValueError(f"{name} {value}: must be a finite number")
    if spec.kl_coef and (spec.kl_type == "none" or inputs.ref_log_probs is None):
        raise ValueError(
            f"kl_coef {spec.kl_coef}: needs ref_log_probs and a kl_type; pass both or leave it at 0"
        )
    for name in ("advantage", "weight", "rollout_log_probs"):
        if getattr(inputs, name) is None:
            raise ValueError(f"{name} None: the loss needs it; pass a tensor [tokens]")


def settings(spec: PolicySpec, old_is_own: bool) -> list[float]:
    """Return the settings as floats in the order of PARAMS."""
    low, high = spec.bounds or (0.0, 0.0)
    mode = (spec.is_threshold is not None) + 2 * (spec.bounds is not None)
    cap = float("inf") if spec.is_threshold is None else spec.is_threshold
    kl = KL_TYPES.index(spec.kl_type)
    return [
        *(spec.clip_low, spec.clip_high, spec.clip_dual),
        *(float(mode), cap, low, high, spec.is_mean),
        *(float(kl), spec.kl_coef, spec.entropy_coef, spec.log_limit, float(old_is_own)),
    ]


Given = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]
"""Input tensors of the ops: old_log_probs, rollout_log_probs, ref_log_probs, advantage, weight."""


def prepared(
    inputs: PolicyInputs, spec: PolicySpec, rows: int, like: Tensor
) -> tuple[Given, list[float]]:
    """Return inputs and settings as the ops take them; `like` has the logits' dtype and device."""
    dtype = logprob.statistics_dtype(like.dtype)

    def row(name: str) -> Tensor:
        value = getattr(inputs, name)
        logprob.check_row(value, name, rows, like.device)
        if value.is_complex():
            raise ValueError(f"{name}: dtype {value.dtype}; must be real")
        return value.detach().to(dtype).contiguous()

    own = inputs.old_log_probs is None
    sampler = row("rollout_log_probs")
    old = sampler if own else row("old_log_probs")
    ref = row("ref_log_probs") if spec.kl_coef else None
    return (old, sampler, ref, row("advantage"), row("weight")), settings(spec, own)


def guarded(inputs: Given, tokens: Tensor, vocab_size: int) -> Given:
    """Set the advantage of out-of-range tokens to nan on a GPU, where such tokens raise no error
    and would be trained on silently."""
    if tokens.device.type == "cpu":
        return inputs
    old, sampler, ref, advantage, weight = inputs
    right = (tokens >= 0) & (tokens < vocab_size)
    return old, sampler, ref, torch.where(right, advantage, float("nan")), weight


def cut(inputs: Given, chunk: slice) -> Given:
    """Return the inputs of a chunk of tokens."""
    old, sampler, ref, advantage, weight = inputs
    ref = None if ref is None else ref[chunk]
    return old[chunk], sampler[chunk], ref, advantage[chunk], weight[chunk]


# ---- the ops


def policy_tokens(
    logp: Tensor,
    entropy: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    ref_log_probs: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    params: list[float],
) -> Tensor:
    """Compute the outputs [len(ROWS), T] from known log-probs and entropies."""
    args = (
        logp,
        entropy,
        old_log_probs,
        rollout_log_probs,
        ref_log_probs,
        advantage,
        weight,
        params,
    )
    ops = native.torch_ops("policy_loss", logp.device.type)
    if ops is None:
        return reference(*args)
    out = logp.new_empty(len(ROWS), logp.size(0))
    ops.policy_tokens(*args, out, native.stream(logp.device))
    return out


def policy_rows_(
    logits: Tensor,
    tokens: Tensor,
    first: int,
    valid: int,
    temperature: float,
    inputs: Given,
    params: list[float],
) -> tuple[Tensor, Tensor]:
    """Overwrite logits of the whole vocabulary with the gradient of the summed loss. Return
    log-probs and entropies [2, T], and the outputs [len(ROWS), T]."""
    where = (tokens.contiguous(), first, valid, temperature)
    ops = native.torch_ops("policy_loss", logits.device.type)
    if ops is None:
        return _by_steps(logits, *where, inputs, params, None, True)
    dtype = logprob.statistics_dtype(logits.dtype)
    stats = logits.new_empty((2, logits.size(0)), dtype=dtype)
    out = logits.new_empty((len(ROWS), logits.size(0)), dtype=dtype)
    ops.policy_rows(logits, *where, *inputs, params, stats, out, native.stream(logits.device))
    logprob.count_write(logits)
    return stats, out


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        where: tuple[int, int, float],
        inputs: Given,
        params: list[float],
        group: dist.ProcessGroup | None,
        in_place: bool,
        unit_upstream: bool,
        wanted: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad = logits.detach()
        if wanted and not in_place:
            grad = logprob.empty_like(logits).copy_(grad)
        stats, out = rows_(grad, tokens, *where, inputs, params, group, wanted)
        ctx.mark_non_differentiable(stats, out)
        ctx.grad, ctx.unit_upstream = grad if wanted else None, unit_upstream
        ctx.in_place, ctx.version = in_place, logprob.version(grad)
        return total(out, inputs[-1]), stats, out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple:
        grad = ctx.grad
        if grad is None:
            raise RuntimeError("policy_loss with in_place: a second backward; only one is possible")
        if logprob.version(grad) != ctx.version:
            raise RuntimeError(
                "policy_loss with in_place: the memory of the logits, which holds the gradient, "
                "was overwritten since the forward; do not write to the logits"
            )
        if not ctx.in_place:
            return (scaled_(grad.clone(), upstream, False), *(None,) * 8)
        ctx.grad = None
        return (scaled_(grad, upstream, ctx.unit_upstream), *(None,) * 8)


def scaled_(grad: Tensor, upstream: Tensor, unit: bool) -> Tensor:
    """Multiply `grad` by `upstream` in place. With `unit`, only assert that `upstream` is 1."""
    if unit:
        torch._assert_async(upstream == 1, "unit_upstream: the loss must not be multiplied")
        return grad
    if grad.dtype is upstream.dtype:
        return grad.mul_(upstream)
    # Multiply in `upstream`'s dtype, because a 16-bit dtype would round the factor, too.
    for block in logprob.blocks(grad):
        grad[block] = grad[block].to(upstream.dtype) * upstream
    return grad


def total(out: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted sum of the tokens' losses, a scalar."""
    return (out[0] * weight).sum()


def rows_(
    logits: Tensor,
    tokens: Tensor,
    first: int,
    valid: int,
    temperature: float,
    inputs: Given,
    params: list[float],
    group: dist.ProcessGroup | None,
    grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [2, T], and the outputs [len(ROWS), T]. If `grad`, overwrite
    the logits with their gradient. Collective over the group."""
    if grad and logprob._size(group) == 1:
        return policy_rows_(logits, tokens, first, valid, temperature, inputs, params)
    return _by_steps(logits, tokens, first, valid, temperature, inputs, params, group, grad)


def _by_steps(
    logits: Tensor,
    tokens: Tensor,
    first: int,
    valid: int,
    temperature: float,
    inputs: Given,
    params: list[float],
    group: dist.ProcessGroup | None,
    grad: bool,
) -> tuple[Tensor, Tensor]:
    where = (tokens, first, valid, temperature)
    found = logprob.row_stats(logits, *where)
    logp, entropy, lse, _ = logprob.combined(logprob.gathered(found, group))
    stats = torch.where(inputs[-1] != 0, torch.stack([logp, entropy]), 0.0)
    out = policy_tokens(stats[0], stats[1], *inputs, params)
    if grad:
        with_entropy = params[PARAMS.index("entropy_coef")] != 0
        h = out[ROWS.index("grad_entropy")] if with_entropy else None
        g = out[ROWS.index("grad_logp")]
        logprob.row_grad(logits, *where, lse, entropy, g, h, logits)
    return stats, out


# ---- reference in torch


def reference(
    logp: Tensor,
    entropy: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    ref_log_probs: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    params: list[float],
) -> Tensor:
    """Compute `policy_tokens` in torch."""
    p = dict(zip(PARAMS, params, strict=True))
    trained, limit, mode = weight != 0, p["log_limit"], int(p["is_mode"])
    old = logp if p["old_is_own"] else old_log_probs

    log_w = torch.where(trained, old - rollout_log_probs, 0.0).clamp(-limit, limit)
    w = torch.ones_like(logp)
    if mode & 1:
        w = log_w.exp().clamp(max=p["is_threshold"]) / p["is_mean"]
    kept = torch.ones_like(trained)
    if mode & 2:
        kept = ~((-log_w < p["is_low"]) | (-log_w > p["is_high"]))

    log_r = logp - old
    r = log_r.clamp(-limit, limit).exp()
    slope = torch.where(log_r.abs() > limit, 0.0, r)
    low, high = 1 - p["clip_low"], 1 + p["clip_high"]
    free, held = -r * advantage, -r.clamp(low, high) * advantage
    free_slope = -advantage * slope
    held_slope = torch.where((r < low) | (r > high), 0.0, free_slope)
    clipped = held > free
    policy = torch.maximum(free, held)
    # On a tie, torch.maximum gives each argument half of the gradient.
    mixed = torch.where(held == free, (free_slope + held_slope) / 2, free_slope)
    policy_slope = torch.where(clipped, held_slope, mixed)
    over = torch.zeros_like(clipped)
    if p["clip_dual"] > 0 and isfinite(p["clip_dual"]):
        ceiling = -p["clip_dual"] * advantage
        over = (advantage < 0) & (policy > ceiling)
        policy = torch.where(over, ceiling, policy)
        policy_slope = torch.where(over, 0.0, policy_slope)

    kl = kl_slope = torch.zeros_like(logp)
    if p["kl_coef"] != 0:
        assert ref_log_probs is not None
        d = torch.where(trained, ref_log_probs - logp, 0.0)
        kl, kl_slope = (torch.where(trained, x, 0.0) for x in _kl(KL_TYPES[int(p["kl_type"])], d))
    loss = policy * w + p["kl_coef"] * kl - p["entropy_coef"] * entropy
    counts = trained & kept
    grad_logp = (policy_slope * w + p["kl_coef"] * kl_slope) * weight
    rows = {
        "loss": torch.where(counts, loss, 0.0),
        "grad_logp": torch.where(counts, grad_logp, 0.0),
        "grad_entropy": torch.where(counts, -p["entropy_coef"] * weight, 0.0),
        "ratio": r,
        "is_weight": w,
        "clipped": clipped,
        "dual_clipped": over,
        "kl": kl,
        "policy_loss": policy * w,
        "kept": kept,
    }
    return torch.stack([rows[name].to(logp.dtype) for name in ROWS])


def _kl(kind: str, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return the KL estimate of estimator `kind` (rlcore/algos/kl.py) and its derivative with
    respect to logp; d = ref_log_probs - logp."""
    growth = d.expm1()
    if kind == "low_var_kl":
        held = d.clamp(-20, 20)
        k3 = held.expm1() - held
        cut = (d < -20) | (d > 20) | (k3 > 10)
        return k3.clamp(-10, 10), torch.where(cut, 0.0, -held.expm1())
    return {
        "k1": lambda: (-d, torch.ones_like(d)),
        "k2": lambda: (d.square() / 2, -d),
        "k3": lambda: (growth - d, -growth),
        "abs": lambda: (d.abs(), -d.sign()),
        "k1+": lambda: (-d, -d),
        "k3+": lambda: (growth - d, -d),
    }[kind]()
