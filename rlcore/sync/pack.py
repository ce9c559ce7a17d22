"""Pack named tensors into buckets: one copy and one checksum per bucket (`ops/reshard.py`).

GPU tensors are packed on the GPU, and leave the GPU in one transfer per bucket.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.ops.reshard import ReshardPlan, TensorPiece, TensorSpec, one_piece
from rlcore.protocols import Engine
from rlcore.records import Bucket, TensorMeta
from rlcore.utils.buckets import ALIGN

MAX_BYTES = 256 * 2**20


class Packer:
    """Packs tensors into buckets. Copy plans are cached by the shapes of a bucket's tensors."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes {max_bytes}: must be at least 1")
        self._max_bytes = max_bytes
        self._plans: dict[Any, ReshardPlan] = {}

    def pack(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        room: Callable[[int], Tensor] | None = None,
    ) -> Iterator[tuple[Bucket, memoryview]]:
        """Yield buckets as `buckets` does, with the contents as a `memoryview` of host memory."""
        for bucket, buffer in self.buckets(tensors, room):
            yield bucket, buffer.numpy().data

    def buckets(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        room: Callable[[int], Tensor] | None = None,
    ) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield buckets of at most `max_bytes`, in order; a larger tensor gets a separate bucket.
        At most one bucket and its tensors are in memory at a time.

        Args:
            room: function that returns a buffer, uint8 [n], for a bucket of n bytes, on the CPU or
                on the tensors' device. By default, each bucket gets a new buffer on the CPU.
        """
        names: list[str] = []
        held: list[Tensor] = []
        end = 0
        for name, tensor in tensors:
            start = _aligned(end)
            if held and start + tensor.nbytes > self._max_bytes:
                yield self._fill(names, held, room)
                names, held, start = [], [], 0
            names.append(name)
            held.append(tensor.detach())
            end = start + tensor.nbytes
        if held:
            yield self._fill(names, held, room)

    def _fill(
        self, names: Sequence[str], tensors: list[Tensor], room: Callable[[int], Tensor] | None
    ) -> tuple[Bucket, Tensor]:
        device = tensors[0].device
        tensors = [_plain(tensor.to(device)) for tensor in tensors]
        key = tuple((tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors)
        if key not in self._plans:
            self._plans[key] = _plan(tensors)
        plan = self._plans[key]
        buffer = (room or _fresh)(plan.num_bytes)
        there = buffer if buffer.device == device else torch.empty_like(buffer, device=device)
        said = plan.pack(tensors, there)
        if there is not buffer:
            buffer.copy_(there)
        bucket = Bucket(tensors=_metas(names, tensors), num_bytes=plan.num_bytes, checksum=said)
        return bucket, buffer


def pack(
    tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> Iterator[tuple[Bucket, memoryview]]:
    """Pack tensors into buckets as `Packer.pack` does, without caching copy plans."""
    return Packer(max_bytes).pack(tensors)


def load_weights(
    engine: Engine,
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
    max_bytes: int = MAX_BYTES,
) -> int:
    """Load `tensors` into an engine of tensor-parallel size 1; return the number of bytes."""
    total = 0
    engine.begin_load(version)
    for bucket, buffer in pack(tensors, max_bytes):
        engine.load_bucket(bucket, [buffer])
        total += bucket.num_bytes
    engine.end_load()
    return total


def _fresh(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if a copy plan does not support it (lazy conjugate or
    negative view, or too many pieces)."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if one_piece(tensor) else tensor.contiguous()


def _aligned(end: int) -> int:
    return math.ceil(end / ALIGN) * ALIGN


def _offsets(tensors: Sequence[Tensor]) -> list[int]:
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(_aligned(end))
        end = offsets[-1] + tensor.nbytes
    return offsets


def _plan(tensors: Sequence[Tensor]) -> ReshardPlan:
    specs = [TensorSpec(tuple(t.shape), t.dtype, t.stride()) for t in tensors]
    offsets = _offsets(tensors)
    pieces = [
        TensorPiece(tensor=i, offset=offset, shape=spec.shape)
        for i, (spec, offset) in enumerate(zip(specs, offsets, strict=True))
    ]
    return ReshardPlan(specs, pieces, offsets[-1] + tensors[-1].nbytes)


def _metas(names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[TensorMeta, ...]:
    return tuple(
        TensorMeta(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=offset,
        )
        for name, tensor, offset in zip(names, tensors, _offsets(tensors), strict=True)
    )
