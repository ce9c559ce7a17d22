"""Flash attention on packed sequences: FA4 where it is installed, otherwise torch's own FA2; on the
CPU in float32 native code (rlcore/ops/attention.py), 2 to 3 times as fast as torch's.

The package flash-attn-4 compiles its kernels at run time, for Hopper and Blackwell. On an H100 it
needs half of FA2's time for long sequences (tools/results/gpu_speed.md), and SGLang requires it.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlcore.ops import attention
from rlcore.utils.log import announce

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float | None], Tensor]
"""Attention of q [Tq, heads, dim] over k, v [Tk, groups, dim] with the sequences' boundaries
[sequences + 1] int32, the lengths of the longest sequences and the scale; returns [Tq, heads, dim].
The causal mask is aligned to the last key."""

_FA4_GPUS = (9, 10)
"""Compute capabilities of Hopper and Blackwell."""


def choose(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel | None:
    """Return the kernel for `train.attention_backend` and announce it. None: no flash attention
    supports this device, dtype or head size, so that sequences must be padded."""
    if device.type == "cpu" and dtype == torch.float32 and attention.is_available():
        return attention.attend
    half = dtype in (torch.float16, torch.bfloat16)
    if device.type != "cuda" or not half or head_dim % 8 or head_dim > 256:
        return None
    lacks = "set by train.attention_backend" if backend == "fa2" else _lacks_fa4(device, head_dim)
    announce("attention", f"FA2 of torch ({lacks})" if lacks else "FA4")
    return fa2 if lacks else fa4


def _lacks_fa4(device: torch.device, head_dim: int) -> str:
    """Return why FA4 cannot be used; empty: it can."""
    if torch.cuda.get_device_capability(device)[0] not in _FA4_GPUS:
        return "FA4 needs Hopper or Blackwell"
    if head_dim > 128:
        return f"FA4 is used for heads of up to 128, here {head_dim}"
    try:
        _load_fa4()
    except ImportError as error:
        return f"FA4, which can be twice as fast, comes with tools/setup.sh --sglang: {error}"
    return ""


@cache
def _load_fa4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func

    # Its compiler says this once per kernel; the argument is for masks that are not used here.
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
    return flash_attn_varlen_func


def fa4(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """Run FA4, see `Kernel`. The gradient's bits repeat in torch's deterministic mode."""
    out = _load_fa4()(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
        softmax_scale=scale, causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return out[0] if isinstance(out, tuple) else out


def fa2(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """Run torch's variable-length flash attention, see `Kernel`."""
    from torch.nn.attention.varlen import varlen_attn

    asked: dict[str, Any] = {"enable_gqa": q.size(1) != k.size(1)} if _wants_to_be_asked() else {}
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=(-1, 0), **asked)
    assert isinstance(out, Tensor), "varlen_attn returned a logsumexp, too"
    return out


@cache
def _wants_to_be_asked() -> bool:
    """Return whether torch's `varlen_attn` has the argument `enable_gqa` (since torch 2.12).
    Earlier versions support grouped-query attention without the argument."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
