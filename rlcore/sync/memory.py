"""Memory that a push takes: what is on its way now, and the most that was.

A relay counts what it makes itself (`relay.py`). The route `gather` gets tensors that the learner
makes, so here is where they are found out.
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
    """Most GPU memory in tensors that this process has had: a push starts the count of torch,
    `max_memory_allocated`, anew."""
    return max(_before_resets, torch.cuda.max_memory_allocated())


class ExportMeter:
    """Most memory that a push over `gather` takes on this rank.

    On a GPU it is what the allocator has seen at its peak, with all that an export makes for a
    moment. On the host it is counted: the bucket, and the memory behind the exported tensors that
    is not the learner's own: bundles that were gathered. What a gather takes while it makes them is
    not seen there; it is as much again as a bundle.
    """

    def __init__(self, learner: Learner, held: Callable[[], int]) -> None:
        """`held` says what buckets take now."""
        self._held = held
        self._most = 0
        self._behind: dict[int, Any] = {}
        """Memory that was gathered, by address; weak."""
        self._own: set[int] | None = None
        """Addresses of the learner's own memory, where exported tensors are counted."""
        self._on_gpu = torch.cuda.is_initialized()
        if self._on_gpu:
            global _before_resets
            _before_resets = highest_bytes()
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
        elif not collective.is_alone():  # one rank alone exports its own memory
            self._own = {t.untyped_storage().data_ptr() for _, t in learner.shards()}

    def watched(self, exported: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, looked at on their way."""
        for name, tensor in exported:
            self._note(tensor.untyped_storage())
            self.look()
            yield name, tensor
            del tensor

    def _note(self, storage: torch.UntypedStorage) -> None:
        if self._own is not None and storage.data_ptr() not in self._own:
            self._behind[storage.data_ptr()] = weakref.ref(storage)

    def look(self) -> None:
        """Now."""
        alive = [ref() for ref in self._behind.values()]
        taken = sum(storage.nbytes() for storage in alive if storage is not None)
        self._most = max(self._most, self._held() + taken)

    @property
    def most(self) -> int:
        """Bytes, so far."""
        if self._on_gpu:
            return max(0, torch.cuda.max_memory_allocated() - self._start)
        return self._most
