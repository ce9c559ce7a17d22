"""Allocate the engine's KV cache: one dense slab per layer, with one slot per sequence.

All slots have the capacity of the longest sequence. A slab grows by copying; slots x capacity never
exceeds the budget in tokens. Column t of a slot is position t of its sequence. Columns past a
sequence's length hold stale but finite numbers, which the attention mask hides.

Dimensions: P parts of an entry (key and value, or one with MLA), S slots, K key-value heads, C
capacity (columns), D head dimension.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.ops import native

_STEP = 16  # columns are allocated in multiples of 16, as GPU attention kernels need for masks


def columns(length: int, budget: int) -> int:
    """Return the number of cache columns to allocate for a sequence of `length` tokens."""
    return min(-(-length // _STEP) * _STEP, budget)


class Cache:
    """Keys and values of all layers, with memory for `slots` sequences of `capacity` tokens."""

    def __init__(
        self,
        layers: int,
        shape: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_slots: int,
        max_columns: int,
        budget: int,
        shared: bool = False,
    ):
        """Create an empty cache. `shape`: parts, heads and head dimension of an entry, as in
        `HFConfig.cache_shape`. With `shared`, all layers use the same slab in turn, so that the
        keys and values of only one layer are kept."""
        self.num_layers = layers
        self.shared = shared
        self.parts, self.kv_heads, self.head_dim = shape
        self.dtype = dtype
        self.device = device
        self.max_slots = max_slots
        self.max_columns = max_columns
        self.budget = budget
        self.slots = 0
        self.capacity = 0
        self.layers: list[Tensor] = []  # each [P, S, K, C, D]

    @property
    def num_bytes(self) -> int:
        slabs = self.layers[:1] if self.shared else self.layers
        return sum(slab.numel() * slab.element_size() for slab in slabs)

    def fits(self, rows: int, longest: int) -> bool:
        """Return whether `rows` sequences of at most `longest` tokens fit into the token budget."""
        return rows * columns(longest, self.budget) <= self.budget

    def longest(self, rows: int) -> int:
        """Return the maximum number of tokens per sequence if the cache holds `rows` sequences."""
        each = self.budget // rows
        return each if rows == 1 else each // _STEP * _STEP

    def share(self, rows: int, longest: int) -> float:
        """Return the share of the token budget that `rows` sequences of `longest` tokens take."""
        return rows * columns(longest, self.budget) / self.budget

    def reserve(self, rows: int, longest: int, used: int) -> bool:
        """Make room for `rows` sequences of at most `longest` tokens, which must fit (`fits`). The
        first `used` slots keep their contents. Return whether new slabs were allocated."""
        if rows <= self.slots and longest <= self.capacity:
            return False
        need = columns(longest, self.budget)
        # Each growth copies the slab, so grow in large strides if the budget allows.
        roomy = min(max(need, self.capacity * 3 // 2), columns(self.max_columns, self.budget))
        wide = max(rows, min(max(self.slots, 1 << (rows - 1).bit_length()), self.max_slots))
        for slots, capacity in ((wide, roomy), (wide, need), (rows, need)):
            if slots * capacity <= self.budget:
                break
        else:
            raise ValueError(f"cache of {self.budget} tokens: {rows} rows of {longest} do not fit")
        keep = min(capacity, self.capacity)
        num_slabs = 1 if self.shared else self.num_layers
        old = self.layers[:num_slabs]
        self.layers = []
        for _ in range(num_slabs):
            shape = (self.parts, slots, self.kv_heads, capacity, self.head_dim)
            slab = torch.zeros(shape, dtype=self.dtype, device=self.device)
            if used:
                slab[:, :used, :, :keep] = old[0][:, :used, :, :keep]
            del old[:1]  # free the old slab, so that only one layer's slab exists twice
            self.layers.append(slab)
        if self.shared:
            self.layers *= self.num_layers
        self.slots, self.capacity = slots, capacity
        return True

    def move(self, target: Sequence[int], source: Sequence[int], length: int) -> None:
        """Copy the first `length` columns of slots `source` to slots `target`, all at once."""
        if not len(target) or not length:
            return
        to = torch.as_tensor(target, device=self.device)
        come = torch.as_tensor(source, device=self.device)
        is_native = self.device.type == "cpu" and self.parts == 2
        ops = native.torch_ops("move_slots") if is_native else None
        for slab in self.layers:
            if ops is not None:
                ops.move_slots(slab, to, come, min(length, self.capacity))
                continue
            # Index directly, because index_select would first copy the whole slab.
            slab[:, to, :, :length] = slab[:, come, :, :length]

    def free(self) -> None:
        """Free the memory of all slabs."""
        self.layers = []
        self.slots = self.capacity = 0
