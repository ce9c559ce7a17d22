"""Compute causal self-attention on packed tokens in plain torch, with RoPE and context parallelism.

Megatron's layer spec uses `CoreAttention`; q, k, v have the shape [T, heads, dim]. `plan` makes one
`AttentionPlan` per micro-batch, which all layers share. `Packed`, a subclass of Megatron's
`PackedSeqParams`, carries the plan to the layers.

On CUDA in half precision, flash attention runs if it supports the head size (flash.py). Otherwise,
sequences of similar length form dense batches (buckets) with padding on the right, which the causal
mask hides.

Sequences with common prefixes may form a tree of nodes (prefix_tree.py), each packed once. A node's
tokens attend to the nodes above and to their own prefix in the node.

Context-parallel rank r holds chunks r and 2 cp - 1 - r of every node (zigzag); nodes are padded to
a multiple of 2 cp. Keys and values are gathered; each chunk attends to its prefix.

Own code instead of Transformer Engine's attention, because plain torch also runs on CPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rlcore.mcore import compat
from rlcore.mcore.flash import Kernel
from rlcore.mcore.prefix_tree import PrefixTree
from rlcore.mcore.rope import rotate

SHRINK = 0.8
"""Minimum sequence length in a padded bucket, as a fraction of the bucket's longest sequence."""


@dataclass(frozen=True, slots=True)
class PaddedBucket:
    """Bucket of `count` units, padded to `query` queries and `key` keys. If queries start after
    their unit's first key, the bucket needs a `mask`."""

    count: int
    query: int
    key: int
    mask: Tensor | None  # [count, 1, query, key] bool


@dataclass(frozen=True, slots=True)
class PaddedPlan:
    """Position of every token in the padded buckets."""

    buckets: tuple[PaddedBucket, ...]
    query_index: Tensor  # [padded queries] index of this rank's token in each padded query row
    key_index: Tensor  # [padded keys] token in each padded key row, as index in the packed batch
    query_rows: Tensor  # [T] padded query row of each token of this rank
    key_rows: Tensor | None  # [T] padded key row of each token; None if keys repeat in rows


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Lengths and positions of the units of packed sequences. A unit is a node of the prefix tree
    (a sequence, if it shares nothing) or, with context parallelism, a chunk of a node."""

    padded: PaddedPlan | None  # None with flash attention or Transformer Engine
    gathered: Tensor | None  # [cp*T] position of each token in the all-gather's output, if cp > 1
    cu_query: Tensor  # [units + 1] int32: this rank's cumulative query counts
    cu_key: Tensor  # [units + 1] int32: this rank's cumulative key counts
    prefix: Tensor | None  # [all units' keys] index of each key in the packed batch, if keys repeat
    max_query: int
    max_key: int
    flash: Kernel | None  # None: attention runs on the padded buckets


@dataclass
class Packed(PackedSeqParams):
    """Megatron's description of packed sequences, plus the attention plan and RoPE tables."""

    plan: AttentionPlan | None = None
    cos: Tensor | None = None  # [T, 1, dim / 2]
    sin: Tensor | None = None

    @property
    def gathered(self) -> Tensor:
        """Position of each token in the output of the context-parallel all-gather."""
        assert self.plan is not None and self.plan.gathered is not None
        return self.plan.gathered


@dataclass(frozen=True, slots=True)
class _Unit:
    rows: range  # indices of the unit's tokens among this rank's tokens
    start: int  # index of the first token of the unit's node in the whole packed batch
    above: np.ndarray  # int64 indices of the tokens before the node in the whole packed batch
    first: int  # position of the first query in its sequences
    key: int  # number of keys that the last query attends to

    @property
    def query(self) -> int:
        return len(self.rows)

    @property
    def depth(self) -> int:
        """Number of tokens before the node."""
        return len(self.above)

    def keys(self) -> Tensor:
        """Return the index of each key in the packed batch, [key]."""
        own = np.arange(self.start, self.start + self.key - self.depth)
        return torch.from_numpy(np.concatenate((self.above, own)))


def local_positions(
    lengths: Sequence[int], cp: int, cp_rank: int, tree: PrefixTree | None = None
) -> tuple[Tensor, Tensor]:
    """Return two int64 tensors [T/cp] for the tokens of one context-parallel rank: each token's
    index in the packed batch, and its position in its sequence. Arguments as in `plan`."""
    index, position = [], []
    for unit in _units(lengths, cp, cp_rank, tree):
        here = torch.arange(unit.query)
        position.append(here + unit.first)
        index.append(here + (unit.start - unit.depth + unit.first))
    return torch.cat(index), torch.cat(position)


