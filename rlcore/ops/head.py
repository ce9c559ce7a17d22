"""Compute log-probs, entropies and the fused policy loss from hidden states.

The output layer runs in chunks of tokens, so that logits of the whole micro-batch never exist.

    log_probs      any loss       forward, by chunk: hidden -> logits -> statistics
                                  backward, by chunk: logits -> gradient in place -> two products
    policy_loss    fused loss     forward, by chunk: logits -> gradient in place -> two products

The two products are the gradients of hidden states and weight. In total, log_probs needs four and
policy_loss three matrix products of the output layer's size; unchunked logits need three. The
weight's gradient is summed in the buffer `weight_grad` or, without a buffer, in float32 (float64
for float64 weights).

Shapes: T tokens, H hidden size, V vocabulary size. With tensor parallelism, every rank has the
hidden states of all tokens and V/tp rows of the weight. Each rank returns its share of the hidden
states' gradient; the caller sums the shares.

Own code instead of Liger-Kernel, whose Triton kernels need a GPU; this code also runs on CPUs.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.ops import logprob, policy
from rlcore.ops.logprob import LogProbs
from rlcore.ops.policy import PolicyLoss
from rlcore.tensors import PolicyInputs, PolicySpec
from rlcore.utils.log import announce


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    entropy_grad: bool = True,
    weight_grad: Tensor | None = None,
    fp32_logits: bool = False,
    ids: Tensor | None = None,
) -> LogProbs:
    """Return log-prob and entropy of each token, [T], differentiable; logits = hidden weight^T.
    With `ids` also return the log-probs of further tokens of each row, [T, K].

    Args:
        hidden: [T, H].
        weight: [V/tp, H], this rank's rows, in the hidden states' dtype; padding comes last.
        tokens: [T] int64, ids in the whole vocabulary; an invalid id raises ValueError (GPU: nan).
        chunk_tokens: maximum number of tokens whose logits exist at a time.
        group: tensor-parallel group, None or of size 1 for the whole vocabulary.
        weight_grad: [V/tp, H] buffer to which backward adds the weight's gradient, instead of
            `weight.grad`. None: autograd returns the gradient in the weight's dtype.
        fp32_logits: do not round logits to the hidden states' 16-bit dtype. Their gradient is
            rounded to it before the two products.
        ids: [T, K] int64, further tokens of each row, each at most once.

    Raises:
        ValueError: an argument is invalid.
    """
    shard = _check(
        hidden, weight, tokens, vocab_size, temperature, group, chunk_tokens, weight_grad
    )
    logprob.check_ids(ids, tokens, vocab_size)
    where = (*shard, temperature)
    found = _HeadLogProb.apply(
        hidden, weight, tokens, ids, where, group, chunk_tokens, weight_grad, fp32_logits
    )
    return logprob.made(found, tokens, vocab_size, entropy_grad)


def policy_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    inputs: PolicyInputs,
    spec: PolicySpec,
    *,
    vocab_size: int,
    chunk_tokens: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    weight_grad: Tensor | None = None,
    fp32_logits: bool = False,
) -> PolicyLoss:
    """Compute `policy.policy_loss` for logits = hidden weight^T, and all gradients in this call.

    Args:
        weight_grad: [V/tp, H] buffer to which this call (not backward) adds the weight's gradient,
            instead of `weight.grad`. Call backward on the loss itself, not on a multiple; backward
            checks this. None: autograd returns the gradient in the weight's dtype.
        others: see `log_probs` in this module and `policy.policy_loss`.

    Raises:
        ValueError: an argument is invalid.
    """
    shard = _check(
        hidden, weight, tokens, vocab_size, temperature, group, chunk_tokens, weight_grad
    )
    policy.check_spec(spec, inputs)
    given, params = policy.prepared(inputs, spec, hidden.size(0), hidden)
    given = policy.guarded(given, tokens, vocab_size)
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss, stats, out = _HeadPolicyLoss.apply(
        hidden,
        weight,
        tokens,
        (*shard, temperature),
        given,
        params,
        group,
        chunk_tokens,
        weight_grad,
        fp32_logits,
        wanted,
    )
    return PolicyLoss(loss, stats[0], stats[1], out)


def _check(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    chunk_tokens: int,
    weight_grad: Tensor | None,
) -> logprob.VocabShard:
    if hidden.dim() != 2:
        raise ValueError(f"hidden: shape {list(hidden.shape)}; must be [tokens, hidden size]")
    if hidden.dtype not in logprob.DTYPES:
        raise ValueError(
            f"hidden: dtype {hidden.dtype}; must be bfloat16, float16, float32 or float64"
        )
    if weight.dim() != 2 or weight.size(1) != hidden.size(1):
        raise ValueError(
            f"weight: shape {list(weight.shape)}; must be [vocabulary, {hidden.size(1)}]"
        )
    if weight.dtype is not hidden.dtype or weight.device != hidden.device:
        raise ValueError(
            f"weight: {weight.dtype} on {weight.device}; must be {hidden.dtype} on "
            f"{hidden.device}, as the hidden states"
        )
    if weight_grad is not None and (
        weight_grad.shape != weight.shape or weight_grad.device != weight.device
    ):
        raise ValueError(
            f"weight_grad: shape {list(weight_grad.shape)} on {weight_grad.device}; must be "
            f"{list(weight.shape)} on {weight.device}, as the weight"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens {chunk_tokens}: must be 1 or more")
    logprob.check_row(tokens, "tokens", hidden.size(0), hidden.device, torch.int64)
    shard = logprob.check_shard(weight.size(0), vocab_size, temperature, group)
    logprob.check_tokens(tokens, vocab_size)
    return shard


# ---- any loss: the logits are computed twice


class _HeadLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        ids: Tensor | None,
        where: tuple[int, int, float],
        group: dist.ProcessGroup | None,
        chunk_tokens: int,
        weight_grad: Tensor | None,
        fp32_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        count = 4 if ids is None else 4 + ids.size(1)
        dtype = logprob.statistics_dtype(hidden.dtype)
        stats = hidden.new_empty((count, hidden.size(0)), dtype=dtype)
        for chunk, logits in _chunks(hidden, weight, chunk_tokens, fp32_logits):
            stats[:, chunk] = logprob.all_stats(logits, tokens[chunk], _cut(ids, chunk), *where)
        logp, entropy, lse, of_ids = logprob.combined(logprob.gathered(stats, group))
        ctx.save_for_backward(hidden, weight, tokens, ids, lse, entropy)
        ctx.where, ctx.weight_grad = where, weight_grad
        ctx.chunks = chunk_tokens, fp32_logits
        ctx.set_materialize_grads(False)
        return logp, entropy, of_ids

    @staticmethod
    def backward(
        ctx: Any,
        grad_logp: Tensor | None,
        grad_entropy: Tensor | None,
        grad_ids: Tensor | None,
    ) -> tuple:
        if grad_logp is None and grad_entropy is None and grad_ids is None:
            return (None,) * 9
        hidden, weight, tokens, ids, lse, entropy = ctx.saved_tensors
        made = _Gradients(hidden, weight, ctx.needs_input_grad[:2], ctx.weight_grad)
        where: tuple[int, int, float] = ctx.where
        for chunk, logits in _chunks(hidden, weight, *ctx.chunks):
            about = (tokens[chunk], _cut(ids, chunk), *where, lse[:, chunk], entropy[chunk])
            grads = _cut(grad_logp, chunk), _cut(grad_entropy, chunk), _cut(grad_ids, chunk)
            logprob.all_grads(logits, *about, *grads, logits)
            made.add(chunk, logits)
        return made.hidden, made.weight(), *(None,) * 7


def _cut(value: Tensor | None, chunk: slice) -> Tensor | None:
    return None if value is None else value[chunk]


# ---- the fused loss: the logits are computed once


class _HeadPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        where: tuple[int, int, float],
        inputs: policy.Given,
        params: list[float],
        group: dist.ProcessGroup | None,
        chunk_tokens: int,
        weight_grad: Tensor | None,
        fp32_logits: bool,
        wanted: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, dtype = hidden.size(0), logprob.statistics_dtype(hidden.dtype)
        stats = hidden.new_empty((2, rows), dtype=dtype)
        out = hidden.new_empty((len(policy.ROWS), rows), dtype=dtype)
        made = None
        if wanted:
            made = _Gradients(hidden, weight, ctx.needs_input_grad[:2], weight_grad)
        for chunk, logits in _chunks(hidden, weight, chunk_tokens, fp32_logits):
            cut = policy.cut(inputs, chunk)
            stats[:, chunk], out[:, chunk] = policy.rows_(
                logits, tokens[chunk], *where, cut, params, group, wanted
            )
            if made is not None:
                made.add(chunk, logits)
        ctx.mark_non_differentiable(stats, out)
        ctx.made, ctx.unit = made, weight_grad is not None
        return policy.total(out, inputs[-1]), stats, out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple:
        made = ctx.made
        if made is None:
            raise RuntimeError("policy_loss: a second backward; only one is possible")
        ctx.made = None
        hidden = made.hidden
        if hidden is not None:
            hidden = policy.scaled_(hidden, upstream, ctx.unit)
        return hidden, made.weight(upstream), *(None,) * 9


# ---- without a gradient


@torch.no_grad()
def log_probs_and_squares(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    fp32_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-prob of `tokens` and log sum p^2 of the whole distribution, [T] each; arguments
    and errors are those of `log_probs`."""
    where = (vocab_size, temperature, group, chunk_tokens, None)
    shard = _check(hidden, weight, tokens, *where)
    dtype = logprob.statistics_dtype(hidden.dtype)
    stats = hidden.new_empty((5, hidden.size(0)), dtype=dtype)
    for chunk, logits in _chunks(hidden, weight, chunk_tokens, fp32_logits):
        stats[:, chunk] = logprob.squares_stats(logits, tokens[chunk], *shard, temperature)
    return logprob.with_squares(logprob.gathered(stats, group))


