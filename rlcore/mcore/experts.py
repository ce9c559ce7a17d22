"""Compute all experts of a rank with grouped GEMM, without Transformer Engine.

torch's `grouped_mm` multiplies the tokens of each expert by that expert's weights in one launch.
Megatron's own grouped GEMM needs Transformer Engine; without it Megatron runs the experts' MLPs one
by one, with several launches each. The weights stay one parameter per expert, so that checkpoints
and weight updates do not change.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from rlcore.mcore import compat, wgrad
from rlcore.utils.log import announce

_ALIGN = 16
"""Bytes of which the size of a row must be a multiple; required by `grouped_mm`."""


@cache
def can_group(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's `grouped_mm` and its gradients work on this device."""
    bounds = [1, 3]
    try:
        x, *weights = (
            torch.ones(n, 16, device=device, dtype=dtype, requires_grad=True) for n in (3, 16, 16)
        )
        offsets = torch.tensor(bounds, device=device, dtype=torch.int32)
        product = _Products.apply(x, offsets, bounds, False, *weights)
        product.backward(torch.ones_like(product))
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return False  # an older torch, or a GPU or dtype that grouped_mm does not support
    return True


def experts_of(config: TransformerConfig, device: torch.device) -> type[SequentialMLP]:
    """Return the class of a layer's experts, and announce the choice."""
    width = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
    sizes, dtype = (config.hidden_size, width), config.params_dtype
    why = ""
    if any(size * dtype.itemsize % _ALIGN for size in sizes):
        why = f"rows of {sizes[0]} or {sizes[1]} {dtype} are no multiple of {_ALIGN} bytes"
    elif not can_group(device, dtype):
        why = f"torch has no grouped GEMM in {dtype} on this device"
    announce("experts", f"one by one, since {why}" if why else "grouped GEMM")
    return SequentialMLP if why else GroupedExperts


class GroupedExperts(SequentialMLP):
    """Experts of a rank without biases, with SwiGLU; replaces Megatron's `SequentialMLP`."""

    def forward(
        self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the experts' outputs, each multiplied by its routing probability.

        Args:
            tokens: tokens sorted by expert, [T, H].
            tokens_per_expert: [E], on the host.
            probs: routing probability of each token, [T].
        """
        if not len(tokens) or len(self.local_experts) == 1:
            return super().forward(tokens, tokens_per_expert, probs)
        ends = tokens_per_expert.cumsum(0)
        offsets = ends.to(torch.int32)
        if tokens.is_cuda:
            offsets = offsets.pin_memory().to(tokens.device, non_blocking=True)
        bounds, fuses = ends.tolist(), self.config.gradient_accumulation_fusion
        fc1, fc2 = (
            [getattr(expert, name).weight for expert in self.local_experts]
            for name in ("linear_fc1", "linear_fc2")
        )
        x = _Products.apply(tokens, offsets, bounds, fuses, *fc1)
        if self.config.bias_activation_fusion:
            x = weighted_bias_swiglu_impl(x, None, probs.unsqueeze(-1))
        else:
            x = (self.local_experts[0].activation_func(x) * probs.unsqueeze(-1)).to(x.dtype)
        return _Products.apply(x, offsets, bounds, fuses, *fc2), None


class _Products(torch.autograd.Function):
    """Product of each expert's tokens [T, in], sorted by expert, and its weights [out, in]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, offsets: Tensor, bounds: list[int], fuses: bool, *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, offsets, *weights)
        ctx.bounds, ctx.fuses = bounds, fuses
        return F.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, offsets, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        dx = F.grouped_mm(grad, torch.stack(weights), offs=offsets)
        if not any(ctx.needs_input_grad[4:]):  # frozen, with adapters elsewhere (`--lora.rank`)
            return dx, None, None, None, *[None] * len(weights)
        if not ctx.fuses:
            dw = F.grouped_mm(grad.t(), x, offs=offsets)
            return dx, None, None, None, *dw.unbind()
        if compat.takes_kernels(x):
            from rlcore.mcore import kernels

            kernels.add_weight_grads(x, grad, offsets, [w.main_grad for w in weights])
        else:
            for start, end, weight in zip([0, *ctx.bounds], ctx.bounds, weights, strict=False):
                wgrad.add(x[start:end], grad[start:end], weight.main_grad)
        for weight in weights:
            weight.grad_added_to_main_grad = True
        return dx, None, None, None, *[None] * len(weights)
