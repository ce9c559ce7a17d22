"""Provide an RMSNorm for Megatron's layer specs, with sequence parallelism and fast on the CPU.

Megatron's own wrapper does not support sequence parallelism. With rlcore's RMSNorm, an attribute of
the weight makes Megatron sum the weight's gradient over the tensor-parallel ranks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.mcore.compat import compiled, varying


class RMSNorm(torch.nn.Module):
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        mark = bool(config.sequence_parallel)
        self.weight.sequence_parallel = mark  # type: ignore[attr-defined]  # Megatron reads it

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to x [..., H] with weight [H]; the result [..., H] has x's dtype."""
    if x.is_cuda:
        return compiled(_rms_norm)(varying(x.flatten(0, -2)), weight, eps).view_as(x)
    if x.dtype is not torch.bfloat16 and torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x if x.dtype is torch.float64 else x.float()
    scale = (exact.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (exact * scale * weight).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with half the memory passes of torch's CPU version."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.size(-1)).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        # Unlike RMSNorm, LayerNorm's kernel subtracts scale * mean(grad * weight): add it back.
        zero = torch.zeros_like(scale)
        grad = grad.contiguous()
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x.contiguous(), weight.shape, zero, scale, weight, None, [True, True, False]
        )
        mean = torch.matmul(grad, weight.unsqueeze(-1)).div_(weight.numel())
        return dx.add_(mean.mul_(scale)), dweight, None
