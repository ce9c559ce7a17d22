"""RMSNorm, RoPE and the weight gradients of experts as Triton kernels. Sums have a fixed order.

torch comes with Triton where it is built for a GPU. Import this module only where
`compat.takes_kernels` says so.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""Numbers that a program holds at a time, at least."""
_PROGRAMS = 528
"""Programs of RMSNorm's backward: four for every multiprocessor of an H100."""


@triton.jit
def _norm(x, weight, out, scales, rows, inner, outer_stride, inner_stride, size, eps,
          ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < size)
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner) * inner_stride
    value = tl.load(x + start + column, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1)[:, None] / size + eps)
    tl.store(scales + row, scale, row < rows)
    factor = tl.load(weight + column, column < size, other=0.0).to(tl.float32)
    made = (value * scale * factor).to(x.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * size + column, made, inside)


@triton.jit
def _norm_back(grad, x, weight, scales, dx, dweights, rows, inner, outer_stride, inner_stride, size,
               ROWS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    factor = tl.load(weight + column, column < size, other=0.0).to(tl.float32)
    total = tl.zeros([1, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), PROGRAMS):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < size)
        start = (row // inner).to(tl.int64) * outer_stride + (row % inner) * inner_stride
        scale = tl.load(scales + row, row < rows, other=0.0)
        value = tl.load(x + start + column, inside, other=0.0).to(tl.float32) * scale
        here = row.to(tl.int64) * size + column
        upstream = tl.load(grad + here, inside, other=0.0).to(tl.float32)
        total += tl.sum(upstream * value, 0)[None, :]
        upstream *= factor
        mean = tl.sum(upstream * value, 1)[:, None] / size
        tl.store(dx + here, (scale * (upstream - value * mean)).to(x.dtype.element_ty), inside)
    tl.store(dweights + tl.program_id(0) * size + column, total, column < size)


@triton.jit
def _turn(x, cos, sin, out, heads, token_stride, head_stride, half, sign,
          HEADS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (column < half)
    first = x + token * token_stride + head * head_stride + column
    a = tl.load(first, inside, other=0.0).to(tl.float32)
    b = tl.load(first + half, inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * half + column, column < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + column, column < half, other=0.0).to(tl.float32) * sign
    made = out + (token * heads + head) * 2 * half + column
    tl.store(made, (a * c - b * s).to(x.dtype.element_ty), inside)
    tl.store(made + half, (b * c + a * s).to(x.dtype.element_ty), inside)


@triton.jit
def _add_products(x, grad, ends, totals, size_in, size_out,
                  IN: tl.constexpr, OUT: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    expert = tl.program_id(1)
    start = tl.load(ends + expert - 1, expert > 0, other=0)
    end = tl.load(ends + expert)
    if start == end:
        return
    across = tl.cdiv(size_in, IN)
    i = (tl.program_id(0) // across) * OUT + tl.arange(0, OUT)
    j = (tl.program_id(0) % across) * IN + tl.arange(0, IN)
    total = tl.zeros([OUT, IN], tl.float32)
    for first in range(start, end, TOKENS):
        token = (first + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
        inside = token < end
        g = tl.load(
            grad + token * size_out + i[None, :], inside & (i < size_out)[None, :], other=0.0
        )
        v = tl.load(x + token * size_in + j[None, :], inside & (j < size_in)[None, :], other=0.0)
        total = tl.dot(tl.trans(g), v, total)
    there = tl.load(totals + expert).to(tl.pointer_type(tl.float32))
    there += i.to(tl.int64)[:, None] * size_in + j[None, :]
    held = (i < size_out)[:, None] & (j < size_in)[None, :]
    tl.store(there, tl.load(there, held, other=0.0) + total, held)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of x [..., H], and every row's scale [rows] float32 for `rms_norm_back`."""
    x = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scales = torch.empty(x.size(0) * x.size(1), dtype=torch.float32, device=x.device)
    given = (x.size(0) * x.size(1), x.size(1), x.stride(0), x.stride(1), x.size(2))
    tiles, shape = _tiles(given[0], x.size(2))
    if tiles:
        _norm[(tiles,)](x, weight, out, scales, *given, eps, **shape)
    return out, scales


def rms_norm_back(grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of RMSNorm by x [..., H] and by weight [H] in float32."""
    x, grad = _rows(x), grad.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    given = (scales.numel(), x.size(1), x.stride(0), x.stride(1), x.size(2))
    tiles, shape = _tiles(given[0], x.size(2))
    programs = min(tiles, _PROGRAMS)
    dweights = torch.empty(programs, x.size(2), dtype=torch.float32, device=x.device)
    if tiles:
        _norm_back[(programs,)](
            grad, x, weight, scales, dx, dweights, *given, PROGRAMS=programs, **shape
        )
    return dx, dweights.sum(0)


def turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Return x [T, heads, head_dim] turned by angles with cos and sin [T, 1, head_dim / 2]."""
    x = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = x.size(2) // 2
    if x.size(0):
        _turn[(x.size(0),)](
            x, cos.contiguous(), sin.contiguous(), out, x.size(1), x.stride(0), x.stride(1), half,
            -1.0 if back else 1.0,
            HEADS=triton.next_power_of_2(x.size(1)), BLOCK=triton.next_power_of_2(half),
        )  # fmt: skip
    return out


def add_weight_grads(x: Tensor, grad: Tensor, ends: Tensor, totals: Sequence[Tensor]) -> None:
    """Add each expert's grad.T @ x to its total [out, in] float32, in one launch.

    Args:
        x: tokens sorted by expert, [T, in] in half precision.
        grad: gradient of the products, [T, out].
        ends: cumulative number of tokens of the experts, [E] int32.
        totals: contiguous totals of the experts.
    """
    places = torch.tensor([total.data_ptr() for total in totals]).pin_memory()
    tile = {"IN": 128, "OUT": 128, "TOKENS": 64}  # larger ones spill registers
    tiles = triton.cdiv(x.size(1), tile["IN"]) * triton.cdiv(grad.size(1), tile["OUT"])
    _add_products[(tiles, len(totals))](
        x.contiguous(), grad.contiguous(), ends, places.to(x.device, non_blocking=True),
        x.size(1), grad.size(1), **tile, num_warps=8, num_stages=3,
    )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """View x [A, H] or [..., n, H] as [A, n, H] with neighbouring columns; copy only if needed."""
    x = x.unsqueeze(1) if x.dim() == 2 else x.flatten(0, -3)
    return x if x.stride(2) == 1 else x.contiguous()


def _tiles(rows: int, size: int) -> tuple[int, dict[str, int]]:
    block = triton.next_power_of_2(size)
    at_a_time = max(1, _TILE // block)
    return triton.cdiv(rows, at_a_time), {
        "ROWS": at_a_time,
        "BLOCK": block,
        "num_warps": 4 if block <= 4096 else 8,
    }
