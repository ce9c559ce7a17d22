"""Log-prob and entropy of a token from vocabulary-parallel logits.

    x = logits / temperature      logp = x[token] - logsumexp(x)      H = logsumexp(x) - sum p x

Both are differentiable. The logits are neither written to nor copied whole: fp32 temporaries exist
for a block of tokens at a time, and the backward pass makes the probabilities again. Gradients have
the logits' dtype; float64 logits are computed in float64, all others in float32.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_BYTES = 64 << 20
"""Size of one fp32 temporary; about three are alive."""


class LogProbs(NamedTuple):
    logp: Tensor  # [T]
    entropy: Tensor  # [T]


def log_probs(
    logits: Tensor,
    tokens: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    entropy_grad: bool = True,
) -> LogProbs:
    """Log-prob of `tokens` and entropy of the whole distribution, both [T].

    Args:
        logits: [T, V/tp], this rank's part of the vocabulary; padding comes last.
        tokens: [T] int64, global ids.
        vocab_size: entries that are real; columns from there on have probability 0.
        group: tensor-parallel group, None or of size 1 for whole logits.
        entropy_grad: False gives an entropy without a gradient, which makes backward cheaper.
    """
    logp, entropy = _LogProb.apply(logits, tokens, vocab_size, temperature, group)
    return LogProbs(logp, entropy if entropy_grad else entropy.detach())


def _blocks(logits: Tensor) -> list[slice]:
    rows, width = logits.shape
    item = 8 if logits.dtype is torch.float64 else 4
    step = max(1, BLOCK_BYTES // max(1, width * item))
    return [slice(start, start + step) for start in range(0, rows, step)]


def _scaled(logits: Tensor, temperature: float, valid: int) -> Tensor:
    """A fresh tensor of logits / temperature with padding columns at -inf."""
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    x = logits.to(dtype, copy=True)
    if temperature != 1.0:
        x.div_(temperature)
    if valid < x.size(-1):
        x[:, valid:] = float("-inf")
    return x


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        rows, width = logits.shape
        parallel = group is not None and group.size() > 1
        first = group.rank() * width if parallel else 0
        valid = min(max(vocab_size - first, 0), width)
        dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
        top = torch.empty(rows, dtype=dtype, device=logits.device)
        sums = torch.zeros(3, rows, dtype=dtype, device=logits.device)  # target, sum e, sum e*x
        local = tokens - first
        own = (local >= 0) & (local < valid)
        local = local.clamp(0, max(valid - 1, 0))
        for block in _blocks(logits) if parallel else ():
            top[block] = logits[block, :valid].amax(-1).to(dtype) if valid else float("-inf")
        if parallel:
            # The maximum only keeps exp in range: a rounded one serves as well as the exact one.
            top.div_(temperature)
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        for block in _blocks(logits):
            x = _scaled(logits[block], temperature, valid)
            if not parallel:
                top[block] = x.amax(-1)
            x.sub_(top[block].unsqueeze(-1))
            sums[0, block] = x.gather(-1, local[block].unsqueeze(-1)).squeeze(-1)
            e = x.exp()
            sums[1, block] = e.sum(-1)
            if valid < width:
                x[:, valid:] = 0.0
            sums[2, block] = e.mul_(x).sum(-1)
        if parallel:
            sums[0] = torch.where(own, sums[0], 0.0)
            dist.all_reduce(sums, group=group)
        log_sum = sums[1].log()
        logp = sums[0] - log_sum
        entropy = log_sum - sums[2] / sums[1]
        ctx.save_for_backward(logits, local, own, top + log_sum, entropy)
        ctx.temperature, ctx.valid = temperature, valid
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        logits, local, own, log_sum, entropy = ctx.saved_tensors
        if grad_logp is None and grad_entropy is None:
            return None, None, None, None, None
        out = torch.empty_like(logits)
        for block in _blocks(logits):
            x = _scaled(logits[block], ctx.temperature, ctx.valid)
            x.sub_(log_sum[block].unsqueeze(-1))  # log p
            p = x.exp()
            factor = torch.zeros_like(log_sum[block])
            if grad_logp is not None:
                factor = -grad_logp[block]
            if grad_entropy is not None:
                # dH/dx = -p (log p + H)
                if ctx.valid < x.size(-1):
                    x[:, ctx.valid :] = 0.0
                x.add_(entropy[block].unsqueeze(-1)).mul_(-grad_entropy[block].unsqueeze(-1))
                p.mul_(x.add_(factor.unsqueeze(-1)))
            else:
                p.mul_(factor.unsqueeze(-1))
            if grad_logp is not None:
                target = (grad_logp[block] * own[block]).unsqueeze(-1)
                p.scatter_add_(-1, local[block].unsqueeze(-1), target)
            if ctx.temperature != 1.0:
                p.div_(ctx.temperature)
            out[block] = p
        return out, None, None, None, None
