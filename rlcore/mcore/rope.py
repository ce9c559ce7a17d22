"""Apply rotary position embedding (RoPE) to packed tokens, with tables made once per micro-batch.

Own code, because Megatron splits packed tokens into sequences in Python, per layer and tensor.
"""

from typing import Any

import torch
from torch import Tensor

from rlcore.mcore.compat import kernels_of


def tables(
    inverse: Tensor, positions: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the RoPE angles at `positions` [T], each [T, 1, rotating dimensions /
    2], times `factor`."""
    angles = (positions.to(inverse.dtype).unsqueeze(-1) * inverse).unsqueeze(1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to the first dimensions of x [T, heads, head_dim], twice as many as the tables
    have; i and i + half of them form a pair. The other dimensions stay."""
    return _Rotate.apply(x, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Multiply pairs by `cos` and `sin`, which need not be a rotation: with `back`, by the
    transposed matrix."""
    rotating = 2 * cos.size(-1)
    if rotating < x.size(-1):
        return torch.cat((_turn(x[..., :rotating], cos, sin, back), x[..., rotating:]), -1)
    if (kernels := kernels_of(x)) is not None:
        return kernels.turn(x, cos, sin, back)
    half = x.size(-1) // 2
    a, b = x[..., :half], x[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = out[..., :half], out[..., half:]
    sign = -1.0 if back else 1.0
    torch.mul(a, cos, out=first)
    first.addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=second)
    second.addcmul_(a, sin, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, back=True), None, None
