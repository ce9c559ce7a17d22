"""Cache weights in host memory until the engine that will use them is awake.

A job that shares its rollout nodes (`--mux.url`) has no engine on the device while it trains. A
weight update then ends in a `HostWeightCache`, which has the interface of an engine. When the job
has the rollout nodes again, the engine wakes and loads the weights from the cache, without the
learner. The cache holds one version, in memory that the engine's processes map without a copy.
"""

from collections.abc import Sequence

import msgspec
import torch

from rlcore.protocols import Engine
from rlcore.records import Bucket
from rlcore.utils.buckets import SharedRoom


class HostWeightCache:
    """Host cache of weights, with the `Engine` methods that a weight update calls; for transport
    `bytes`."""

    def __init__(self, tp: int = 1) -> None:
        """`tp`: tensor-parallel size of the engine, and number of payloads per bucket."""
        self._tp = tp
        self._rooms: list[SharedRoom] = []
        self._buckets: list[Bucket] = []
        self._version = -1
        self._is_whole = False

    failure = ""
    """Always empty: host memory does not fail by itself."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(room.num_bytes for room in self._rooms)

    def begin_load(self, version: int) -> None:
        """Begin to load weights of this version; the old weights become invalid."""
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
        """Mark the weights as complete."""
        self._is_whole = True

    def fill(self, engine: Engine) -> None:
        """Load all weights into the engine, whose weight memory must be awake.

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
        """Free the memory."""
        for room in self._rooms:
            room.close()
        self._rooms.clear()
        self._buckets.clear()
        self._is_whole = False
