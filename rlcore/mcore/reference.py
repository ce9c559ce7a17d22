"""The reference model: a copy of the start weights that waits in host memory."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Reference:
    """The weights that some parameters had when it was made."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._weights = [_on_host(p.detach()) for p in self._parameters]
        self.is_in_place = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The parameters have these weights, and their own again afterwards.

        Pointers change and no contents: what views a parameter's own memory (Megatron's flat
        buffers, the optimizer's shards) does not notice. On the CPU nothing is copied; an
        accelerator holds a second copy of the weights meanwhile.
        """
        own = [p.data for p in self._parameters]
        self.is_in_place = True
        try:
            for p, weight in zip(self._parameters, self._weights, strict=True):
                p.data = weight.to(p.device, non_blocking=True)
            yield
        finally:
            for p, data in zip(self._parameters, own, strict=True):
                p.data = data
            self.is_in_place = False


def _on_host(tensor: Tensor) -> Tensor:
    """A copy; from an accelerator into pinned memory, which is quick to copy back."""
    pinned = tensor.device.type == "cuda"
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor)
