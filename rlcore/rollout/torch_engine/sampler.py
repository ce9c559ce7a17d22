"""Token sampling from logits: filters, inverse-CDF sampling and log-probs of the sampled tokens.

A random number is a hash of its request's key and the token's position, so a sample does not depend
on the rest of the batch. Log-probs are of the distribution that was sampled, after temperature and
filters. Greedy decoding always takes the best token, so its log-probs are 0.

Temperature applies first. Filters then keep the `top_k` most likely tokens (ties by lower id), of
these the smallest set whose renormalised mass reaches `top_p`, and of these the tokens that are at
least `min_p` times as likely as the best token.

Letters: N rows, V vocabulary.

`torch.multinomial` is not used, because its draws depend on the rest of the batch.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlcore.ops import native

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Increment of the random-number counter per token position, as a signed 64-bit number."""
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64
_BITS = 48
_BLOCK = 512  # tokens per block of the search in a large vocabulary
MOST_LOGITS = 1 << 26
"""Maximum number of logits that one call samples from at a time, because sampling allocates about
three more tensors of that size. A step that verifies the drafts of many requests has more."""


MOST_KEPT = 1024
"""Largest top_k for which only the likeliest tokens of a row are sorted."""


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling settings per row, [N]; `filtered` and the filters are None if no row has filters."""

    scale: Tensor
    """Inverse of each row's temperature; 1 for greedy rows."""
    greedy: Tensor | None  # bool
    filtered: Tensor | None  # [F] int64, rows with filters; top_k, top_p and min_p are [F] too
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    plain: bool = False
    """Whether `scale` is 1 in every row."""
    few: bool = False
    """Whether every filtered row has a top_k from 1 to `MOST_KEPT`, so that no row is sorted."""

    def of_rows(self, begin: int, end: int) -> "SamplingTensors":
        """Return the settings of rows `begin` to `end` - 1."""
        found = replace(
            self,
            scale=self.scale[begin:end],
            greedy=None if self.greedy is None else self.greedy[begin:end],
        )
        if self.filtered is None:
            return found
        inside = (self.filtered >= begin) & (self.filtered < end)
        names = ("top_k", "top_p", "min_p")
        filters = {name: getattr(self, name)[inside] for name in names}
        return replace(found, filtered=self.filtered[inside] - begin, **filters)


def uniform(counter: Tensor) -> Tensor:
    """Map counters [N] int64 to uniform numbers in (0, 1), [N] float64, as splitmix64 does."""
    z = counter
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX2
    z = z ^ ((z >> 31) & (2**33 - 1))
    return ((z >> (64 - _BITS)) & (2**_BITS - 1)).double().add_(0.5).mul_(2.0**-_BITS)


def sample(logits: Tensor, counter: Tensor, settings: SamplingTensors) -> tuple[Tensor, Tensor]:
    """Sample a token per row. Return tokens [N] int64 and their log-probs [N] float64. The caller
    must check that log-probs are finite: they are not if the logits are not."""
    if (ops := _native(logits)) is None:
        return _sample_in_torch(logits, counter, settings)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    logps = torch.empty(len(logits), dtype=torch.float64)
    ops.sample_tokens(logits, counter, settings.scale, settings.greedy, tokens, logps)
    if (rows := settings.filtered) is not None:
        scale, places = settings.scale[rows], torch.arange(len(rows))
        own = replace(settings, scale=scale, greedy=None, filtered=places)
        tokens[rows], logps[rows] = _sample_in_torch(logits[rows], counter[rows], own)
    return tokens, logps


