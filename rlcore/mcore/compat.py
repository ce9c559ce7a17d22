"""Wrap functions of torch that differ between the supported versions, 2.11 to 2.13."""

import inspect
from functools import cache
from typing import TypedDict

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames both functions and warns about the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Asked(TypedDict, total=False):
    enable_gqa: bool


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
) -> Tensor:
    """Run torch's variable-length flash attention, causal and aligned to the last key: q [Tq,
    heads, dim], k and v [Tk, groups, dim], boundaries [U+1] int32 -> [Tq, heads, dim]."""
    from torch.nn.attention.varlen import varlen_attn

    asked: _Asked = {"enable_gqa": q.size(1) != k.size(1)} if _wants_to_be_asked() else {}
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=(-1, 0), **asked)
    assert isinstance(out, Tensor), "varlen_attn returned a logsumexp, too"
    return out


@cache
def _wants_to_be_asked() -> bool:
    """Return whether grouped-query attention must be enabled by an argument, as since torch 2.12.
    The kernel supports grouped-query attention in every version."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
