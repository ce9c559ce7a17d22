"""Weights into the engine of the same rank: the hand-over of a bucket, and the route `gather`.

`Handover` gives whole buckets to an engine, on every route. An engine of tensor-parallel size k
belongs to k neighbouring ranks. The first of them, its leader, sends to it one payload per
tensor-parallel rank.

    bytes      the bytes, k times: for engines in this process
    shm        the name of one shared-memory file that all of the engine's processes map
    cuda_ipc   a handle of GPU memory: each rank packs the bucket on its own GPU, for the engine's
               process there, and the leader gathers the handles

`ColocatedChannel` is the route `gather`: `learner.export()` gathers one tensor at a time from all
tensor-, pipeline- and expert-parallel shards. Every rank sees the full weights once, in buckets of
bounded size. All buckets of all pushes are packed into one buffer, so a channel holds one bucket of
host memory.
"""

import time
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from rlcore.protocols import Learner, WeightReceiver
from rlcore.records import Bucket
from rlcore.sync.memory import ExportMeter
from rlcore.sync.pack import MAX_BYTES, Packer
from rlcore.sync.peers import ExchangeGroup, LinkError, Peers, WeightUpdateError, alone, blamed
from rlcore.utils import buckets
from rlcore.utils.buckets import SharedRoom
from rlcore.utils.log import log

Transport = Literal["bytes", "shm", "cuda_ipc"]


