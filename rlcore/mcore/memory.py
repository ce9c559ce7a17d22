"""Offloading of tensors that keeps their views valid, such as those of Megatron's flat buffers.

Storages are emptied and later filled again; no tensor gets another storage.

Own code instead of torch_memory_saver: no library to preload and no hook in the allocator.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 64 * 2**20
"""Bytes per allocation of pinned memory. torch rounds each allocation up to a power of two: a
single one of 17 GB would take 34 GB of the host."""


class Parked:
    """One part of a model's state, such as its weights, on the accelerator or in host memory.
    Tensors on the CPU stay there; with `zeros` they are freed as well."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, zeros: bool = False) -> None:
        """Define the part: each call of `tensors` returns its current tensors. With `zeros` the
        contents are not kept."""
        self._tensors, self._zeros = tensors, zeros
        self._room = HostRoom()
        self._away: list[tuple[torch.UntypedStorage, Tensor, int]] = []
        self.is_away = False

    def park(self) -> None:
        """Move the contents to host memory and empty the storages. Idempotent."""
        if self.is_away:
            return
        self._away = [
            (storage, as_bytes(storage), storage.nbytes())
            for storage in storages(self._tensors())
            if self._zeros or storage.device.type != "cpu"
        ]
        if not self._zeros:
            self._room.write([contents for _, contents, _ in self._away])
        _synchronize()
        for storage, _, _ in self._away:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.is_away = True

    def restore(self) -> None:
        """Allocate the storages again and restore their contents, or zeros."""
        for storage, contents, size in self._away:
            storage.resize_(size)
            if self._zeros:
                contents.zero_()
        if not self._zeros:
            self._room.read([contents for _, contents, _ in self._away])
        _synchronize()
        self._away, self.is_away = [], False

    @property
    def resident_bytes(self) -> int:
        """Bytes that the part occupies on the learner's device."""
        return sum(storage.nbytes() for storage in storages(self._tensors()))

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory held for the part, offloaded or not."""
        return self._room.num_bytes


class HostRoom:
    """Pinned host memory in blocks, kept between uses."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._blocks: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(block.numel() for block in self._blocks)

    def write(self, sources: Sequence[Tensor]) -> None:
        """Copy uint8 tensors here one after the other, overwriting earlier contents. A copy from an
        accelerator is complete only after a synchronisation."""
        need = sum(source.numel() for source in sources)
        pinned = torch.cuda.is_available()
        while self.num_bytes < need:
            self._blocks.append(torch.empty(self._block, dtype=torch.uint8, pin_memory=pinned))
        for outside, here in self._pieces(sources):
            here.copy_(outside, non_blocking=True)

    def read(self, targets: Sequence[Tensor]) -> None:
        """Copy the contents of the last `write` into tensors of the same sizes and order."""
        for outside, here in self._pieces(targets):
            outside.copy_(here, non_blocking=True)

    def _pieces(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the tensors with the matching parts of the blocks."""
        at = 0
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


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages of the tensors."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found.setdefault(identity(storage), storage)
    return list(found.values())


def identity(storage: torch.UntypedStorage) -> int:
    """Return a key that is equal for equal storages, also while they are empty."""
    return storage._cdata


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return the storage as a uint8 view [nbytes], which stays valid when the storage is emptied
    and filled again."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
