"""Pinned host memory for copies from and to an accelerator, such as offloaded weights."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 64 * 2**20
"""Size in bytes of one allocation of pinned memory. torch rounds each allocation up to a power of
two, so a single allocation of 17 GB would take 34 GB of host memory."""


def room_bytes(num_bytes: int) -> int:
    """Return the bytes of host memory that a `HostRoom` takes for `num_bytes`."""
    return -(-num_bytes // BLOCK) * BLOCK


def release_cached() -> None:
    """Return to the system the pinned memory that torch keeps for reuse. Wait for the device."""
    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    empty = getattr(torch._C, "_accelerator_emptyHostCache", None) or torch._C._host_emptyCache
    empty()


class HostRoom:
    """Pinned host memory in blocks, kept between uses."""

    def __init__(self, block: int = 0) -> None:
        """`block`: size of a block in bytes; 0: `BLOCK`."""
        self._block = block or BLOCK
        self._blocks: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(block.numel() for block in self._blocks)

    def write(self, sources: Sequence[Tensor], at: int = 0) -> None:
        """Copy uint8 tensors into this memory one after the other, from byte `at` on, overwriting
        earlier contents. Copies from an accelerator are complete only after a synchronisation."""
        need = at + sum(source.numel() for source in sources)
        pinned = torch.cuda.is_available()
        while self.num_bytes < need:
            self._blocks.append(torch.empty(self._block, dtype=torch.uint8, pin_memory=pinned))
        for outside, here in self._pieces(sources, at):
            here.copy_(outside, non_blocking=True)

    def read(self, targets: Sequence[Tensor], at: int = 0) -> None:
        """Copy the contents of a `write` into tensors of the same sizes and order."""
        for outside, here in self._pieces(targets, at):
            outside.copy_(here, non_blocking=True)

    def _pieces(self, tensors: Sequence[Tensor], at: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield slices of the tensors, each with the matching slice of a host memory block."""
        for tensor in tensors:
            start = 0
            while start < tensor.numel():
                number, offset = divmod(at + start, self._block)
                count = min(self._block - offset, tensor.numel() - start)
                yield (
                    tensor[start : start + count],
                    self._blocks[number][offset : offset + count],
                )
                start += count
            at += tensor.numel()
