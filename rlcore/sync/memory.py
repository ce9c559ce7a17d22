"""Measure the peak memory of a weight update over the route `gather`.

On this route the learner allocates the gathered tensors, so this module counts them. On the other
routes, `relay.py` counts its buffers itself.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlcore.protocols import Learner
from rlcore.utils import collective

_before_resets = 0


def highest_bytes() -> int:
    """Return this process's peak GPU memory in tensors since its start. (Weight updates reset
    `torch.cuda.max_memory_allocated`.)"""
    return max(_before_resets, torch.cuda.max_memory_allocated())


class ExportMeter:
    """Measures this rank's peak memory during a weight update over the route `gather`.

    On a GPU this is the allocator's peak, including temporaries of the export. On the host it
    counts the bucket and the storages of gathered tensors, but not the learner's own storages. The
    memory of a running gather, as large as the gathered tensors, is not counted on the host.
    """

    def __init__(self, learner: Learner, held: Callable[[], int]) -> None:
        """Start measuring. `held` returns the bytes now held for buckets."""
        self._held = held
        self._most = 0
        self._behind: dict[int, Any] = {}
        """Weak references to gathered storages, by address."""
        self._own: set[int] | None = None
        """Addresses of the learner's own storages; None if exported tensors are not counted."""
        self._on_gpu = torch.cuda.is_initialized()
        if self._on_gpu:
            global _before_resets
            _before_resets = highest_bytes()
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
        elif not collective.is_alone():  # a single rank exports its own memory
            self._own = {t.untyped_storage().data_ptr() for _, t in learner.shards()}

    def watched(self, exported: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the exported tensors unchanged, and count their memory."""
        for name, tensor in exported:
            self._note(tensor.untyped_storage())
            self.look()
            yield name, tensor
            del tensor

    def _note(self, storage: torch.UntypedStorage) -> None:
        if self._own is not None and storage.data_ptr() not in self._own:
            self._behind[storage.data_ptr()] = weakref.ref(storage)

    def look(self) -> None:
        """Update the peak with the memory in use now."""
        alive = [ref() for ref in self._behind.values()]
        taken = sum(storage.nbytes() for storage in alive if storage is not None)
        self._most = max(self._most, self._held() + taken)

    @property
    def most(self) -> int:
        """Peak memory so far, in bytes."""
        if self._on_gpu:
            return max(0, torch.cuda.max_memory_allocated() - self._start)
        return self._most
