"""Send weights to the engine of this rank: `Handover` for every route, and the route `gather`.

`Handover` sends whole buckets to an engine, on every route. If the engine runs in a child process,
three buckets are under way: one is packed while the engine has two, of which it loads one. Buffers
are reused or freed when the engine has loaded their buckets, in order.

An engine of tensor-parallel size k belongs to k consecutive ranks. The first of these ranks is the
engine's leader, which sends k payloads to the engine for each bucket. A payload depends on the
transport:

    bytes      the data itself, the same in all k payloads; for engines in this process
    shm        the name of one shared-memory file that all processes of the engine map
    cuda_ipc   a handle of GPU memory: each rank packs the bucket on its own GPU, for the engine's
               process on that GPU, and the leader gathers the handles

An engine on several nodes cannot map one file, so with `shm` each of its ranks packs the bucket in
a file of its own, as with `cuda_ipc`.

`ColocatedChannel` is the route `gather`: `learner.export()` gathers one tensor at a time from all
tensor-, pipeline- and expert-parallel shards. Every rank gets the full weights once, in buckets of
bounded size.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from rlcore.protocols import Learner, WeightReceiver
from rlcore.records import Bucket
from rlcore.sync.base_weights import BaseWeights
from rlcore.sync.memory import ExportMeter
from rlcore.sync.pack import MAX_BYTES, Packer
from rlcore.sync.peers import ExchangeGroup, LinkError, Peers, WeightUpdateError, alone, blamed
from rlcore.utils import buckets
from rlcore.utils.buckets import SharedRoom
from rlcore.utils.log import log

Transport = Literal["bytes", "shm", "cuda_ipc"]
IN_FLIGHT = 2
"""Number of buckets that an engine in a child process has while the next bucket is packed. One is
loaded, and the other is there when that load ends."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Sent:
    """Bucket that the engine may not have loaded yet, and its memory."""

    where: str
    buffer: Tensor
    room: "SharedRoom | _Room | None"
    """Reusable buffer behind `buffer`; None on a GPU, where each bucket has its own memory."""
    wait: Callable[[], None] | None
    """Function that waits until the engine has loaded the bucket. None on the other ranks of the
    engine: the next exchange with the leader tells them."""


