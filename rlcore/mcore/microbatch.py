"""Divide a batch into micro-batches in the layout that the model needs.

Sequences are sorted by length, so that a micro-batch has sequences of similar length; `Cut.order`
restores the batch's order. Sequences with a common prefix are in one micro-batch, which holds the
prefix once (prefix_tree.py). Context parallelism pads every node of the prefix tree, that is every
sequence that shares nothing, to a multiple of 2 cp. Sequence parallelism adds a dummy sequence, so
that the number of tokens is a multiple of tp.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rlcore.hf.rope import inverse_frequencies
from rlcore.hf.rope_settings import Rope
from rlcore.mcore import attention, prefix_tree
from rlcore.mcore.attention import Packed
from rlcore.mcore.flash import Kernel
from rlcore.mcore.layout import ParallelLayout
from rlcore.mcore.prefix_tree import PrefixTree, groups
from rlcore.mcore.rope import tables
from rlcore.tensors import Batch, cumulative


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs of one forward pass. T: tokens of the micro-batch; L: rows of this rank's input."""

    batch: Batch  # T tokens on the learner's device; no tokens in a dummy micro-batch
    tokens: Tensor  # [1, L] model input
    positions: Tensor  # [1, L]
    targets: Tensor  # [L] token that each row predicts; 0 for rows that predict no token
    packed: Packed
    take: Tensor  # [T] row, over all cp ranks, that predicts each token; undefined for first tokens
    num_rows: int  # tokens that all cp ranks compute; below T if prefixes are shared
    predicted: Tensor  # [T] bool: False for the first token of each sequence
    sequence: Tensor  # [T] int64 index of the token's sequence
    routes: Tensor | None = None  # [L, layers * K] experts of each row; -1: not known
    shared_by: Tensor | None = None  # [L] int32 sequences with the token of each row; padding: 0


@dataclass(frozen=True, slots=True)
class Cut:
    """The micro-batches of one batch, each made when the model needs it."""

    micro_batches: Iterator[MicroBatch]
    count: int
    order: Tensor = field(repr=False)  # [T] each token's index in the batch, in micro-batch order


