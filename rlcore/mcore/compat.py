"""Wrap functions of torch that differ between the supported versions, 2.11 to 2.13, and say where
Triton can be used."""

import importlib.util
import inspect
from functools import cache
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 deprecates the names all_gather_into_tensor and reduce_scatter_tensor.
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
    """Run torch's variable-length flash attention; the causal mask is aligned to the last key. q
    and result: [Tq, heads, dim]; k, v: [Tk, groups, dim]; boundaries: [sequences + 1] int32."""
    from torch.nn.attention.varlen import varlen_attn

    asked: _Asked = {"enable_gqa": q.size(1) != k.size(1)} if _wants_to_be_asked() else {}
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=(-1, 0), **asked)
    assert isinstance(out, Tensor), "varlen_attn returned a logsumexp, too"
    return out


@cache
def _wants_to_be_asked() -> bool:
    """Return whether torch's `varlen_attn` has the argument `enable_gqa` (since torch 2.12).
    Earlier versions support grouped-query attention without the argument."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def takes_kernels(x: Tensor) -> bool:
    """Return whether rlcore/mcore/kernels.py can be imported here and takes x."""
    return x.is_cuda and x.dtype is not torch.float64 and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
