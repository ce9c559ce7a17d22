"""Provide SwiGLU as a module for Megatron's MLP, fast on the CPU.

Own code, to save only the input for backward and to write both gradients to one tensor.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.ops import rows


class SwiGLU(torch.nn.Module):
    """SwiGLU layer: maps gate and up in one tensor [..., 2F] to silu(gate) * up, [..., F]."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return _SwiGLU.apply(x)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return an empty state, because SwiGLU has no weights. Megatron's MLP calls this method on
        all its submodules."""
        return {}


class _SwiGLU(torch.autograd.Function):
    """SwiGLU with a backward that saves only the input and writes both gradients to one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        if rows.takes(x):
            return rows.swiglu(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if rows.takes(x):
            return rows.swiglu_back(grad, x)
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=dup)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=dgate)
        return dx
