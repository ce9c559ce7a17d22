"""Weights in host memory between a push and the engine that will decode with them.

A job that shares its rollout nodes (`--mux.url`) has no engine on the device while it trains. A
push then ends here: to the channel, a `HostWeightCache` is an engine that takes buckets. When the
job has the rollout nodes again, the engine wakes and loads the weights from here, without the
learner. One version is kept, in memory that the engine's processes map, so it is not copied a
second time.
"""

from collections.abc import Sequence

import msgspec
import torch

from rlcore.protocols import Engine
from rlcore.records import Bucket
from rlcore.utils.buckets import SharedRoom


class HostWeightCache:
    """Host cache of weights: the part of `Engine` that a push calls, transport `bytes`."""

    def __init__(self, tp: int = 1) -> None:
        """`tp`: tensor-parallel size of the engine, and number of payloads of each bucket."""
        self._tp = tp
        self._rooms: list[SharedRoom] = []
        self._buckets: list[Bucket] = []
        self._version = -1
        self._is_whole = False

    failure = ""
    """Always empty: host memory does not fail by itself."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(room.num_bytes for room in self._rooms)

    def begin_load(self, version: int) -> None:
        """Begin to take weights of this version; the old ones become invalid."""
        self._buckets.clear()
        self._version, self._is_whole = version, False

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> None:
        """Keep a copy of the payload, which is the same for every rank of an engine."""
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
        """Load all weights into the engine, whose weight memory is awake.

        Raises:
            RuntimeError: the last push was not completed, or the engine refuses the weights.
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