def _native(logits: Tensor) -> Any | None:
    """Return the native ops if they can sample; they are for float32 on the CPU, unfiltered."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return None
    return native.torch_ops("sample_tokens") if logits.is_contiguous() else None


def _sample_in_torch(
    logits: Tensor, counter: Tensor, settings: SamplingTensors
) -> tuple[Tensor, Tensor]:
    most = max(1, MOST_LOGITS // logits.size(-1))
    if len(logits) > most:
        ends = [(i, i + most) for i in range(0, len(logits), most)]
        parts = [
            _sample_in_torch(logits[i:j], counter[i:j], settings.of_rows(i, j)) for i, j in ends
        ]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([logps for _, logps in parts])
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    best = logits.amax(-1, keepdim=True)
    shifted = logits - best
    if not settings.plain:
        shifted.mul_(settings.scale[:, None])
    weights = shifted.exp()
    if settings.filtered is not None:
        rows = settings.filtered
        top_k, top_p, min_p = settings.top_k, settings.top_p, settings.min_p
        assert top_k is not None and top_p is not None and min_p is not None
        chosen = weights[rows]
        find = few_filters if settings.few else filters
        weights[rows] = torch.where(find(chosen, top_k, top_p, min_p), chosen, 0)
    tokens, total = inverse_cdf(weights, uniform(counter))
    logps = shifted.gather(-1, tokens[:, None])[:, 0].double() - total.log()
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy, logits.argmax(-1), tokens)
        logps = torch.where(settings.greedy, 0 * logps, logps)
    return tokens, logps


def inverse_cdf(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first token whose cumulative weight exceeds `u` times the row's total, [N], and
    the totals [N] float64. Sums are in float64. A token of weight 0 is never returned."""
    rows, vocab = weights.shape
    if vocab <= 8 * _BLOCK:
        return _search(weights, u)
    padded = torch.nn.functional.pad(weights, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    sums = padded.sum(-1, dtype=torch.float64)
    block, total = _search(sums, u)
    before = sums.cumsum(-1).gather(-1, block[:, None])[:, 0]
    inside = sums.gather(-1, block[:, None])[:, 0]
    u = ((u * total - (before - inside)) / inside).clamp(0, 1 - 2.0**-_BITS)
    chosen = padded.gather(1, block[:, None, None].expand(-1, 1, _BLOCK))[:, 0]
    token, _ = _search(chosen, u)
    return (block * _BLOCK + token).clamp_(max=vocab - 1), total


def _search(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    cdf = weights.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1]
    token = torch.searchsorted(cdf, (u * total)[:, None], right=True)[:, 0]
    return token.clamp_(max=weights.shape[-1] - 1), total


def filters(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return which tokens may be sampled, [N, V] bool. `top_k` 0 keeps all tokens. `weights` are
    not normalised; the largest weight of each row is 1."""
    ordered, index = weights.sort(dim=-1, descending=True, stable=True)
    count = _num_kept(ordered, top_k, top_p, min_p)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, index, rank < count)


def few_filters(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return what `filters` does if every `top_k` is from 1 to `MOST_KEPT`, without a sort of whole
    rows. A GPU does not wait for the host."""
    ordered = weights.topk(min(MOST_KEPT, weights.shape[-1])).values
    count = _num_kept(ordered, top_k, top_p, min_p)
    least = ordered.gather(-1, (count - 1).clamp_(min=0))
    # `topk` takes any of equal tokens, but those with the lowest ids are kept.
    ties = weights == least
    missing = count - (ordered > least).sum(-1, keepdim=True)
    return (weights > least) | (ties & (ties.cumsum(-1, dtype=torch.int32) <= missing))


def _num_kept(ordered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return how many of the likeliest tokens the filters keep, [N, 1]. `ordered`: weights in
    descending order, at least as many as `top_k`."""
    ordered = ordered.double()  # after the sort, whose keys then have half the bytes
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    ordered = torch.where(keep, ordered, 0)
    cdf = ordered.cumsum(-1)
    keep &= (cdf - ordered < top_p[:, None] * cdf[:, -1:]) | (top_p[:, None] >= 1)
    keep &= ordered >= min_p[:, None] * ordered[:, :1]
    return keep.sum(-1, keepdim=True)
