"""Keep the inputs of layers in host memory between forward and backward.

With full recomputation, backward needs of a layer its input alone. Forward copies each input to
pinned host memory on a stream of its own, and backward of a layer fetches the input of the layer
before. The device holds two inputs at a time, and all numbers stay the same.

Own code instead of Megatron's `cpu_offloading`, which needs Transformer Engine.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcore.mcore.side_stream import Event, SideStream, wait
from rlcore.utils.host_room import BLOCK

PAGE_BYTES = 8 * 2**20
"""Bytes of host memory that are taken at a time; inputs of any length share the same pages."""
ON_DEVICE = 2
"""Number of inputs that stay on the device after they are copied, since backward begins there."""


@dataclass(eq=False, slots=True)
class _Input:
    """Input of one layer in one micro-batch."""

    here: Tensor | None
    """The input on the device, or None."""
    shape: torch.Size
    dtype: torch.dtype
    pages: list[Tensor]
    ready: Event
    """End of the last copy: to host memory, or from there."""
    before: "_Input | None"
    """Input of the layer before, in the same micro-batch."""

    def leave(self) -> None:
        """Free the memory on the device once the copy to host memory is complete."""
        wait(self.ready)
        self.here = None

    def fetch(self, stream: SideStream, device: torch.device) -> None:
        """Begin to copy the input back, unless it is on the device."""
        if self.here is None:
            self.here = torch.empty(self.shape, dtype=self.dtype, device=device)
            copies = partial(_copy, self.here, self.pages, to_pages=False)
            # After what the computation has done with this memory before.
            self.ready = stream.run(copies, stream.now())

    def take(self) -> Tensor:
        """Return the input, and forget it."""
        wait(self.ready)
        here, self.here, self.before = self.here, None, None
        assert here is not None
        return here


@dataclass(slots=True)
class _Forward:
    """One pass through the layers."""

    received: int | None
    """Address of the input that another stage has sent, which Megatron's schedule keeps anyway."""
    shape: torch.Size
    last: _Input | None = None

    def add(self, saved: Tensor, pages: list[Tensor], ready: Event) -> _Input:
        """Add the input of the next layer."""
        self.last = _Input(saved, saved.shape, saved.dtype, pages, ready, self.last)
        return self.last


class LayerInputs:
    """Host memory for the inputs of all layers of this rank. Backward must follow each forward."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, SideStream(device)
        self._pages: deque[Tensor] = deque()
        self._on_device: deque[_Input] = deque()
        self.host_bytes = 0
        """Bytes of host memory that are allocated; they are kept."""
        self.copied_bytes = 0
        """Bytes copied to host memory so far."""

    def attach(self, block: Any) -> None:
        """Keep the inputs of the layers of Megatron's `block` in host memory from now on."""
        block._checkpointed_forward = partial(self._forward, block._checkpointed_forward)

    def _forward(self, layers: Callable, hidden_states: Tensor, *args: Any, **more: Any) -> Any:
        at = hidden_states.data_ptr() if hidden_states.is_leaf else None
        keep = partial(self._keep, _Forward(at, hidden_states.shape))
        with torch.autograd.graph.saved_tensors_hooks(keep, self._give):
            return layers(hidden_states, *args, **more)

    def _keep(self, forward: _Forward, saved: Tensor) -> Tensor | _Input:
        """Copy an input to host memory; return what autograd keeps of it. Other tensors stay."""
        is_input = saved.shape == forward.shape and saved.is_contiguous()
        if not is_input or saved.data_ptr() == forward.received:
            return saved
        pages = self._take(saved.nbytes)
        copies = partial(_copy, saved, pages, to_pages=True)
        ready = self._stream.run(copies, self._stream.now())
        kept = forward.add(saved, pages, ready)
        self.copied_bytes += saved.nbytes
        self._on_device.append(kept)
        if len(self._on_device) > ON_DEVICE:
            self._on_device.popleft().leave()
        return kept

    def _give(self, kept: Tensor | _Input) -> Tensor:
        """Return what autograd has kept, and fetch the input that it will ask for next."""
        if isinstance(kept, Tensor):
            return kept
        kept.fetch(self._stream, self._device)
        if kept in self._on_device:
            self._on_device.remove(kept)
        # Later copies into these pages are on the same stream, after the one from them.
        self._pages.extend(kept.pages)
        before, here = kept.before, kept.take()
        if before is not None:
            before.fetch(self._stream, self._device)
        return here

    def _take(self, num_bytes: int) -> list[Tensor]:
        count = -(-num_bytes // PAGE_BYTES)
        while len(self._pages) < count:
            on_gpu = self._device.type == "cuda"
            pinned = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=on_gpu)
            self._pages.extend(pinned.split(PAGE_BYTES))
            self.host_bytes += BLOCK
        return [self._pages.popleft() for _ in range(count)]


def _copy(tensor: Tensor, pages: Sequence[Tensor], *, to_pages: bool) -> None:
    parts = tensor.view(-1).view(torch.uint8).split(PAGE_BYTES)
    for part, page in zip(parts, pages, strict=True):
        here, there = (page[: part.numel()], part) if to_pages else (part, page[: part.numel()])
        here.copy_(there, non_blocking=True)
