"""Provide an RMSNorm for Megatron's layer specs, with sequence parallelism and fast backward.

Megatron's own wrapper does not support sequence parallelism. With rlcore's RMSNorm, an attribute of
the weight makes Megatron sum the weight's gradient over the tensor-parallel ranks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.mcore.compat import kernels_of


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
    if (kernels := kernels_of(x)) is not None:
        return _RMSNorm.apply(x, weight, eps, kernels)
    return F.rms_norm(x, weight.shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with a backward of one pass; torch's takes several times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernels: Any) -> Tensor:
        out, scales = kernels.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scales)
        ctx.kernels = kernels
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scales = ctx.saved_tensors
        dx, dweight = ctx.kernels.rms_norm_back(grad, x, weight, scales)
        return dx.view(x.shape), dweight.to(weight.dtype), None, None
