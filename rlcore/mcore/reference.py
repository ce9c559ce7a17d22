"""The reference model: a copy of the start weights in host memory."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rlcore.mcore.memory import HostRoom


class ReferenceModel:
    """Copy of the weights that the parameters have at construction."""

    def __init__(self, parameters: Iterable[Tensor], *, pinned: bool | None = None) -> None:
        """Copy the weights. With `pinned` they are in blocks of pinned memory, and each use copies
        them to the device; this is the default for parameters on an accelerator."""
        self._parameters = list(parameters)
        if pinned is None:
            pinned = any(p.device.type == "cuda" for p in self._parameters)
        self._room = HostRoom() if pinned else None
        self._weights: list[Tensor] = []
        if self._room is None:
            self._weights = [p.detach().clone() for p in self._parameters]
        else:
            self._room.write([_bytes(p.detach()) for p in self._parameters])
            _synchronize()
        self.is_in_place = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the parameters the reference weights, and their own again on exit.

        Only pointers change, so views of a parameter's own memory (Megatron's flat buffers, the
        optimizer's shards) stay valid. On the CPU nothing is copied; an accelerator holds a second
        copy of the weights meanwhile.
        """
        own = [p.data for p in self._parameters]
        self.is_in_place = True
        try:
            for p, weight in zip(self._parameters, self._start_weights(), strict=True):
                p.data = weight
            yield
        finally:
            for p, data in zip(self._parameters, own, strict=True):
                p.data = data
            self.is_in_place = False

    def _start_weights(self) -> list[Tensor]:
        """Return the reference weights on the device of the parameters."""
        if self._room is None:
            return self._weights
        like = torch.contiguous_format
        fresh = [torch.empty_like(p.detach(), memory_format=like) for p in self._parameters]
        self._room.read([_bytes(tensor) for tensor in fresh])
        return fresh


def _bytes(tensor: Tensor) -> Tensor:
    """Return the tensor as uint8 [bytes]; a view if it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
