"""Memory of a push: bytes in use now, and their peak.

A relay counts its own buffers (`relay.py`). On the route `gather` the learner makes the tensors, so
they are counted here.
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
    """Return the peak of GPU memory in tensors of this process. A push resets torch's own peak,
    `max_memory_allocated`."""
    return max(_before_resets, torch.cuda.max_memory_allocated())


class ExportMeter:
    """Measures the most memory that a push over `gather` takes on this rank.

    On a GPU it is the allocator's peak, including temporaries of the export. On the host it counts
    the bucket and the storages behind gathered tensors that are not the learner's own. It does not
    see what a gather takes while it runs, which is as much again as the gathered bundle.
    """

    def __init__(self, learner: Learner, held: Callable[[], int]) -> None:
        """`held` returns the bytes that buckets hold now."""
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
        """Yield the same tensors and count their memory on the way."""
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
        """Peak in bytes so far."""
        if self._on_gpu:
            return max(0, torch.cuda.max_memory_allocated() - self._start)
        return self._most
