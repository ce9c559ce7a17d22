"""Takes tensors off the accelerator without moving a single pointer: storages are emptied and later
filled again, so that views (Megatron's flat buffers) stay valid.

Own code instead of torch_memory_saver: no library to preload and no hook in the allocator.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 64 * 2**20
"""Bytes of one allocation of pinned memory. torch rounds each up to a power of two, so that one of
17 GB would take 34 GB of the host."""


class Parked:
    """One part of a model's state, such as its weights: on the accelerator, or in host memory. What
    is on the CPU anyway stays where it is, unless it comes back as zeros."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, zeros: bool = False) -> None:
        """`tensors` names the part, anew in every call. With `zeros` contents are not kept."""
        self._tensors, self._zeros = tensors, zeros
        self._room = HostRoom()
        self._away: list[tuple[torch.UntypedStorage, Tensor, int]] = []
        self.is_away = False

    def park(self) -> None:
        """Empty the storages; twice is once."""
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
        """Allocate again and fill."""
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
        """What the part takes where it is computed with."""
        return sum(storage.nbytes() for storage in storages(self._tensors()))

    @property
    def host_bytes(self) -> int:
        """Pinned memory that is held for it, parked or not."""
        return self._room.num_bytes


class HostRoom:
    """Pinned host memory in blocks, kept from one use to the next."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._blocks: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(block.numel() for block in self._blocks)

    def write(self, sources: Sequence[Tensor]) -> None:
        """Copy uint8 tensors here, one after the other; what was here is void. From an accelerator
        it is done when that is synchronised."""
        need = sum(source.numel() for source in sources)
        pinned = torch.cuda.is_available()
        while self.num_bytes < need:
            self._blocks.append(torch.empty(self._block, dtype=torch.uint8, pin_memory=pinned))
        for outside, here in self._pieces(sources):
            here.copy_(outside, non_blocking=True)

    def read(self, targets: Sequence[Tensor]) -> None:
        """Copy back what `write` got, into tensors of the same sizes in the same order."""
        for outside, here in self._pieces(targets):
            outside.copy_(here, non_blocking=True)

    def _pieces(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the tensors with their places in the blocks."""
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
    """The storages behind the tensors, those that several share once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found.setdefault(identity(storage), storage)
    return list(found.values())


def identity(storage: torch.UntypedStorage) -> int:
    """Equal for what shares memory, also while it is empty and has no address."""
    return storage._cdata


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """uint8 [nbytes], a view that an emptied and refilled storage keeps."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
