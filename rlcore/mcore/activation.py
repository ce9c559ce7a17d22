"""SwiGLU as a module for Megatron's MLP, quick on the CPU.

Own code instead of Megatron's: it keeps the input only, and one tensor takes both gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class SwiGLU(torch.nn.Module):
    """[..., 2F] of gate and up -> silu(gate) * up, [..., F]."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return _SwiGLU.apply(x)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Megatron's MLP asks each of its parts; there is nothing to save."""
        return {}


class _SwiGLU(torch.autograd.Function):
    """Keeps the input only and writes both gradients into one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=dup)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=dgate)
        return dx
