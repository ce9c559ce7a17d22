"""Weights into the engine of the same rank: how a bucket is handed over, and the plain route there.

`Handover` gives whole buckets to an engine, whichever way they came. An engine of tensor-parallel
size k belongs to k neighbouring ranks: the first of them, its leader, talks to it, with one payload
per tensor-parallel rank.

    bytes      the bytes, k times: for engines in this process
    shm        the name of one shared-memory file that all of the engine's processes map
    cuda_ipc   a handle of GPU memory: each rank packs the bucket on its own GPU, for the engine's
               process there, and the leader gathers the handles

`ColocatedChannel` is the route `gather`: `learner.export()` gathers one tensor at a time from all
tensor-, pipeline- and expert-parallel shards, so every rank sees the full weights once, in buckets
of bounded size. A bucket is packed once, into memory that the next one takes over, in the next push
too: a channel holds one bucket's memory of the host.
"""

import time
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from rlcore.protocols import Learner, Loads
from rlcore.records import Bucket
from rlcore.sync.memory import ExportMeter
from rlcore.sync.pack import MAX_BYTES, Packer
from rlcore.sync.peers import Group, LinkError, Peers, PushError, alone, blamed
from rlcore.utils import buckets
from rlcore.utils.buckets import SharedRoom
from rlcore.utils.log import log

Transport = Literal["bytes", "shm", "cuda_ipc"]


class Handover:
    """Buckets from this rank to its engine, push after push. Between pushes it holds at most one
    bucket's memory."""

    def __init__(
        self,
        transport: Transport = "bytes",
        *,
        tp: int = 1,
        peers: Peers | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """
        Args:
            tp: of the engine, whose ranks are neighbours from a multiple of it on.
            peers: those that push together; by default this rank alone.
            max_bytes: of the memory that is kept between pushes.
        """
        self.peers = peers or alone()
        """They hear what this rank's engine says."""
        self.transport, self._max_bytes = transport, max_bytes
        self._room: SharedRoom | _Room | None = None
        self.relayout(tp)
        self._engine: Loads | None = None
        self._on_gpu = 0
        self._given = 0

    def relayout(self, tp: int) -> None:
        """Between pushes: engines have this tensor-parallel size from now on."""
        if tp < 1 or self.peers.world_size % tp:
            raise ValueError(
                f"tp {tp}: must divide the {self.peers.world_size} ranks of the channel"
            )
        self._tp = tp
        self.leads = self.peers.rank % tp == 0
        """This rank is the one that talks to the engine."""
        if not self.leads and self._room is not None:
            self._room.close()
            self._room = None

    def takes(self, engine: Loads | None) -> bool:
        """Whether this rank needs buckets for its engine."""
        return engine is not None and (self.leads or self.transport == "cuda_ipc")

    @property
    def held_bytes(self) -> int:
        """Memory that buckets take here now: the one on its way, or what is kept for the next."""
        return self._on_gpu + (self._room.num_bytes if self._room is not None else 0)

    def begin(self, engine: Loads | None, version: int) -> None:
        """A push into this engine begins; None where there is none."""
        self._error: Exception | None = None
        self._on_gpu = self._given = 0
        self._engine = engine if self.leads else None
        self._tell("begin_load", version)
        self.check()

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] to put a bucket in: of the GPU for `cuda_ipc`, else of the host. What
        was there before is void."""
        if self.transport == "cuda_ipc":
            room = torch.empty(num_bytes, dtype=torch.uint8, device=_gpu())
            self._on_gpu = num_bytes
            return room
        if self._room is None:
            self._room = SharedRoom() if self.transport == "shm" else _Room()
        return self._room.take(num_bytes)

    def give(self, bucket: Bucket, buffer: Tensor) -> None:
        """Hand over what `take` gave the room for, which the caller lets go of then. An engine that
        is dead or has refused takes no more, and the push goes on without it.

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
        if group is not None:  # nobody frees a bucket that the engine still reads
            self.peers.gather(group, b"", where, number)
        self._on_gpu = 0

    def end(self, version: int) -> None:
        """All buckets were given: the engines decode again, all or none; collective.

        Raises:
            PushError: a rank's engine has refused. Those that had not load once more and wait for
                a whole push.
        """
        try:
            self.peers.step("end", self._end_load, "engine")
        except PushError:
            self._refuse(version)
            raise

    def _refuse(self, version: int) -> None:
        self._error = None
        try:
            with blamed("engine", self.peers.rank):
                self._tell("begin_load", version)
                self.check()
        except LinkError as error:
            log.warning("the engine decodes weights of a push that failed: %s", error)

    def _end_load(self) -> None:
        self._tell("end_load")
        self.check()

    def check(self) -> None:
        """Raise what a living engine has refused with."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """After every push, failed or not: keep no more than one bucket's memory."""
        self._engine = None
        if self.transport == "cuda_ipc":
            torch.cuda.ipc_collect()  # buckets whose readers are gone
        if self._room is not None and self._room.num_bytes > self._max_bytes:
            self._room.close()
            self._room = None

    @property
    def is_open(self) -> bool:
        """Whether the engine still takes something."""
        return self._engine is not None

    def _tell(self, method: str, *args: Any) -> None:
        if self._engine is None:
            return
        try:
            getattr(self._engine, method)(*args)
        except (RuntimeError, ValueError, TimeoutError) as error:
            if self._engine.failure:
                log.warning("the engine failed while it took weights: %s", error)
            else:  # it works: the fault is ours
                self._error = error
            self._engine = None

    def _engines_ranks(self) -> Group | None:
        """The ranks of this engine, which talk over the host."""
        if self._tp == 1:
            return None
        first = self.peers.rank - self.peers.rank % self._tp
        ranks = range(first, first + self._tp)
        return self.peers.group(f"engine{first}x{self._tp}", ranks, torch.device("cpu"))


