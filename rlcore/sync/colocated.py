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

from rlcore.protocols import Engine, Learner
from rlcore.records import Bucket
from rlcore.sync.pack import MAX_BYTES, Packer
from rlcore.sync.peers import Group, Peers
from rlcore.utils import buckets, collective
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
            peers: needed where tp is above 1.
            max_bytes: of the memory that is kept between pushes.
        """
        if tp < 1 or (tp > 1 and (peers is None or peers.world_size % tp)):
            world = peers.world_size if peers is not None else 1
            raise ValueError(f"tp {tp}: must divide the {world} ranks of the channel")
        self.transport, self._tp, self._peers, self._max_bytes = transport, tp, peers, max_bytes
        place = peers.rank % tp if peers is not None else 0
        self.leads = place == 0
        """This rank is the one that talks to the engine."""
        self._room: SharedRoom | _Room | None = None
        self._engine: Engine | None = None
        self.held_bytes = 0
        """Memory of a bucket on its way."""

    def takes(self, engine: Engine | None) -> bool:
        """Whether this rank needs buckets for its engine."""
        return engine is not None and (self.leads or self.transport == "cuda_ipc")

    def begin(self, engine: Engine | None, version: int) -> None:
        """A push into this engine begins; None where there is none."""
        self._error: Exception | None = None
        self.held_bytes = 0
        self._engine = engine if self.leads else None
        self._tell("begin_load", version)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] to put a bucket in: of the GPU for `cuda_ipc`, else of the host. What
        was there before is void."""
        if self.transport == "cuda_ipc":
            self.held_bytes = num_bytes
            return torch.empty(num_bytes, dtype=torch.uint8, device=_gpu())
        if self._room is None:
            self._room = SharedRoom() if self.transport == "shm" else _Room()
        room = self._room.take(num_bytes)
        self.held_bytes = self._room.num_bytes
        return room

    def give(self, bucket: Bucket, buffer: Tensor) -> None:
        """Hand over what `take` gave the room for. An engine that is dead or has refused takes no
        more, and the push goes on without it."""
        bucket = msgspec.structs.replace(bucket, transport=self.transport)
        if self.transport != "cuda_ipc":
            payload: Any = memoryview(buffer.numpy())
            if isinstance(self._room, SharedRoom):
                payload = self._room.path.encode()
            self._tell("load_bucket", bucket, [payload] * self._tp)
            return
        payloads = [buckets.cuda_handle(buffer)]
        group = self._engines_ranks()
        if group is not None:
            payloads = group.gather_bytes(payloads[0])
        self._tell("load_bucket", bucket, payloads)
        if group is not None:  # nobody frees a bucket that the engine still reads
            group.gather_bytes(b"")

    def end(self) -> None:
        """All buckets were given: the engine decodes again."""
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
            if getattr(self._engine, "down", ""):
                log.warning("the engine died while it took weights: %s", error)
            else:  # it lives: the fault is ours
                self._error = error
            self._engine = None

    def _engines_ranks(self) -> Group | None:
        """The ranks of this engine, which talk over the host."""
        if self._tp == 1:
            return None
        assert self._peers is not None
        first = self._peers.rank - self._peers.rank % self._tp
        ranks = range(first, first + self._tp)
        return self._peers.group(f"engine{first}", ranks, torch.device("cpu"))


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

    def push(
        self, learner: Learner | None, engine: Engine | None, version: int
    ) -> dict[str, float]:
        """Collective: every rank exhausts the export, also one without an engine and one whose
        engine dies on the way. A dead engine says so in the round that follows."""
        if learner is None:
            raise ValueError(
                "sync.route gather: a rank without a learner cannot gather its weights; take "
                "two_stage"
            )
        start, meter, total = time.monotonic(), _Meter(), 0
        handover, exported = self._handover, learner.export()
        try:
            handover.begin(engine, version)
            if handover.takes(engine):
                for bucket, buffer in self._packer.buckets(exported, handover.take):
                    total += bucket.num_bytes
                    meter.look(handover.held_bytes, bucket.num_bytes)
                    handover.give(bucket, buffer)
                    del buffer
            handover.end()
        finally:
            for _, tensor in exported:  # the others wait for every tensor
                total += tensor.nbytes
            handover.close()
        return {
            "bytes": float(total),
            "time_s": time.monotonic() - start,
            "transient_gb": meter.most / 1e9,
        }


class _Meter:
    """Memory that a push takes. On a GPU it is looked up; on the host it is counted: a bucket, and
    the tensors in it where they were gathered from several ranks."""

    def __init__(self) -> None:
        self._start = self._allocated()
        self.most = 0

    def look(self, held: int, gathered: int) -> None:
        """Now."""
        counted = held if collective.is_alone() else held + gathered
        self.most = max(self.most, self._allocated() - self._start if self._start else counted)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0


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


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
