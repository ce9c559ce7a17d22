"""Provide an RMSNorm for Megatron's layer specs, with sequence parallelism and fast on the CPU.

Megatron's own wrapper does not support sequence parallelism. With rlcore's RMSNorm, an attribute of
the weight makes Megatron sum the weight's gradient over the tensor-parallel ranks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.mcore.compat import takes_kernels


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
    if takes_kernels(x):
        return _OnGPU.apply(x, weight, eps)
    if x.device.type == "cpu" and x.dtype is not torch.bfloat16 and torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _OnGPU(torch.autograd.Function):
    """RMSNorm with a backward of one pass; torch's takes several times as long on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from rlcore.mcore import kernels

        out, scales = kernels.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scales)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from rlcore.mcore import kernels

        x, weight, scales = ctx.saved_tensors
        dx, dweight = kernels.rms_norm_back(grad, x, weight, scales)
        return dx.view(x.shape), dweight.to(weight.dtype), None


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
