"""Cache weights in host memory until the engine that will use them is awake.

A job that shares its rollout nodes (`--mux.url`) has no engine on the device while it trains. Its
weight updates then go to a `HostWeightCache`, which has the interface of an engine. When the job
gets the rollout nodes again, the engine wakes and loads the weights from the cache, without the
learner. The cache holds one version, in memory that the engine's processes map without a copy.
"""

from collections.abc import Sequence

import msgspec
import torch

from rlcore.protocols import Engine, InProcess
from rlcore.records import Bucket
from rlcore.utils.buckets import SharedRoom


class HostWeightCache(InProcess):
    """Cache of weights in host memory, with the `Engine` methods that a weight update calls. It
    takes buckets of transport `bytes`."""

    def __init__(self, tp: int = 1) -> None:
        """Make an empty cache for an engine of tensor-parallel size `tp`."""
        self._tp = tp
        self._rooms: list[SharedRoom] = []
        self._buckets: list[Bucket] = []
        self._version = -1
        self._is_whole = False

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the cache uses."""
        return sum(room.num_bytes for room in self._rooms)

    def begin_load(self, version: int) -> None:
        """Begin to store the weights of `version`; the cached weights become invalid."""
        self._buckets.clear()
        self._version, self._is_whole = version, False

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> None:
        """Store a copy of the first payload; the payloads of all ranks of an engine are equal."""
        number = len(self._buckets)
        if number == len(self._rooms):
            self._rooms.append(SharedRoom())
        source = torch.frombuffer(payloads[0], dtype=torch.uint8, count=bucket.num_bytes)
        self._rooms[number].take(bucket.num_bytes).copy_(source)
        self._buckets.append(msgspec.structs.replace(bucket, transport="shm"))

    def end_load(self) -> None:
        """Mark the cached weights as complete."""
        self._is_whole = True

    def fill(self, engine: Engine) -> None:
        """Load the cached weights into the engine, whose weight memory must be awake.

        Raises:
            RuntimeError: the last weight update is incomplete, or the engine rejects the weights.
        """
        if not self._is_whole:
            raise RuntimeError(
                "the engine has no weights to wake with, because the last weight update failed"
            )
        engine.begin_load(self._version)
        for room, bucket in zip(self._rooms, self._buckets, strict=False):
            engine.load_bucket(bucket, [room.path.encode()] * self._tp)
        engine.end_load()

    def close(self) -> None:
        """Free the host memory of the cache."""
        for room in self._rooms:
            room.close()
        self._rooms.clear()
        self._buckets.clear()
        self._is_whole = False
