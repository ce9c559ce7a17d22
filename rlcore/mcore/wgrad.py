"""Add the weight gradients of linear layers up in float32 within their matrix products, on a GPU.

Megatron calls a kernel of Apex for this. Without Apex, torch's `addmm` with a float32 output does
the same: the products are not rounded to 16 bits first, and no pass over the gradients follows.
"""

from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from rlcore.ops.head import adds_products


def prepare(dtype: torch.dtype) -> bool:
    """Let Megatron's linear layers with weights of `dtype` use torch's `addmm`. Return whether this
    GPU and torch can do so."""
    if not torch.cuda.is_available() or dtype not in (torch.bfloat16, torch.float16):
        return False
    if not adds_products(torch.device("cuda", torch.cuda.current_device()), dtype):
        return False
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add)
        layers._grad_accum_fusion_available = True
    return True


def add(inputs: Tensor, grad: Tensor, total: Tensor) -> None:
    """Add grad.T [out, T] @ inputs [T, in] to `total` [out, in] float32."""
    if inputs.size(0):
        torch.addmm(total, grad.t(), inputs, out_dtype=torch.float32, out=total)