@torch.no_grad()
def top_log_probs(
    hidden: Tensor,
    weight: Tensor,
    count: int,
    *,
    vocab_size: int,
    chunk_tokens: int,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the ids and log-probs of each row's `count` likeliest tokens, the likeliest first:
    [T, count] int64 and float32 (float64 for float64 weights). The vocabulary is not split; other
    arguments are as in `log_probs`."""
    rows, dtype = hidden.size(0), logprob.statistics_dtype(hidden.dtype)
    ids = torch.empty(rows, count, dtype=torch.int64, device=hidden.device)
    found = torch.empty(rows, count, dtype=dtype, device=hidden.device)
    for chunk, logits in _chunks(hidden, weight, chunk_tokens, True) if count else ():
        x = logits[:, :vocab_size].div_(temperature)
        top, ids[chunk] = x.topk(count)
        found[chunk] = top - x.logsumexp(-1, keepdim=True)
    return ids, found


# ---- the output layer


def _chunks(
    hidden: Tensor, weight: Tensor, size: int, fp32: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Yield each chunk of tokens, as a slice, and its logits. All chunks use the same buffer."""
    rows = hidden.size(0)
    wide = logprob.statistics_dtype(hidden.dtype)
    dtype = wide if fp32 else hidden.dtype
    buffer = hidden.new_empty(min(size, rows), weight.size(0), dtype=dtype)
    for start in range(0, rows, size):
        chunk = slice(start, min(start + size, rows))
        logits = buffer[: chunk.stop - start]
        if dtype is hidden.dtype:
            torch.mm(hidden[chunk], weight.t(), out=logits)
        elif gives_float32(hidden.device, hidden.dtype):
            torch.mm(hidden[chunk], weight.t(), out_dtype=dtype, out=logits)
        else:
            torch.mm(hidden[chunk].to(dtype), weight.t().to(dtype), out=logits)
        yield chunk, logits


class _Gradients:
    """Gradients of hidden states and weight, computed chunk by chunk."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        needs: tuple[bool, bool],
        weight_grad: Tensor | None,
    ) -> None:
        self._input, self._matrix = hidden.detach(), weight.detach()
        self.hidden = torch.empty_like(self._input) if needs[0] else None
        self._is_lent = weight_grad is not None
        self._sum = None
        if needs[1]:
            dtype = logprob.statistics_dtype(weight.dtype)
            self._sum = (
                torch.zeros_like(self._matrix, dtype=dtype) if weight_grad is None else weight_grad
            )

    def add(self, chunk: slice, grad: Tensor) -> None:
        """Add a chunk's part of the gradients; `grad` is the gradient of the chunk's logits."""
        grad = grad.to(self._matrix.dtype)
        if self.hidden is not None:
            torch.mm(grad, self._matrix, out=self.hidden[chunk])
        if self._sum is None:
            return
        a, b = grad.t(), self._input[chunk]
        if self._sum.dtype is grad.dtype:
            self._sum.addmm_(a, b)
        elif self._sum.dtype is torch.float32 and adds_products(grad.device, grad.dtype):
            # Add in float32, because rounding every chunk's product to 16 bits loses accuracy.
            torch.addmm(self._sum, a, b, out_dtype=torch.float32, out=self._sum)
        else:
            self._sum.add_(torch.mm(a, b))

    def weight(self, upstream: Tensor | None = None) -> Tensor | None:
        """Return the weight's gradient for autograd; None if `weight_grad` holds the gradient."""
        if self._sum is None or self._is_lent:
            return None
        if upstream is not None:
            self._sum.mul_(upstream.to(self._sum.dtype))
        return self._sum.to(self._matrix.dtype)


@cache
def adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch adds a half-precision product to a float32 matrix without rounding the
    product first. CPUs do not; on a GPU it depends on the version of torch."""
    if device.type != "cuda":
        return False
    total = torch.zeros(16, 16, device=device)
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        announce(
            "head",
            f"the gradient's products are rounded to {dtype} before they are added, "
            f"since torch {torch.__version__} cannot add these in float32 ({reason})",
        )
        return False
    return True


@cache
def gives_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch multiplies half-precision matrices on a GPU into a float32 one."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    out = torch.zeros(16, 16, device=device)
    try:
        torch.mm(ones, ones, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):
        return False
    return True
