"""RMSNorm, RoPE and SwiGLU in float32 on the CPU, each in one pass over memory (csrc/rows).

`rms_norm`, `rms_norm_back` and `turn` take what those of rlcore/mcore/kernels.py take.
"""

import torch
from torch import Tensor

from rlcore.ops import native

_BLOCK = 256  # rows that add up to one row of the partial gradients of a weight, as in csrc


def takes(x: Tensor) -> bool:
    """Return whether native code takes x."""
    if x.device.type != "cpu" or x.dtype is not torch.float32:
        return False
    return native.torch_ops("norm, RoPE, SwiGLU") is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of x [..., H], and every row's scale [rows] for `rms_norm_back`."""
    x = _rows(x)
    out, scales = x.new_empty(x.shape), x.new_empty(x.size(0) * x.size(1))
    torch.ops.rlcore_native.norm_rows(x, weight, eps, out, scales)
    return out, scales


def rms_norm_back(grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of RMSNorm by x [..., H] and by weight [H]."""
    x = _rows(x)
    dx = x.new_empty(x.shape)
    dweights = x.new_empty(-(-scales.numel() // _BLOCK), x.size(2))
    torch.ops.rlcore_native.norm_rows_grad(grad.contiguous(), x, weight, scales, dx, dweights)
    return dx, dweights.sum(0)


def turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Return x [T, heads, head_dim] turned by angles with cos and sin [T, 1, head_dim / 2]."""
    x = _rows(x)
    out = x.new_empty(x.shape)
    torch.ops.rlcore_native.turn_rows(x, cos.contiguous(), sin.contiguous(), back, out)
    return out


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up of gate and up in one tensor [..., 2F]."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], x.size(-1) // 2)
    torch.ops.rlcore_native.swiglu_rows(x.flatten(0, -2), out)
    return out


def swiglu_back(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `swiglu` by x."""
    x = x.contiguous()
    dx = torch.empty_like(x)
    torch.ops.rlcore_native.swiglu_rows_grad(grad.contiguous(), x.flatten(0, -2), dx)
    return dx


def _rows(x: Tensor) -> Tensor:
    """View x [A, H] or [..., n, H] as [A, n, H] with neighbouring columns; copy only if needed."""
    x = x.unsqueeze(1) if x.dim() == 2 else x.flatten(0, -3)
    return x if x.stride(2) == 1 else x.contiguous()