def rounded_count(count: int, layout: ParallelLayout) -> int:
    """Round the number of micro-batches up to what the pipeline schedule needs: at least one per
    stage, and with interleaving a multiple of the number of stages."""
    count = max(count, layout.pp)
    if layout.vpp > 1:
        count = -(-count // layout.pp) * layout.pp
    return count


class Cutter:
    """Divide batches into micro-batches for one rank."""

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        sequence_parallel: bool,
        head_dim: int,
        rope: Rope,
        dtype: torch.dtype,
        device: torch.device,
        budget: int,
        flash: Kernel | None = None,
        padded: bool = True,
        share_prefix: bool = False,
        counts_tokens: bool = False,
    ) -> None:
        """`flash` and `padded`: see `attention.plan`. `share_prefix`: whether common prefixes of
        sequences are computed once. `counts_tokens`: whether micro-batches have `shared_by`."""
        self._layout, self._flash, self._padded = layout, flash, padded
        self._share_prefix, self._counts_tokens = share_prefix, counts_tokens
        self._fill = layout.tp if sequence_parallel else 1
        self._device, self._budget = device, budget
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        self._inverse = inverse_frequencies(head_dim, rope).to(wide)
        self._factor = rope.attention_factor
        # On a GPU SGLang's tables are float32, too; elsewhere those of transformers have the dtype.
        self._dtype = wide if device.type == "cuda" else dtype
        self._cos, self._sin = tables(self._inverse, torch.arange(0), self._dtype)

    def groups(self, batch: Batch) -> list[list[int]]:
        """Return the indices of the sequences in each micro-batch of this batch."""
        return groups(batch.lengths, self._budget, self._tree(batch))

    def _tree(self, batch: Batch) -> PrefixTree:
        if not self._share_prefix:
            return prefix_tree.apart(batch.lengths)
        tokens, trained = batch.tokens.cpu().numpy(), batch.mask.cpu().numpy()
        return prefix_tree.build(tokens, trained, batch.lengths)

    def cut(self, batch: Batch, rows: list[list[int]], count: int) -> Cut:
        """Make a micro-batch of each list of sequences, then empty micro-batches up to `count`."""
        flat = [row for group in rows for row in group]
        starts, lengths = batch.cu_seqlens.tolist(), batch.lengths
        pieces = [torch.arange(starts[r], starts[r] + lengths[r]) for r in flat]
        order = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)
        whole = batch.select(flat)
        laid_out = self._lay_out_all(whole, [[lengths[r] for r in g] for g in rows], count)
        return Cut(self._moved(laid_out), count, order)

    def _moved(self, laid_out: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Move micro-batches to the device. On a GPU a thread lays out the next micro-batch in
        pinned memory meanwhile, so that copies do not wait for the GPU."""
        if self._device.type == "cpu":
            yield from map(self._with_rope, laid_out)
            return

        def pinned() -> MicroBatch | None:
            micro = next(laid_out, None)
            return None if micro is None else _each_tensor(micro, _pinned)

        gpu = torch.cuda.current_device()  # a new thread would use GPU 0
        with ThreadPoolExecutor(1, "layout", torch.cuda.set_device, (gpu,)) as thread:
            following = thread.submit(pinned)
            while (micro := following.result()) is not None:
                following = thread.submit(pinned)
                there = _each_tensor(micro, lambda x: x.to(self._device, non_blocking=True))
                yield self._with_rope(there)

    def _lay_out_all(
        self, whole: Batch, sizes: list[list[int]], count: int
    ) -> Iterator[MicroBatch]:
        token = row = 0
        for size in sizes:
            yield self._lay_out(_slice(whole, token, token + sum(size), size, row))
            token += sum(size)
            row += len(size)
        for _ in range(count - len(sizes)):
            yield self._lay_out(_slice(whole, 0, 0, [], 0))

    def _lay_out(self, batch: Batch) -> MicroBatch:
        layout, multiple = self._layout, 2 * self._layout.cp if self._layout.cp > 1 else 1
        tree = self._tree(batch)
        padded = [-(-node.size // multiple) * multiple for node in tree.nodes]
        rest = -(sum(padded) // layout.cp) % self._fill
        while rest % (2 if layout.cp > 1 else 1):
            rest += self._fill
        filler = rest * layout.cp or (0 if padded else multiple * self._fill)
        full = [*padded, filler] if filler else padded
        total = sum(full)
        lengths = batch.lengths
        count = torch.tensor(lengths, dtype=torch.int64)
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), count)
        # `place` has the position of each token of the batch in the padded nodes.
        place = torch.from_numpy(tree.rows([0, *accumulate(full)], lengths))
        predicted = torch.ones(batch.num_tokens, dtype=torch.bool)
        predicted[batch.cu_seqlens[:-1].long()] = False
        tokens = batch.tokens.cpu()
        inputs = torch.zeros(total, dtype=torch.int64)
        inputs[place] = tokens
        take = torch.roll(place, 1)  # of a first token: any row
        targets = torch.zeros(total, dtype=torch.int64)
        targets[take[predicted]] = tokens[predicted]
        routes = None
        if batch.routes is not None:
            known = (batch.routes >= 0).any(1)  # dense layers have no route
            routes = batch.routes.new_full((total, batch.routes.size(1)), -1)
            routes[place[known]] = batch.routes[known]
        shared_by = None
        if self._counts_tokens:
            shared_by = torch.bincount(place, minlength=total).int()
        index, positions = attention.local_positions(full, layout.cp, layout.cp_rank, tree)
        if layout.cp > 1:
            inputs, targets = inputs[index], targets[index]
            routes = None if routes is None else routes[index]
            shared_by = None if shared_by is None else shared_by[index]
        cu = cumulative(full)
        packed = Packed(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=max(full),
            max_seqlen_kv=max(full),
            plan=attention.plan(
                full,
                tree=tree,
                cp=layout.cp,
                cp_rank=layout.cp_rank,
                flash=self._flash,
                padded=self._padded,
            ),
        )
        return MicroBatch(
            batch=batch.with_(routes=None),
            tokens=inputs.unsqueeze(0),
            positions=positions.unsqueeze(0),
            targets=targets,
            packed=packed,
            take=take,
            num_rows=tree.num_tokens,
            predicted=predicted,
            sequence=sequence,
            routes=routes,
            shared_by=shared_by,
        )

    def _with_rope(self, micro: MicroBatch) -> MicroBatch:
        """Add the RoPE tables of the micro-batch's positions."""
        assert micro.packed.plan is not None
        longest = micro.packed.plan.max_key
        if self._cos.size(0) < longest:
            every = torch.arange(max(longest, 2 * self._cos.size(0)))
            cos, sin = tables(self._inverse, every, self._dtype, self._factor)
            self._cos, self._sin = cos.to(self._device), sin.to(self._device)
        where = micro.positions.squeeze(0)
        cos, sin = (table.index_select(0, where) for table in (self._cos, self._sin))
        return replace(micro, packed=replace(micro.packed, cos=cos, sin=sin))


def _pinned(x: Tensor) -> Tensor:
    """Return the tensor in pinned memory, or on the GPU if it is there already."""
    return x if x.is_cuda else x.pin_memory()


def _fields(batch: Batch) -> dict[str, Tensor]:
    """Return the per-token tensors of the batch by name."""
    values = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "cu_seqlens"}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _slice(batch: Batch, start: int, stop: int, lengths: Sequence[int], row: int) -> Batch:
    cut = {name: value[start:stop] for name, value in _fields(batch).items()}
    ids = batch.ids[row : row + len(lengths)]
    return batch.with_(**cut, cu_seqlens=cumulative(lengths), ids=ids)


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change all tensors of a micro-batch, except the boundaries of the batch's sequences, which
    stay on the host."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Batch):
        return value.with_(**{name: change(part) for name, part in _fields(value).items()})
    if isinstance(value, tuple):
        return tuple(_each_tensor(part, change) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _each_tensor(getattr(value, f.name), change) for f in fields(value)}
        return replace(value, **parts)
    return value
