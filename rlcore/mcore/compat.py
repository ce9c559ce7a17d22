"""Wrap functions of torch that differ between the supported versions, 2.11 to 2.13, and compile
functions for a GPU."""

import inspect
from collections.abc import Callable
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


def compiled(function: Callable) -> Callable:
    """Return `function` as fused kernels, compiled at the first call for every new size of a
    dimension that is not marked by `varying`."""
    return _compiled(function, torch.are_deterministic_algorithms_enabled())


@cache
def _compiled(function: Callable, deterministic: bool) -> Callable:
    torch._dynamo.config.recompile_limit = 64  # actor and critic, with and without gradients
    # Otherwise timings choose the order in which a kernel adds.
    return torch.compile(function, dynamic=False, options={"deterministic": deterministic})


def varying(x: Tensor, dims: int = 1) -> Tensor:
    """Mark the first `dims` dimensions of x as changing from call to call; return x."""
    for dim in range(dims):
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x