class Handover:
    """Sends buckets from this rank to its engine. Between weight updates, at most `IN_FLIGHT + 1`
    buckets of memory are kept."""

    def __init__(
        self,
        transport: Transport = "bytes",
        *,
        tp: int = 1,
        ranks_per_node: int = 0,
        peers: Peers | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Make the `Handover` of this rank.

        Args:
            tp: tensor-parallel size of the engine. The engine's ranks are consecutive, and the
                lowest is a multiple of `tp`.
            ranks_per_node: number of ranks of a node; 0: all ranks are on one node.
            peers: ranks of the weight update; by default this rank alone.
            max_bytes: maximum size of a bucket, unless a tensor is larger. That bucket is loaded
                before the next one is packed, and its memory is not kept.
        """
        self.peers = peers or alone()
        """Ranks of the weight update, which are notified if this rank's engine rejects weights."""
        self.transport, self._max_bytes = transport, max_bytes
        self._ranks_per_node = ranks_per_node or self.peers.world_size
        self._rooms: list[SharedRoom | _Room] = []
        """Reusable buffers that hold no bucket which the engine still needs."""
        self._room: SharedRoom | _Room | None = None
        """Reusable buffer of the bucket that is being packed."""
        self._packing = 0
        """Size of the bucket that is being packed, in bytes."""
        self._sent: deque[_Sent] = deque()
        self.resize(tp)
        self._engine: WeightReceiver | None = None
        self._given, self._last = 0, ""
        self._is_read = True
        """Whether the engine still reads buckets, as far as this rank knows."""

    def resize(self, tp: int) -> None:
        """Set the tensor-parallel size of the engines; call it only between weight updates."""
        if tp < 1 or self.peers.world_size % tp:
            raise ValueError(
                f"tp {tp}: must divide the {self.peers.world_size} ranks of the channel"
            )
        self._tp = tp
        self._packs_own = self.transport == "cuda_ipc" or (
            self.transport == "shm" and tp > self._ranks_per_node
        )
        """Whether each rank of an engine packs the buckets for its own process of the engine."""
        self.leads = self.peers.rank % tp == 0
        """Whether this rank is its engine's leader, which sends all payloads to the engine."""
        if not self.leads:
            self._keep_rooms(0)

    def takes(self, engine: WeightReceiver | None) -> bool:
        """Return whether this rank needs the buckets of a weight update for its engine."""
        return engine is not None and (self.leads or self._packs_own)

    @property
    def held_bytes(self) -> int:
        """Bytes of all buckets: the one that is being packed, those that the engine has not loaded
        yet, and empty buffers that later buckets reuse."""
        used = [self._room, *(sent.room for sent in self._sent), *self._rooms]
        on_host = sum(room.num_bytes for room in used if room is not None)
        on_gpu = sum(len(sent.buffer) for sent in self._sent if sent.room is None)
        return on_host + on_gpu + (self._packing if self._room is None else 0)

    def begin(self, engine: WeightReceiver | None, version: int) -> None:
        """Begin the engine's update to `version`; `engine` is None if this rank has no engine."""
        self._error: tuple[str, Exception] | None = None
        self._given, self._last, self._is_read = 0, "", True
        self._engine = engine if self.leads else None
        self._tell("begin_load", version)
        self.check()

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer for the next bucket, uint8 [num_bytes], on the GPU with `cuda_ipc`, else
        on the host. A buffer that was not passed to `give` becomes invalid."""
        if num_bytes > self._max_bytes and self.leads:
            self._settle(0)
        self._packing = num_bytes
        if self.transport == "cuda_ipc":
            return torch.empty(num_bytes, dtype=torch.uint8, device=_gpu())
        if self._room is None:
            self._room = self._free_room()
        return self._room.take(num_bytes)

    def _free_room(self) -> "SharedRoom | _Room":
        if not self._rooms:
            return SharedRoom() if self.transport == "shm" else _Room()
        # The largest, so that only one grows for a tensor that is larger than a bucket.
        room = max(self._rooms, key=lambda room: room.num_bytes)
        self._rooms.remove(room)
        return room

    def give(self, bucket: Bucket, buffer: Tensor) -> None:
        """Send a bucket, packed in the buffer from `take`, to the engine; then the caller must
        release the buffer. First wait until the engine has loaded all but `IN_FLIGHT - 1` of the
        earlier buckets. If the engine has failed or raised an error, do not send the bucket.

        Raises:
            LinkError: ranks of the engine are missing; the message names them and the bucket.
        """
        number, self._given = self._given, self._given + 1
        self._last = where = f"bucket {number} ({bucket.tensors[0].name} ...)"
        bucket = msgspec.structs.replace(bucket, transport=self.transport)
        if self.leads:
            self._settle(IN_FLIGHT - 1)
        if self._packs_own:
            if self.leads:
                self._is_read = self._engine is not None
            mine = self._payload(buffer) if self._is_read else b""
            payloads: list[Any] = self._gather(mine, where, number)
            self._is_read = bool(payloads[0])
            if mine and not self._is_read and self.transport == "cuda_ipc":
                buckets.drop_cuda(mine)  # memory behind a handle that no process opens stays
            self._settle(IN_FLIGHT - 1)  # the leader has waited for these loads
        else:
            payloads = [self._payload(buffer)] * self._tp
        wait = None
        if self._engine is not None:
            wait = self._guarded(where, self._engine.send_bucket, bucket, payloads)
        self._sent.append(_Sent(where, buffer, self._room, wait))
        self._room, self._packing = None, 0
        if self.leads and wait is None:  # loaded, or not sent
            self._settle(0)
        if bucket.num_bytes > self._max_bytes:
            self.finish()

    def _payload(self, buffer: Tensor) -> Any:
        """Return what an engine's process needs to read a bucket in `buffer`."""
        if self.transport == "cuda_ipc":
            return buckets.cuda_handle(buffer)
        if isinstance(self._room, SharedRoom):
            return self._room.path.encode()
        return buffer.numpy().data

    def give_all(self, packed: Iterator[tuple[Bucket, Tensor]], look: Callable[[], None]) -> int:
        """Send buckets, packed in buffers from `take`, and wait until the engine has loaded them;
        return their bytes. `look` is called while each one is in memory."""
        total = 0
        for bucket, buffer in packed:
            total += bucket.num_bytes
            look()
            with blamed("engine", self.peers.rank):
                self.give(bucket, buffer)
            del buffer
        self.finish()
        return total

    def finish(self) -> None:
        """Wait until the engine has loaded all buckets that were sent, and free their memory. All
        ranks of an engine must call it.

        Raises:
            LinkError: ranks of the engine are missing.
        """
        if self.leads:
            self._settle(0)
        if self._last and self._packs_own:
            self._gather(b"", f"loads up to {self._last}", self._given)
        self._settle(0)

    def _settle(self, most: int) -> None:
        """Wait until the engine has loaded all buckets but the last `most`, and free the memory of
        the loaded ones."""
        while len(self._sent) > most:
            # No reference to the buffer here: an error keeps the variables of its callers.
            where, wait, room = self._sent[0].where, self._sent[0].wait, self._sent[0].room
            if wait is not None:
                self._guarded(where, wait)
            if self._sent:  # a time-out has cleared it
                self._sent.popleft()
            if room is not None:
                self._rooms.append(room)

    def _gather(self, mine: bytes, where: str, number: int) -> list[bytes]:
        """Gather `mine` from the ranks of this engine, in the order of its ranks."""
        group = self._engines_ranks()
        if group is None:
            return [mine]
        return self.peers.gather(group, mine, f"{where}, between the ranks of an engine", number)

    def end(self, version: int) -> None:
        """End the weight update, so that all engines may decode again or none may; collective.

        Raises:
            WeightUpdateError: the engine of a rank raised an error. The other engines return to
                loading and do not decode before a weight update succeeds.
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
        """If the engine rejected this weight update without failing, raise a LinkError with the
        engine's error and the bucket."""
        if self._error is not None:
            where, error = self._error
            with blamed("engine", self.peers.rank, f"{where}: " if where else ""):
                raise error

    def close(self) -> None:
        """Clean up after a successful or failed update; keep at most `IN_FLIGHT + 1` buckets of
        memory. After a failure, first wait until the engine no longer reads the buckets."""
        self._settle(0)
        self._engine = None
        if self.transport == "cuda_ipc":
            torch.cuda.ipc_collect()  # frees GPU memory that no process reads any more
        if self._room is not None:
            self._rooms.append(self._room)
        self._room, self._packing = None, 0
        self._keep_rooms(self._max_bytes)

    def _keep_rooms(self, most: int) -> None:
        """Free all reusable buffers of more than `most` bytes."""
        large = [room for room in self._rooms if room.num_bytes > most]
        self._rooms = [room for room in self._rooms if room.num_bytes <= most]
        for room in large:
            room.close()

    def _tell(self, method: str, *args: Any) -> None:
        if self._engine is not None:
            self._guarded("", getattr(self._engine, method), *args)

    def _guarded(self, where: str, call: Callable[..., _Result], *args: Any) -> _Result | None:
        """Call the engine. After its first error, send it nothing more in this weight update."""
        try:
            return call(*args)
        except (RuntimeError, ValueError, TimeoutError) as error:
            if self._engine is None:  # a later bucket than the one that failed
                return None
            if self._engine.failure:
                log.warning("the engine failed during the weight update: %s", error)
            else:  # the engine works, so it rejected the weights
                self._error = where, error
            self._engine = None
            if isinstance(error, TimeoutError):  # do not wait as long again for later buckets
                self._sent.clear()
            return None

    def _engines_ranks(self) -> ExchangeGroup | None:
        """Return the process group of this engine's ranks, for host tensors; None if tp is 1."""
        if self._tp == 1:
            return None
        first = self.peers.rank - self.peers.rank % self._tp
        ranks = range(first, first + self._tp)
        return self.peers.group(f"engine{first}x{self._tp}", ranks, torch.device("cpu"))


class ColocatedChannel:
    """`WeightChannel` of the route `gather`: all ranks are train ranks and gather all weights."""

    def __init__(
        self,
        max_bucket_bytes: int = MAX_BYTES,
        shared_memory: bool = False,
        *,
        handover: Handover | None = None,
        base: BaseWeights | None = None,
    ) -> None:
        """Make the channel of this rank. If `handover` is None, make one for tensor-parallel size 1
        with transport `shm` if `shared_memory`, else `bytes`. `base`: weights to which gathered
        adapters are added; None: all weights are gathered."""
        self._base = base
        self._packer = Packer(max_bucket_bytes)
        transport: Transport = "shm" if shared_memory else "bytes"
        self._handover = handover or Handover(transport, max_bytes=max_bucket_bytes)

    def update_weights(
        self, learner: Learner | None, engine: WeightReceiver | None, version: int
    ) -> dict[str, float]:
        """Update the weights of all engines; collective. Every rank exhausts the learner's export,
        even without an engine. If an engine fails, the update continues without this engine.

        Raises:
            WeightUpdateError, WeightUpdateTimeoutError: the weight update failed; the message is
                the same on every rank. Engines that began to load do not decode before a weight
                update succeeds.
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
        """Set the engines' tensor-parallel size for later weight updates; call on every rank."""
        self._handover.resize(tp)

    def _move(self, learner: Learner, engine: WeightReceiver | None, meter: ExportMeter) -> int:
        """Export all weights and send them to this rank's engine; return the number of bytes that
        were exported."""
        total, handover, takes = 0, self._handover, self._handover.takes(engine)
        adapters: dict[str, Tensor] = {}
        if self._base is None:
            source = learner.export()
        else:
            adapters = {name: tensor.clone() for name, tensor in learner.export_adapters()}
            source = self._base.merged(adapters) if takes else iter(())
        exported = meter.watched(source)
        try:
            if takes:
                packed = self._packer.buckets(exported, handover.take)
                total = handover.give_all(packed, meter.look)
        except LinkError as error:
            handover.peers.tell("done", error.failure)  # so that other ranks stop waiting
            raise
        finally:
            for _, tensor in exported:  # collective: every rank takes all tensors
                total += tensor.nbytes
        if adapters:
            total = sum(tensor.nbytes for tensor in adapters.values())
        handover.check()
        return total


class _Room:
    """Host buffer in this process's memory, reused for every bucket."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer, uint8 [num_bytes]; earlier buffers become invalid."""
        if len(self._tensor) < num_bytes:
            self.close()  # frees the old buffer before the new allocation
            self._tensor = torch.empty(num_bytes, dtype=torch.uint8)
        return self._tensor[:num_bytes]

    def close(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return len(self._tensor)


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