class Handover:
    """Hands buckets from this rank to its engine, push after push. Between pushes it holds the
    memory of one bucket at most."""

    def __init__(
        self,
        transport: Transport = "bytes",
        *,
        tp: int = 1,
        peers: Peers | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Make the hand-over of this rank.

        Args:
            tp: tensor-parallel size of the engine. Its ranks are neighbours; the first is a
                multiple of `tp`.
            peers: the ranks that push together; by default this rank alone.
            max_bytes: most memory that is kept between pushes.
        """
        self.peers = peers or alone()
        """Ranks that are told how this rank's engine took the weights."""
        self.transport, self._max_bytes = transport, max_bytes
        self._room: SharedRoom | _Room | None = None
        self.resize(tp)
        self._engine: WeightReceiver | None = None
        self._on_gpu = 0
        self._given = 0

    def resize(self, tp: int) -> None:
        """Set the tensor-parallel size of the engines; only between pushes."""
        if tp < 1 or self.peers.world_size % tp:
            raise ValueError(
                f"tp {tp}: must divide the {self.peers.world_size} ranks of the channel"
            )
        self._tp = tp
        self.leads = self.peers.rank % tp == 0
        """Whether this rank sends to the engine."""
        if not self.leads and self._room is not None:
            self._room.close()
            self._room = None

    def takes(self, engine: WeightReceiver | None) -> bool:
        """Tell whether this rank needs buckets for its engine."""
        return engine is not None and (self.leads or self.transport == "cuda_ipc")

    @property
    def held_bytes(self) -> int:
        """Bytes that buckets hold here now: the current one, or the buffer kept for the next."""
        return self._on_gpu + (self._room.num_bytes if self._room is not None else 0)

    def begin(self, engine: WeightReceiver | None, version: int) -> None:
        """Begin a push of this version into the engine; None if this rank has no engine."""
        self._error: Exception | None = None
        self._on_gpu = self._given = 0
        self._engine = engine if self.leads else None
        self._tell("begin_load", version)
        self.check()

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer, uint8 [num_bytes], for the next bucket: on the GPU for `cuda_ipc`, else
        on the host. Earlier buffers become invalid."""
        if self.transport == "cuda_ipc":
            room = torch.empty(num_bytes, dtype=torch.uint8, device=_gpu())
            self._on_gpu = num_bytes
            return room
        if self._room is None:
            self._room = SharedRoom() if self.transport == "shm" else _Room()
        return self._room.take(num_bytes)

    def give(self, bucket: Bucket, buffer: Tensor) -> None:
        """Hand over a bucket in the buffer from `take`; the caller drops its reference then. If the
        engine has failed or has refused the push, the bucket is dropped and the push continues.

        Raises:
            LinkError: the other ranks of the engine do not come; names them and the bucket.
        """
        number, self._given = self._given, self._given + 1
        bucket = msgspec.structs.replace(bucket, transport=self.transport)
        if self.transport != "cuda_ipc":
            payload: Any = buffer.numpy().data
            if isinstance(self._room, SharedRoom):
                payload = self._room.path.encode()
            self._tell("load_bucket", bucket, [payload] * self._tp)
            return
        payloads = [buckets.cuda_handle(buffer)]
        group = self._engines_ranks()
        where = f"bucket {number} ({bucket.tensors[0].name} ...), between the ranks of an engine"
        if group is not None:
            payloads = self.peers.gather(group, payloads[0], where, number)
        self._tell("load_bucket", bucket, payloads)
        if group is not None:  # the memory must not be freed while the engine still reads it
            self.peers.gather(group, b"", where, number)
        self._on_gpu = 0

    def end(self, version: int) -> None:
        """End the push: all engines decode again, or none does; collective.

        Raises:
            WeightUpdateError: a rank's engine has refused. The other engines return to loading and
            wait for
                a push that succeeds.
        """
        try:
            self.peers.step("end", self._end_load, "engine")
        except WeightUpdateError:
            self._refuse(version)
            raise

    def _refuse(self, version: int) -> None:
        self._error = None
        try:
            with blamed("engine", self.peers.rank):
                self._tell("begin_load", version)
                self.check()
        except LinkError as error:
            log.warning("the engine continues with the weights of a failed update: %s", error)

    def _end_load(self) -> None:
        self._tell("end_load")
        self.check()

    def check(self) -> None:
        """Raise the error with which a running engine refused the push, if there is one."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Clean up after a push, also a failed one: keep the memory of one bucket at most."""
        self._engine = None
        if self.transport == "cuda_ipc":
            torch.cuda.ipc_collect()  # buckets that no process reads any more
        if self._room is not None and self._room.num_bytes > self._max_bytes:
            self._room.close()
            self._room = None

    @property
    def is_open(self) -> bool:
        """Whether the engine still takes buckets in this push."""
        return self._engine is not None

    def _tell(self, method: str, *args: Any) -> None:
        if self._engine is None:
            return
        try:
            getattr(self._engine, method)(*args)
        except (RuntimeError, ValueError, TimeoutError) as error:
            if self._engine.failure:
                log.warning("the engine failed during the weight update: %s", error)
            else:  # the engine runs, so the error is in what it was sent
                self._error = error
            self._engine = None

    def _engines_ranks(self) -> ExchangeGroup | None:
        """Return the group of this engine's ranks, on the host; None at tensor-parallel size 1."""
        if self._tp == 1:
            return None
        first = self.peers.rank - self.peers.rank % self._tp
        ranks = range(first, first + self._tp)
        return self.peers.group(f"engine{first}x{self._tp}", ranks, torch.device("cpu"))


class ColocatedChannel:
    """`WeightChannel` of the route `gather`: every rank gathers every tensor. All ranks are train
    ranks."""

    def __init__(
        self,
        max_bucket_bytes: int = MAX_BYTES,
        shared_memory: bool = False,
        *,
        handover: Handover | None = None,
    ) -> None:
        """Without a `handover`, make one for engines of tensor-parallel size 1. With
        `shared_memory` it sends buckets through a file that another process maps, else as bytes."""
        self._packer = Packer(max_bucket_bytes)
        transport: Transport = "shm" if shared_memory else "bytes"
        self._handover = handover or Handover(transport, max_bytes=max_bucket_bytes)

    def update_weights(
        self, learner: Learner | None, engine: WeightReceiver | None, version: int
    ) -> dict[str, float]:
        """Update the weights of all engines; collective. Every rank exhausts the export, also
        without an engine and if its engine fails during the push. A failed engine is reported in
        the next round.

        Raises:
            WeightUpdateError, WeightUpdateTimeoutError: the same sentence on every rank. An engine
            that began to
                load does not decode before a push succeeds.
        """
        start, handover = time.monotonic(), self._handover
        peers = handover.peers
        peers.begin()

        def enter() -> tuple[Learner, ExportMeter]:
            handover.begin(engine, version)
            if learner is None:
                raise ValueError(
                    "--sync.route gather: a rank without a learner cannot gather its weights; set "
                    "--sync.route two_stage"
                )
            return learner, ExportMeter(learner, lambda: handover.held_bytes)

        try:
            source, meter = peers.step("here", enter, "engine")
            total = peers.step("done", lambda: self._move(source, engine, meter))
            handover.end(version)
        finally:
            handover.close()
        return {
            "bytes": float(total),
            "time_s": time.monotonic() - start,
            "transient_gb": meter.most / 1e9,
        }

    def resize(self, tp: int) -> None:
        """Set the tensor-parallel size of the engines from the next push on; called on every
        rank."""
        self._handover.resize(tp)

    def _move(self, learner: Learner, engine: WeightReceiver | None, meter: ExportMeter) -> int:
        """Move all weights into the engine; return their bytes."""
        total, handover = 0, self._handover
        exported = meter.watched(learner.export())
        try:
            if handover.takes(engine):
                for bucket, buffer in self._packer.buckets(exported, handover.take):
                    total += bucket.num_bytes
                    meter.look()
                    with blamed("engine", handover.peers.rank):
                        handover.give(bucket, buffer)
                    del buffer
        except LinkError as error:
            handover.peers.tell("done", error.failure)  # the other ranks stop waiting for this one
            raise
        finally:
            for _, tensor in exported:  # an export is collective, so every rank takes every tensor
                total += tensor.nbytes
        with blamed("engine", handover.peers.rank):
            handover.check()
        return total


class _Room:
    """Host buffer of this process that all buckets share in turn."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes]; earlier buffers become invalid."""
        if len(self._tensor) < num_bytes:
            self.close()  # frees the old buffer before the new one is allocated
            self._tensor = torch.empty(num_bytes, dtype=torch.uint8)
        return self._tensor[:num_bytes]

    def close(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return len(self._tensor)


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