class ColocatedChannel:
    """A `WeightChannel`, route `gather`: every rank gathers every tensor. All ranks are train
    ranks."""

    def __init__(
        self,
        max_bucket_bytes: int = MAX_BYTES,
        shared_memory: bool = False,
        *,
        handover: Handover | None = None,
    ) -> None:
        """Without a `handover`, for engines of tensor-parallel size 1: with `shared_memory` through
        a file that another process maps, without it as they are."""
        self._packer = Packer(max_bucket_bytes)
        transport: Transport = "shm" if shared_memory else "bytes"
        self._handover = handover or Handover(transport, max_bytes=max_bucket_bytes)

    def push(self, learner: Learner | None, engine: Loads | None, version: int) -> dict[str, float]:
        """Collective: every rank exhausts the export, also one without an engine and one whose
        engine dies on the way. A dead engine says so in the round that follows.

        Raises:
            PushError, PushTimeoutError: the same sentence on every rank; no engine that began to
                load decodes before a push succeeds.
        """
        start, handover = time.monotonic(), self._handover
        peers = handover.peers
        peers.begin()

        def enter() -> tuple[Learner, ExportMeter]:
            handover.begin(engine, version)
            if learner is None:
                raise ValueError(
                    "sync.route gather: a rank without a learner cannot gather its weights; take "
                    "two_stage"
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

    def relayout(self, tp: int) -> None:
        """From the next push on the engines have this tensor-parallel size; every rank says so."""
        self._handover.relayout(tp)

    def _move(self, learner: Learner, engine: Loads | None, meter: ExportMeter) -> int:
        """All weights into the engine; their bytes."""
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
            handover.peers.tell("done", error.failure)  # who waits for this rank need not
            raise
        finally:
            for _, tensor in exported:  # the others wait for every tensor
                total += tensor.nbytes
        with blamed("engine", handover.peers.rank):
            handover.check()
        return total


class _Room:
    """Memory of this process for one bucket after another."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]; what was there before is void."""
        if len(self._tensor) < num_bytes:
            self.close()  # not both at a time
            self._tensor = torch.empty(num_bytes, dtype=torch.uint8)
        return self._tensor[:num_bytes]

    def close(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Held."""
        return len(self._tensor)


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
