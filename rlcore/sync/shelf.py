"""Weights in host memory between a push and the engine that will decode with them.

A job that shares its rollout nodes (`--mux.url`) has no engine on the device while it trains. A
push then ends here: to the channel a `Shelf` is an engine that takes buckets. When the job has the
rollout nodes again, the engine wakes and takes them from here, without the learner. It keeps one
version, in memory that the engine's processes map, so nothing is copied twice.
"""

from collections.abc import Sequence

import msgspec
import torch

from rlcore.protocols import Engine
from rlcore.records import Bucket
from rlcore.utils.buckets import SharedRoom


class Shelf:
    """The part of `Engine` that a push speaks to, transport `bytes`."""

    def __init__(self, tp: int = 1) -> None:
        """`tp`: of the engine, which gets as many payloads of each bucket."""
        self._tp = tp
        self._rooms: list[SharedRoom] = []
        self._buckets: list[Bucket] = []
        self._version = -1
        self._is_whole = False

    failure = ""
    """Host memory does not fail by itself."""

    @property
    def num_bytes(self) -> int:
        """Of host memory."""
        return sum(room.num_bytes for room in self._rooms)

    def begin_load(self, version: int) -> None:
        """New weights are coming; those that were here are void."""
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
        """All weights are here."""
        self._is_whole = True

    def fill(self, engine: Engine) -> None:
        """All weights to the engine, whose memory for them is awake.

        Raises:
            RuntimeError: no push has come to its end; or what the engine refuses with.
        """
        if not self._is_whole:
            raise RuntimeError("the engine has no weights to wake with: the last push has failed")
        engine.begin_load(self._version)
        for room, bucket in zip(self._rooms, self._buckets, strict=False):
            engine.load_bucket(bucket, [room.path.encode()] * self._tp)
        engine.end_load()

    def close(self) -> None:
        """Give the memory back."""
        for room in self._rooms:
            room.close()
        self._rooms.clear()
        self._buckets.clear()
        self._is_whole = False
