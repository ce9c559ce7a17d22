"""Weights from the learner to the engine of the same rank.

`learner.export()` gathers one tensor at a time from all tensor-, pipeline- and expert-parallel
shards, so every rank sees the full weights once, in buckets of bounded size, and hands them to its
own engine. A bucket is packed once, into memory that the next one takes over, in the next push too:
the channel holds one bucket's memory of the host.
"""

import time
from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from rlcore.protocols import Engine, Learner
from rlcore.records import Bucket
from rlcore.sync.pack import MAX_BYTES, Packer
from rlcore.utils.buckets import SharedRoom
from rlcore.utils.log import log


class ColocatedChannel:
    """A `WeightChannel` for engines of tensor-parallel size 1, one per rank."""

    def __init__(self, max_bucket_bytes: int = MAX_BYTES, shared_memory: bool = False) -> None:
        """With `shared_memory` buckets go through a file that another process maps; without it they
        are handed over as they are. Between pushes at most `max_bucket_bytes` are held."""
        self._packer, self._shared = Packer(max_bucket_bytes), shared_memory
        self._max_bytes = max_bucket_bytes
        self._room: SharedRoom | _Room | None = None

    def push(self, learner: Learner, engine: Engine | None, version: int) -> dict[str, float]:
        """Collective: every rank exhausts the export, also one without an engine and one whose
        engine dies on the way. A dead engine says so in the round that follows."""
        start, total = time.monotonic(), 0
        if self._room is None:
            self._room = SharedRoom() if self._shared else _Room()
        room = self._room

        def counted() -> Iterator[tuple[Bucket, memoryview | bytes]]:
            nonlocal total
            for bucket, buffer in self._packer.pack(learner.export(), room.take):
                total += bucket.num_bytes
                if isinstance(room, SharedRoom):
                    yield msgspec.structs.replace(bucket, transport="shm"), room.path.encode()
                else:
                    yield bucket, buffer

        rest = counted()
        try:
            if engine is not None:
                engine.begin_load(version)
                for bucket, payload in rest:
                    engine.load_bucket(bucket, [payload])
                engine.end_load()
        except RuntimeError as error:
            if not getattr(engine, "down", ""):  # it lives: the fault is ours
                raise
            log.warning("the engine died while it took weights: %s", error)
        finally:
            for _ in rest:
                continue
            if room.num_bytes > self._max_bytes:  # of one tensor larger than a bucket
                room.close()
                self._room = None
        return {"bytes": float(total), "time_s": time.monotonic() - start}


class _Room:
    """Memory of this process for one bucket after another."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]; what was there before is void."""
        if len(self._tensor) < num_bytes:
            self._tensor = torch.empty(num_bytes, dtype=torch.uint8)
        return self._tensor[:num_bytes]

    def close(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Held."""
        return len(self._tensor)
