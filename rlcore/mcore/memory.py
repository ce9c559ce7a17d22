"""Offload tensors and keep all views of them valid, such as views of Megatron's flat buffers.

The storages of the tensors are emptied and later filled again, so no tensor changes its storage.

Own code instead of torch_memory_saver, which preloads a library and hooks into the allocator.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from rlcore.utils.host_room import HostRoom


class Parked:
    """Part of a model's state, such as the weights: on the accelerator, or offloaded to host
    memory. On the CPU, only parts whose contents are not kept (`zeros`) are freed."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, zeros: bool = False) -> None:
        """Define the part: each call of `tensors` returns the part's current tensors. With `zeros`
        the contents are not kept, and `restore` fills the tensors with zeros."""
        self._tensors, self._zeros = tensors, zeros
        self._room = HostRoom()
        self._away: list[tuple[torch.UntypedStorage, Tensor, int]] = []
        self.is_away = False

    def park(self) -> None:
        """Move the part's contents to host memory and empty the storages. Idempotent."""
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
        """Allocate the storages again; restore their contents, or fill them if `zeros`."""
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
        """Return the bytes that the part occupies on the learner's device."""
        return sum(storage.nbytes() for storage in storages(self._tensors()))

    @property
    def host_bytes(self) -> int:
        """Return the bytes of pinned host memory kept for the part, even if not offloaded."""
        return self._room.num_bytes


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages of the tensors."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found.setdefault(identity(storage), storage)
    return list(found.values())


def identity(storage: torch.UntypedStorage) -> int:
    """Return a key that identifies the storage, even while the storage is empty."""
    return storage._cdata


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return a uint8 view [nbytes] of the storage. The view stays valid when the storage is emptied
    and filled again."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