def _units(
    lengths: Sequence[int], cp: int, cp_rank: int, tree: PrefixTree | None = None
) -> list[_Unit]:
    units, row, start = [], 0, 0
    nothing = np.zeros(0, np.int64)
    paths: dict[int, np.ndarray] = {-1: nothing}  # tokens of a node and of those above, unpadded
    nodes = tree.nodes if tree is not None else ()
    parents = {node.parent for node in nodes}
    for i, length in enumerate(lengths):
        above = paths[nodes[i].parent] if i < len(nodes) else nothing
        depth = len(above)
        if i in parents:
            paths[i] = np.concatenate((above, np.arange(start, start + nodes[i].size)))
        if cp == 1:
            units.append(_Unit(range(row, row + length), start, above, depth, depth + length))
            row += length
        else:
            chunk = length // (2 * cp)
            assert chunk * 2 * cp == length, (length, cp)
            for part in (cp_rank, 2 * cp - 1 - cp_rank):
                rows, first = range(row, row + chunk), depth + part * chunk
                units.append(_Unit(rows, start, above, first, first + chunk))
                row += chunk
        start += length
    return units


def _bucketed(units: Sequence[_Unit]) -> list[list[_Unit]]:
    """Group units with similar numbers of queries and of keys into buckets."""
    buckets: list[list[_Unit]] = []
    for unit in sorted(units, key=lambda u: (-u.query, -u.key, u.rows.start)):
        for bucket in buckets:
            head = bucket[0]
            low, high = sorted((unit.key, head.key))
            if unit.query >= SHRINK * head.query - 4 and low >= SHRINK * high - 4:
                bucket.append(unit)
                break
        else:
            buckets.append([unit])
    return buckets


def plan(
    lengths: Sequence[int],
    *,
    tree: PrefixTree | None = None,
    cp: int = 1,
    cp_rank: int = 0,
    flash: Kernel | None = None,
    padded: bool = True,
) -> AttentionPlan:
    """Make the attention plan of packed sequences, or of the nodes of a prefix tree.

    Args:
        lengths: number of tokens of each sequence or node, with padding; if cp > 1, multiples of
            2 cp. After the nodes of `tree`, there may be one more length, of a dummy sequence.
        flash: kernel of flash.py; without one, attention runs on padded buckets, whose masks take
            query * key bytes.
        padded: false with Transformer Engine, whose attention needs no buckets.
    """
    units = _units(lengths, cp, cp_rank, tree)
    repeats = cp > 1 or any(unit.depth for unit in units)
    gathered = None
    if cp > 1:
        order = torch.cat([local_positions(lengths, cp, rank)[0] for rank in range(cp)])
        gathered = torch.empty_like(order)
        gathered[order] = torch.arange(order.numel())
    return AttentionPlan(
        padded=_padded(units, repeats) if padded and flash is None else None,
        gathered=gathered,
        cu_query=_cumulative([unit.query for unit in units]),
        cu_key=_cumulative([unit.key for unit in units]),
        prefix=torch.cat([unit.keys() for unit in units]) if repeats else None,
        max_query=max(unit.query for unit in units),
        max_key=max(unit.key for unit in units),
        flash=flash,
    )


def _padded(units: Sequence[_Unit], repeats: bool) -> PaddedPlan:
    """Make the padded buckets. `repeats`: whether a key may be in several rows."""
    total = sum(unit.query for unit in units)
    query_index, key_index, buckets = [], [], []
    query_rows = torch.empty(total, dtype=torch.int64)
    key_rows = None if repeats else torch.empty(total, dtype=torch.int64)
    queries = 0
    for group in _bucketed(units):
        query = max(unit.query for unit in group)
        key = max(unit.key for unit in group)
        at_query, at_key = torch.arange(query), torch.arange(key)
        rows = torch.tensor([unit.rows.start for unit in group]).unsqueeze(1)
        firsts = torch.tensor([unit.first for unit in group]).unsqueeze(1)
        q_len = torch.tensor([unit.query for unit in group]).unsqueeze(1)
        k_len = torch.tensor([unit.key for unit in group]).unsqueeze(1)
        starts = torch.tensor([unit.start - unit.depth for unit in group]).unsqueeze(1)
        # Padding repeats the last real token to stay finite; no real token attends to padding.
        query_index.append((rows + at_query.minimum(q_len - 1)).flatten())
        keys = starts + at_key.minimum(k_len - 1)
        for i, unit in enumerate(group):
            if unit.depth:
                keys[i, : unit.depth] = torch.from_numpy(unit.above)
        key_index.append(keys.flatten())
        real = (at_query < q_len).flatten()
        place = torch.arange(len(group) * query)[real] + queries
        query_rows[query_index[-1][real]] = place
        if key_rows is not None:
            key_rows[query_index[-1][real]] = place
        mask = None
        if any(unit.key > unit.query for unit in group):
            # A padded query attends at least to key 0: softmax of an empty mask row would be NaN.
            mask = at_key <= (firsts + at_query.minimum(q_len - 1)).unsqueeze(-1)
            mask = mask.unsqueeze(1)
        buckets.append(PaddedBucket(len(group), query, key, mask))
        queries += len(group) * query
    return PaddedPlan(
        tuple(buckets), torch.cat(query_index), torch.cat(key_index), query_rows, key_rows
    )


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


