"""Measure the peak memory of a weight update over the route `gather`.

On this route, the learner allocates the gathered tensors, so this module counts their memory. On
the other routes, `relay.py` counts its own buffers.
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
    """Return the peak GPU memory of this process's tensors since its start, although weight updates
    reset `torch.cuda.max_memory_allocated`."""
    return max(_before_resets, torch.cuda.max_memory_allocated())


class ExportMeter:
    """Measures this rank's peak memory during a weight update over the route `gather`.

    On a GPU, the peak is that of the allocator, including temporaries of the export. Without a GPU,
    the peak counts the bucket and the gathered tensors. It then leaves out the learner's own
    storages and the gather's temporary memory, which is as large as the gathered tensors.
    """

    def __init__(self, learner: Learner, held: Callable[[], int]) -> None:
        """Start to measure. `held` returns the bytes that this rank now holds for buckets."""
        self._held = held
        self._most = 0
        self._behind: dict[int, Any] = {}
        """Weak references to the storages of gathered tensors, by address."""
        self._own: set[int] | None = None
        """Addresses of the learner's own storages; None if exported tensors are not counted."""
        self._on_gpu = torch.cuda.is_initialized()
        if self._on_gpu:
            global _before_resets
            _before_resets = highest_bytes()
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
        elif not collective.is_alone():  # a single rank gathers no copies
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
        """Peak memory of this weight update so far, in bytes."""
        if self._on_gpu:
            return max(0, torch.cuda.max_memory_allocated() - self._start)
        return self._most
