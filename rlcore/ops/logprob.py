"""Compute log-prob and entropy of tokens from (vocabulary-parallel) logits, with gradients.

    x = logits / temperature      logp = x[token] - logsumexp(x)      H = logsumexp(x) - sum p x

Forward reads the logits once; backward reads and writes them once. No other tensor of the logits'
size is kept. Statistics are float32 (float64 for float64 logits); gradients have the logits' dtype.
Columns from `vocab_size` on are padding with probability 0 and gradient 0. With tensor parallelism,
one all-gather of four numbers per token (and one for each further token whose log-prob is wanted)
combines the ranks' results.

Native code (`csrc/loss`) is used if built, otherwise torch; a line in the log names the choice.

Shapes: T tokens, V vocabulary size, W = V/tp columns of this rank, R tensor-parallel ranks,
K further tokens of each row.

Own kernels instead of `torch.compile`: forward and backward take .174 s instead of 1.48 s for
[2048, 151936] in bfloat16 on 2 threads (`tools/results/bench_loss.json`).
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcore.ops import native

BLOCK_BYTES = 64 << 20
"""Bytes of each temporary tensor in the torch reference; about three exist at a time."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# torch 2.13 renames all_gather_into_tensor to all_gather_single and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class LogProbs(NamedTuple):
    logp: Tensor  # [T]
    entropy: Tensor  # [T]
    of_ids: Tensor | None = None  # [T, K]


class VocabShard(NamedTuple):
    """Part of the vocabulary on this rank."""

    first: int  # global token id of the first column
    valid: int  # number of columns that are not padding


def log_probs(
    logits: Tensor,
    tokens: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    entropy_grad: bool = True,
    in_place: bool = False,
    ids: Tensor | None = None,
) -> LogProbs:
    """Return log-prob of `tokens` and entropy of the whole distribution, [T] each, differentiable.
    With `ids` also return the log-probs of further tokens of each row, [T, K].

    A row of logits with nan or +inf gives nan; a logit of -inf means probability 0.

    Args:
        logits: [T, V/tp], this rank's part of the vocabulary; padding comes last.
        tokens: [T] int64, ids in the whole vocabulary. An invalid id raises ValueError on the CPU;
            on a GPU its log-prob is nan, because a check would wait for the device.
        vocab_size: number of real entries; columns from `vocab_size` on have probability 0.
        group: tensor-parallel group, None or of size 1 for unsplit logits.
        entropy_grad: False gives an entropy without a gradient, which makes backward cheaper.
        in_place: backward overwrites the logits with their gradient.
        ids: [T, K] int64, further tokens of each row, each at most once.

    Raises:
        ValueError: an argument is invalid.
        RuntimeError: in backward, if the logits were overwritten since forward, for example by an
            earlier backward with `in_place`.
    """
    shard = check(logits, tokens, vocab_size, temperature, group, in_place)
    check_tokens(tokens, vocab_size)
    check_ids(ids, tokens, vocab_size)
    found = _LogProb.apply(logits, tokens, ids, shard, temperature, group, in_place)
    return made(found, tokens, vocab_size, entropy_grad)


def made(
    found: tuple[Tensor, Tensor, Tensor | None],
    tokens: Tensor,
    vocab_size: int,
    entropy_grad: bool,
) -> LogProbs:
    """Return the outputs of an op: nan for invalid tokens on a GPU, and an entropy with a gradient
    only if wanted."""
    logp, entropy, of_ids = found
    if tokens.device.type != "cpu":
        logp = torch.where((tokens >= 0) & (tokens < vocab_size), logp, float("nan"))
    return LogProbs(logp, entropy if entropy_grad else entropy.detach(), of_ids)


# ---- checks


def check(
    logits: Tensor,
    tokens: Tensor,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    in_place: bool,
) -> VocabShard:
    """Check the arguments and return this rank's part of the vocabulary. Raise ValueError if an
    argument is invalid."""
    if logits.dim() != 2:
        raise ValueError(f"logits: shape {list(logits.shape)}; must be [tokens, vocabulary]")
    if logits.dtype not in DTYPES:
        raise ValueError(
            f"logits: dtype {logits.dtype}; must be bfloat16, float16, float32 or float64"
        )
    if logits.size(1) > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"logits: the columns have stride {logits.stride(1)}; must be 1, so pass "
            "logits.contiguous()"
        )
    if in_place and logits.size(0) > 1 and logits.stride(0) < logits.size(1):
        raise ValueError(
            f"logits: rows of {logits.size(1)} columns have stride {logits.stride(0)} and "
            "overlap; set in_place False or pass logits.contiguous()"
        )
    check_row(tokens, "tokens", logits.size(0), logits.device, torch.int64)
    return check_shard(logits.size(1), vocab_size, temperature, group)