class CoreAttention(MegatronModule):
    """Core attention of Megatron's layer spec: RoPE, then causal attention within each sequence."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Packed | None = None,
    ) -> Tensor:
        """Map query [T, heads, dim], key [T, groups, dim] and value [T, groups, value_dim] to the
        output [T, heads * value_dim]."""
        packed = packed_seq_params
        assert packed is not None and packed.plan is not None, "packed input with a plan is needed"
        if packed.cos is not None and packed.sin is not None:
            query = rotate(query, packed.cos, packed.sin)
            key = rotate(key, packed.cos, packed.sin)
        if self.cp_group is not None:
            key = _GatherTokens.apply(key, self.cp_group, packed.gathered)
            value = _GatherTokens.apply(value, self.cp_group, packed.gathered)
        return attend(query, key, value, packed.plan, self.scale).flatten(1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, made: AttentionPlan, scale: float | None = None
) -> Tensor:
    """Return the attention output [T, heads, value_dim] of q [T, heads, dim] over packed k [cp*T,
    groups, dim] and v [cp*T, groups, value_dim]."""
    if (missing := k.size(-1) - v.size(-1)) > 0:  # kernels need values as large as keys
        return attend(q, k, F.pad(v, (0, missing)), made, scale)[..., :-missing]
    if q.is_cuda and torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled():
        return _Reproducible.apply(q, k, v, made, scale)
    return _attend(q, k, v, made, scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, made: AttentionPlan, scale: float | None) -> Tensor:
    if made.flash is None:
        assert made.padded is not None, "the plan was made for Transformer Engine"
        return _attend_padded(q, k, v, made.padded, scale)
    if made.prefix is not None:
        k, v = k.index_select(0, made.prefix), v.index_select(0, made.prefix)
    # The causal mask is aligned to the last key, because a chunk also attends to its prefix.
    return made.flash(q, k, v, made.cu_query, made.cu_key, made.max_query, made.max_key, scale)


def _attend_padded(
    q: Tensor, k: Tensor, v: Tensor, made: PaddedPlan, scale: float | None
) -> Tensor:
    rows = made.query_rows
    q_all = _Spread.apply(q, made.query_index, rows)
    k_all = _Spread.apply(k, made.key_index, made.key_rows)
    v_all = _Spread.apply(v, made.key_index, made.key_rows)
    queries = q_all.split([b.count * b.query for b in made.buckets])
    keys = k_all.split([b.count * b.key for b in made.buckets])
    values = v_all.split([b.count * b.key for b in made.buckets])
    outs = []
    for bucket, query, key, value in zip(made.buckets, queries, keys, values, strict=True):
        out = F.scaled_dot_product_attention(
            _dense(query, bucket.count),
            _dense(key, bucket.count),
            _dense(value, bucket.count),
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            scale=scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return _Collect.apply(outs[0] if len(outs) == 1 else torch.cat(outs), rows)


def _dense(x: Tensor, count: int) -> Tensor:
    """Reshape [count * length, heads, dim] to [count, heads, length, dim]."""
    return x.view(count, -1, x.size(1), x.size(2)).transpose(1, 2)


class _Reproducible(torch.autograd.Function):
    """Compute attention with a bitwise reproducible gradient. If torch's deterministic mode only
    warns, fused kernels sum in varying order; therefore backward runs in strict mode."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, made: AttentionPlan, scale: float | None
    ) -> Tensor:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            ctx.inputs, ctx.out = [q, k, v], _attend(q, k, v, made, scale)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        out, inputs = ctx.out, ctx.inputs
        ctx.out = ctx.inputs = None  # free the saved tensors now, not when autograd frees the graph
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            dq, dk, dv = torch.autograd.grad(out, inputs, grad)
        finally:
            torch.use_deterministic_algorithms(True, warn_only=warns)
        return dq, dk, dv, None, None


class _Spread(torch.autograd.Function):
    """Copy token rows into padded buckets. Padding has no gradient: no real token attends to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, rows: Tensor | None) -> Tensor:
        ctx.save_for_backward(index, rows)
        ctx.size = x.size(0)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        index, rows = ctx.saved_tensors
        if rows is not None:
            return grad.index_select(0, rows), None, None
        out = grad.new_zeros(ctx.size, *grad.shape[1:])
        return out.index_add_(0, index, grad), None, None


class _Collect(torch.autograd.Function):
    """Select the rows of real tokens from padded buckets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = x.size(0)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.size, *grad.shape[1:])
        return out.index_copy_(0, rows, grad), None


class _GatherTokens(torch.autograd.Function):
    """Gather the tokens of all context-parallel ranks, in the order of the packed batch. Backward
    sums the gradients over the ranks and keeps this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, gathered: Tensor) -> Tensor:
        ctx.group, ctx.size = group, x.size(0)
        ctx.save_for_backward(gathered)
        out = x.new_empty(group.size() * x.size(0), *x.shape[1:])
        compat.all_gather(out, x.contiguous(), group=group)
        return out.index_select(0, gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gathered,) = ctx.saved_tensors
        ranks = torch.empty_like(grad).index_copy_(0, gathered, grad)
        out = grad.new_empty(ctx.size, *grad.shape[1:])
        compat.reduce_scatter(out, ranks, group=ctx.group)
        return out, None, None
