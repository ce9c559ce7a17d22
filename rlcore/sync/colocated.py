"""Weights from the learner to the engine of the same rank.

`learner.export()` gathers one tensor at a time from all tensor-, pipeline- and expert-parallel
shards, so every rank sees the full weights once, in buckets of bounded size, and hands them to its
own engine.
"""

import time
from collections.abc import Iterator

from rlcore.protocols import Engine, Learner
from rlcore.records import Bucket
from rlcore.utils import buckets
from rlcore.utils.log import log


class ColocatedChannel:
    """A `WeightChannel` for engines of tensor-parallel size 1, one per rank."""

    def __init__(self, max_bucket_bytes: int = 256 * 2**20, shared_memory: bool = False) -> None:
        """With `shared_memory` buckets go through a file that another process maps; without it they
        are handed over as they are."""
        self._max_bytes, self._shared = max_bucket_bytes, shared_memory

    def push(self, learner: Learner, engine: Engine | None, version: int) -> dict[str, float]:
        """Collective: every rank exhausts the export, also one without an engine and one whose
        engine dies on the way. A dead engine says so in the round that follows."""
        start, total = time.monotonic(), 0

        def counted() -> Iterator[tuple[Bucket, memoryview]]:
            nonlocal total
            for bucket, buffer in buckets.pack(learner.export(), self._max_bytes):
                total += bucket.num_bytes
                yield bucket, buffer

        rest = counted()
        try:
            if engine is not None:
                engine.begin_load(version)
                for bucket, buffer in rest:
                    self._load(engine, bucket, buffer)
                engine.end_load()
        except RuntimeError as error:
            if not getattr(engine, "down", ""):  # it lives: the fault is ours
                raise
            log.warning("the engine died while it took weights: %s", error)
        finally:
            for _ in rest:
                continue
        return {"bytes": float(total), "time_s": time.monotonic() - start}

    def _load(self, engine: Engine, bucket: Bucket, buffer: memoryview) -> None:
        if not self._shared:
            engine.load_bucket(bucket, [buffer])
            return
        with buckets.shared(buffer) as path:
            bucket = Bucket(tensors=bucket.tensors, num_bytes=bucket.num_bytes, transport="shm")
            engine.load_bucket(bucket, [path.encode()])