def check_row(
    value: Tensor, name: str, rows: int, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Raise ValueError unless `value` has shape [rows] and the given device and dtype."""
    if value.shape != (rows,):
        raise ValueError(f"{name}: shape {list(value.shape)} for {rows} rows; must be [{rows}]")
    if dtype is not None and value.dtype is not dtype:
        raise ValueError(f"{name}: dtype {value.dtype}; must be {dtype}")
    if value.device != device:
        raise ValueError(f"{name}: on {value.device}, the logits are on {device}; must be the same")


def check_shard(
    width: int, vocab_size: int, temperature: float, group: dist.ProcessGroup | None
) -> VocabShard:
    """Return this rank's columns. Raise ValueError if all ranks together have too few columns."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature {temperature}: must be a finite number above 0")
    if vocab_size < 1:
        raise ValueError(f"vocab_size {vocab_size}: must be 1 or more")
    size = _size(group)
    if width * size < vocab_size:
        raise ValueError(
            f"vocab_size {vocab_size}: the group's {size} parts of {width} columns hold "
            f"{width * size}; pass the group that the vocabulary is split over, or the right size"
        )
    first = group.rank() * width if group is not None and size > 1 else 0
    return VocabShard(first, min(max(vocab_size - first, 0), width))


def check_ids(ids: Tensor | None, tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError if further tokens have a wrong shape or type, or one is outside the
    vocabulary. Do not check ids on a GPU."""
    if ids is None:
        return
    if ids.dim() != 2 or ids.size(0) != tokens.size(0):
        raise ValueError(f"ids: shape {list(ids.shape)}; must be [{tokens.size(0)}, ids per row]")
    if ids.dtype is not torch.int64 or ids.device != tokens.device:
        raise ValueError(
            f"ids: {ids.dtype} on {ids.device}; must be torch.int64 on {tokens.device}"
        )
    check_tokens(ids.flatten(), vocab_size)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError if a token id is outside the vocabulary. Do not check ids on a GPU."""
    if tokens.device.type != "cpu" or not tokens.numel():
        return
    low, high = torch.aminmax(tokens)
    if int(low) < 0 or int(high) >= vocab_size:
        t = int(((tokens < 0) | (tokens >= vocab_size)).nonzero()[0])
        raise ValueError(f"tokens: {int(tokens[t])} at index {t}; must be 0 to {vocab_size - 1}")


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


# ---- the ops


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics of logits of `dtype` are computed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def row_stats(logits: Tensor, tokens: Tensor, first: int, valid: int, temperature: float) -> Tensor:
    """Return four statistics of x = logits / temperature over this rank's columns, [4, T]:
    top = max x (rounded), sum e^(x - top), sum e^(x - top) (x - top), and x - top at the token. The
    fourth is -inf if another rank has the token's column."""
    out = logits.new_empty((4, logits.size(0)), dtype=statistics_dtype(logits.dtype))
    ops = native.torch_ops("token_logprob", logits.device.type)
    if ops is None:
        reference_stats(logits, tokens, first, valid, temperature, out)
    else:
        where = native.stream(logits.device)
        ops.row_stats(logits, tokens.contiguous(), first, valid, temperature, out, where)
    return out


def all_stats(
    logits: Tensor,
    tokens: Tensor,
    ids: Tensor | None,
    first: int,
    valid: int,
    temperature: float,
) -> Tensor:
    """Return `row_stats`, and below them x - top of the further tokens `ids`, [4 + K, T]. A value
    is -inf if another rank has the column."""
    stats = row_stats(logits, tokens, first, valid, temperature)
    if ids is None:
        return stats
    if not valid:
        return torch.cat([stats, stats.new_full((ids.size(1), ids.size(0)), float("-inf"))])
    local, top = ids - first, stats[0].unsqueeze(-1)
    own = (local >= 0) & (local < valid) & (top > float("-inf"))
    found = logits.gather(-1, local.clamp(0, valid - 1)).double() / temperature - top.double()
    return torch.cat([stats, torch.where(own, found, float("-inf")).t().to(stats.dtype)])


def all_grads(
    logits: Tensor,
    tokens: Tensor,
    ids: Tensor | None,
    first: int,
    valid: int,
    temperature: float,
    lse: Tensor,
    entropy: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    grad_ids: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Write the logits' gradient to `out` as `row_grad`, with the gradients [T, K] of the further
    tokens' log-probs: each adds g (onehot - p) / temperature. The columns of tokens are computed
    apart and then set, since the sum of two rounded numbers would lose the gradient of a likely
    token, g (1 - p)."""
    shard = (first, valid, temperature)
    if ids is None or grad_ids is None:
        return row_grad(logits, tokens, *shard, lse, entropy, grad_logp, grad_entropy, out)
    where, grads = ids, grad_ids.double()
    total = grads.sum(-1, keepdim=True)
    if grad_logp is not None:
        here = grad_logp.double().unsqueeze(-1)
        is_token = ids == tokens.unsqueeze(-1)  # at most one of a row
        of_token = here + torch.where(is_token, grads, 0.0).sum(-1, keepdim=True)
        where = torch.cat([tokens.unsqueeze(-1), ids], -1)
        grads = torch.cat([of_token, grads + torch.where(is_token, here, 0.0)], -1)
        total = total + here
    local = where - first
    own = (local >= 0) & (local < valid)
    x = None if not valid else logits.gather(-1, local.clamp(0, valid - 1)).double() / temperature
    # No column is token -1, so this gives - sum(g) p in all columns. It may overwrite the logits.
    none = torch.full_like(tokens, -1)
    mass = total.squeeze(-1).to(lse.dtype)
    row_grad(logits, none, *shard, lse, entropy, mass, grad_entropy, out)
    if x is None:
        return out
    top, log_sum = lse.double().unsqueeze(-1)
    logp = x - top - log_sum
    p = logp.exp()
    values = -grads * logp.expm1() - (total - grads) * p
    is_used = (grads != 0) | (total != 0)
    if grad_entropy is not None:
        h = grad_entropy.double().unsqueeze(-1)
        plus = torch.where(p > 0, p * (logp + entropy.double().unsqueeze(-1)), 0.0)
        values, is_used = values - h * plus, is_used | (h != 0)
    values = torch.where(is_used, values / temperature, 0.0).to(out.dtype)
    return _set_columns(out, local, own, values)


def _set_columns(out: Tensor, local: Tensor, own: Tensor, values: Tensor) -> Tensor:
    """Set the columns `local` [T, M] of `out` to `values` where they are this rank's (`own`).
    Others repeat one of these, or column 0 with its own value, so that nothing waits for the
    device."""
    some, at = own.any(-1, keepdim=True), own.to(torch.uint8).argmax(-1, keepdim=True)
    column = torch.where(some, local.gather(-1, at), 0)
    value = torch.where(some, values.gather(-1, at), out[:, :1])
    return out.scatter_(-1, torch.where(own, local, column), torch.where(own, values, value))


def row_grad(
    logits: Tensor,
    tokens: Tensor,
    first: int,
    valid: int,
    temperature: float,
    lse: Tensor,
    entropy: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Write the logits' gradient to `out` and return `out`, which may be the logits themselves.

    The gradient is (g (onehot - p) - h p (log p + H)) / temperature, [T, W] in the logits' dtype; g
    and h are the gradients of log-prob and entropy. Rows with g = h = 0 are not read. `lse` [2, T]
    is logsumexp as a sum of two terms, because one number is too imprecise for large logits.
    """
    # The kernels need contiguous gradients, but gradients of sums have stride 0.
    g = None if grad_logp is None else grad_logp.to(lse.dtype).contiguous()
    h = None if grad_entropy is None else grad_entropy.to(lse.dtype).contiguous()
    where = (tokens.contiguous(), first, valid, temperature)
    rest = (*where, lse.contiguous(), entropy, g, h, out)
    ops = native.torch_ops("token_logprob", logits.device.type)
    if ops is None:
        reference_grad(logits, *rest)
    else:
        ops.row_grad(logits, *rest, native.stream(logits.device))
        count_write(out)
    return out


@torch.no_grad()
def log_probs_and_squares(
    logits: Tensor,
    tokens: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-prob of `tokens` and log sum p^2 of the whole distribution, [T] each, without
    gradients. The log-probs are those of `log_probs` bit by bit; arguments and errors, too."""
    shard = check(logits, tokens, vocab_size, temperature, group, False)
    check_tokens(tokens, vocab_size)
    return with_squares(gathered(squares_stats(logits, tokens, *shard, temperature), group))


def squares_stats(
    logits: Tensor, tokens: Tensor, first: int, valid: int, temperature: float
) -> Tensor:
    """Return `row_stats`, and below them sum e^(2 (x - top)), [5, T]."""
    stats = row_stats(logits, tokens, first, valid, temperature)
    # At half the temperature, x and its rounded maximum are exactly twice as large.
    doubled = row_stats(logits, tokens, first, valid, temperature / 2)
    return torch.cat([stats, doubled[1:2]])


def with_squares(stats: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the statistics [R, 5, T] of all ranks into log-prob and log sum p^2, [T] each."""
    logp, _, lse, _ = combined(stats[:, :4])
    scale = (2 * (stats[:, 0] - lse[0])).exp()
    return logp, (stats[:, 4] * scale).sum(0).log() - 2 * lse[1]


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        ids: Tensor | None,
        shard: VocabShard,
        temperature: float,
        group: dist.ProcessGroup | None,
        in_place: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        stats = all_stats(logits, tokens, ids, *shard, temperature)
        logp, entropy, lse, of_ids = combined(gathered(stats, group))
        if in_place:
            # Autograd raises if backward overwrites a saved tensor, so keep the logits in `ctx`.
            ctx.logits, ctx.version = logits.detach(), version(logits)
            ctx.save_for_backward(tokens, ids, lse, entropy)
        else:
            ctx.save_for_backward(tokens, ids, lse, entropy, logits)
        ctx.shard, ctx.temperature, ctx.in_place = shard, temperature, in_place
        ctx.set_materialize_grads(False)
        return logp, entropy, of_ids

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logp: Tensor | None,
        grad_entropy: Tensor | None,
        grad_ids: Tensor | None,
    ) -> tuple:
        if grad_logp is None and grad_entropy is None and grad_ids is None:
            return (None,) * 7
        tokens, ids, lse, entropy, *saved = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        grads = (grad_logp, grad_entropy, grad_ids)
        rest = (tokens, ids, *shard, ctx.temperature, lse, entropy, *grads)
        if not ctx.in_place:
            (logits,) = saved
            return all_grads(logits, *rest, empty_like(logits)), *(None,) * 6
        if ctx.logits is None:
            raise RuntimeError(
                "log_probs with in_place: a second backward is not possible, since the first one "
                "has overwritten the logits; set in_place False"
            )
        logits, ctx.logits = ctx.logits, None
        if version(logits) != ctx.version:
            raise RuntimeError(
                "log_probs with in_place: the logits were overwritten since the forward, e.g. by "
                "another backward; set in_place only for the last backward"
            )
        return all_grads(logits, *rest, logits), *(None,) * 6


def version(value: Tensor) -> int:
    """Return how often torch has counted a write to the tensor; 0 for an inference tensor."""
    return 0 if value.is_inference() else value._version


def count_write(value: Tensor) -> None:
    """Increase torch's write count of a tensor to which a native op has written."""
    if not value.is_inference():
        torch.autograd.graph.increment_version(value)


def gathered(stats: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the statistics [4 + K, T] of all R ranks of the group, [R, 4 + K, T]. Collective."""
    if group is None or group.size() == 1:
        return stats.unsqueeze(0)
    every = stats.new_empty(group.size() * stats.size(0), stats.size(1))
    _all_gather(every, stats, group=group)
    return every.view(group.size(), *stats.shape)


def combined(stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Combine the statistics [R, 4 + K, T] of all ranks into log-prob [T], entropy [T], logsumexp
    [2, T] and the log-probs of further tokens [T, K] (None if K is 0). Logsumexp is the sum of two
    terms: top and log sum e^(x - top)."""
    if stats.size(0) == 1:
        top, total, dot, target = stats[0, :4]
    else:
        tops = stats[:, 0]
        top = tops.amax(0)
        shift = tops - top  # [R, T], -inf for a rank without finite logits
        scale = shift.exp()
        total = (stats[:, 1] * scale).sum(0)
        # A rank without finite logits adds 0 * -inf, which must count as 0.
        moved = stats[:, 2] + stats[:, 1] * shift
        dot = torch.where(scale == 0, 0.0, moved * scale).sum(0)
        target = (stats[:, 3] + shift).amax(0)
    log_sum, of_ids = total.log(), None
    if stats.size(1) > 4:
        shifts = (stats[:, 0] - top).unsqueeze(1)  # [R, 1, T]
        of_ids = ((stats[:, 4:] + shifts).amax(0) - log_sum).t()
    return target - log_sum, log_sum - dot / total, torch.stack([top, log_sum]), of_ids


def empty_like(logits: Tensor) -> Tensor:
    """Allocate a contiguous tensor with the logits' shape, dtype and device."""
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


# ---- reference in torch


def blocks(logits: Tensor) -> list[slice]:
    rows, width = logits.shape
    item = 8 if logits.dtype is torch.float64 else 4
    step = max(1, BLOCK_BYTES // max(1, width * item))
    return [slice(start, start + step) for start in range(0, rows, step)]


def reference_stats(
    logits: Tensor, tokens: Tensor, first: int, valid: int, temperature: float, out: Tensor
) -> None:
    """Compute `row_stats` in torch; temporary tensors cover one block of tokens at a time."""
    if not valid:
        out[0], out[1:3], out[3] = float("-inf"), 0.0, float("-inf")
        return
    local = tokens - first
    own = (local >= 0) & (local < valid)
    local = local.clamp(0, valid - 1)
    for block in blocks(logits):
        x = logits[block, :valid].to(out.dtype, copy=True)
        found = x.gather(-1, local[block].unsqueeze(-1)).squeeze(-1)
        most = x.amax(-1)
        # If all logits of a row are -inf, subtracting their maximum would give nan.
        base = torch.where(most == float("-inf"), 0.0, most)
        top = (base.double() / temperature).to(out.dtype)
        rest = base.double() / temperature - top.double()
        # Subtract the maximum before dividing, so that large probabilities stay precise.
        x.sub_(base.unsqueeze(-1)).div_(temperature)
        e = x.exp()
        total = e.sum(-1).double()
        dot = e.mul_(x.clamp_(min=torch.finfo(x.dtype).min)).sum(-1).double()
        out[0, block] = torch.where(most == float("-inf"), most, top)
        out[1, block] = total * rest.exp()
        out[2, block] = (dot + rest * total) * rest.exp()
        out[3, block] = torch.where(
            own[block], found.double() / temperature - top.double(), float("-inf")
        )


def reference_grad(
    logits: Tensor,
    tokens: Tensor,
    first: int,
    valid: int,
    temperature: float,
    lse: Tensor,
    entropy: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
) -> None:
    """Compute `row_grad` in torch; `out` may be the logits."""
    none = torch.zeros_like(entropy)
    g = none if grad_logp is None else grad_logp
    h = none if grad_entropy is None else grad_entropy
    local = tokens - first
    own = (local >= 0) & (local < valid)
    local = local.clamp(0, max(valid - 1, 0))
    for block in blocks(logits) if valid else ():
        x = logits[block, :valid].to(lse.dtype, copy=True)
        top, log_sum = lse[:, block].double()
        base = (top * temperature).to(lse.dtype)
        rest = (base.double() / temperature - top - log_sum).to(lse.dtype)
        x.sub_(base.unsqueeze(-1)).div_(temperature).add_(rest.unsqueeze(-1))  # x = log p
        p = x.exp()
        if grad_entropy is not None:
            # dH/dx = -p (log p + H), 0 where p is 0
            x.masked_fill_(p == 0, 0.0).add_(entropy[block].unsqueeze(-1))
            p.mul_(x.mul_(-h[block].unsqueeze(-1)).sub_(g[block].unsqueeze(-1)))
        else:
            p.mul_(-g[block].unsqueeze(-1))
        target = torch.where(own[block], g[block], 0.0).unsqueeze(-1)
        p.scatter_add_(-1, local[block].unsqueeze(-1), target)
        idle = (g[block] == 0) & (h[block] == 0)
        p.masked_fill_(idle.unsqueeze(-1), 0.0)
        out[block, :valid] = p.div_(temperature) if temperature != 1.0 else p
    out[:, valid:] = 0.0
