"""Causal attention of packed float32 sequences on the CPU, in native code (csrc/attention).

torch's kernel for the CPU needs sequences of equal length, so that shorter ones are padded, and
computes also what the causal mask hides.
"""

import math
from typing import Any

import torch
from torch import Tensor

from rlcore.ops import native


def is_available() -> bool:
    """Return whether this machine's build has the ops."""
    return native.torch_ops("attention") is not None


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """Run the native kernel; see `rlcore.mcore.flash.Kernel`. Results repeat bit by bit."""
    return _Attention.apply(q, k, v, cu_q, cu_k, scale or 1 / math.sqrt(q.size(-1)))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        torch.ops.rlcore_native.attend(q, k, v, cu_q, cu_k, scale, out, lse)
        ctx.save_for_backward(q, k, v, cu_q, cu_k, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cu_q, cu_k, out, lse = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.rlcore_native.attend_grad(
            grad.contiguous(), q, k, v, cu_q, cu_k, ctx.scale, out, lse, *grads
        )
        return *grads, None, None, None
