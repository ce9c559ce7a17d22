"""Takes tensors off the accelerator without moving a single pointer: storages are emptied and later
filled again, so that views (Megatron's flat buffers) stay valid."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Parked:
    """Contents in host memory while the device memory is free."""

    def __init__(self, kept: Iterable[Tensor], zeroed: Iterable[Tensor]) -> None:
        """Empty the storages of `kept`, whose contents are copied, and of `zeroed`, which come back
        as zeros. A storage that several tensors share is handled once."""
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._zeroed: list[tuple[Tensor, int]] = []
        seen: set[int] = set()
        for tensor in kept:
            storage = _bytes(tensor)
            if storage.data_ptr() in seen or not storage.numel() or storage.device.type == "cpu":
                continue
            seen.add(storage.data_ptr())
            host = torch.empty(storage.numel(), dtype=torch.uint8, pin_memory=True)
            host.copy_(storage, non_blocking=True)
            self._kept.append((storage, host))
        for tensor in zeroed:
            storage = _bytes(tensor)
            if storage.data_ptr() in seen or not storage.numel():
                continue
            seen.add(storage.data_ptr())
            self._zeroed.append((storage, storage.numel()))
        torch.cuda.synchronize()
        for storage, _ in self._kept:
            storage.untyped_storage().resize_(0)
        for storage, _ in self._zeroed:
            storage.untyped_storage().resize_(0)
        torch.cuda.empty_cache()

    def restore(self) -> None:
        """Allocate again and fill."""
        for storage, host in self._kept:
            storage.untyped_storage().resize_(host.numel())
            storage.copy_(host, non_blocking=True)
        for storage, size in self._zeroed:
            storage.untyped_storage().resize_(size)
            storage.zero_()
        torch.cuda.synchronize()
        self._kept, self._zeroed = [], []


def _bytes(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as uint8."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
