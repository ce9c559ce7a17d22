"""Keep a reference model: a copy of the start weights, in host memory for GPU learners."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rlcore.utils.host_room import HostRoom


class ReferenceModel:
    """Reference model: a copy of the weights, made at construction."""

    def __init__(self, parameters: Iterable[Tensor], *, pinned: bool | None = None) -> None:
        """Copy the weights. With `pinned` (default for parameters on an accelerator), the copy is
        in blocks of pinned host memory, and each use copies the weights to the device."""
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
        """Use the reference weights as parameters in the block; restore the learner's weights on
        exit.

        Only pointers change, so views of the learner's weights (Megatron's flat buffers, the
        optimizer's shards) stay valid. On the CPU nothing is copied. An accelerator holds both sets
        of weights during the block.
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
    """Return the bytes of a tensor as uint8 [bytes], as a view if the tensor is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
