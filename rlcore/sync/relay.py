"""Carries out a plan of `sync/layout.py`: bucket by bucket, between sites and then inside them.

Of each bucket a rank first posts what it receives over a slow link, then sends what others lack,
then takes part in the broadcasts of its site and hands the whole bucket on. The next bucket is on
the slow link meanwhile, from the moment on that it has room. A rank holds two buckets at most: the
one that is put together and the parts on their way; a rank that only sends, two buckets of parts.

A part ends with its checksum, 8 bytes that its owner wrote: everyone who gets the part sums it anew
on the way into its bucket. Damage does not stop the push, which has to end the same way on all
ranks; it fails when all are through. A peer that is late or gone does.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.ops import reshard
from rlcore.records import Bucket, Shard
from rlcore.sync import layout
from rlcore.sync.layout import Load, Part, Plan
from rlcore.sync.peers import Failure, Group, Peers
from rlcore.utils.net import decode, encode

_SUM_BYTES = 8
_WORD = 8

Take = Callable[[int], Tensor]
"""Memory for a bucket of that many bytes, uint8, on the relay's device."""
Give = Callable[[Bucket, Tensor], None]
"""Takes a whole bucket; the memory is void when it returns."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A part on its way."""

    part: Part
    buffer: Tensor  # [bytes and checksum] uint8
    work: Any


@dataclass(frozen=True, slots=True)
class _Links:
    """Groups of one rank."""

    slow: Group | None
    sites: dict[int, Group | None]
    """By number, of the sites that it is in; None where nobody else is."""


class LinkError(RuntimeError):
    """The push cannot go on here."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Relay:
    """The parts of one rank. The plan is made at the first `run`, from what all ranks then have,
    and stays."""

    def __init__(
        self, peers: Peers, sites: Sequence[Sequence[int]], max_bytes: int, device: torch.device
    ) -> None:
        self.peers, self._sites, self._max_bytes = peers, sites, max_bytes
        self.device = device
        self.plan: Plan | None = None
        self._known: tuple[list[Shard], bool] = ([], False)
        self._copies: dict[tuple[int, int, int, str], reshard.Plan] = {}
        self.one_exchange = device.type == "cuda"
        """What ranks give each other of a bucket goes in one exchange, as NCCL wants it."""
        self.transient_bytes = 0
        """Most memory that the last run took at a time."""
        self._held = 0

    def run(
        self, shards: Iterable[tuple[Shard, Tensor]], needs: bool, take: Take, give: Give
    ) -> Failure | None:
        """One push; collective. Returns damage that was found on the way.

        Args:
            shards: what this rank has; nothing on a rank without a learner.
            needs: whether buckets go to `give`.

        Raises:
            LinkError: a peer is late or gone.
            ValueError: what this rank has or needs is not what it was at the first run.
        """
        self._held = self.transient_bytes = 0
        own = list(shards)
        try:
            plan = self._agree([shard for shard, _ in own], needs)
            links = self._join(plan)
        except RuntimeError as error:
            rank = self.peers.rank
            why = f"rank {rank} could not join the groups of the push ({_first_line(error)})"
            raise LinkError(Failure("link", -1, 0, rank, why)) from error
        tensors = {(shard.name, shard.start): tensor for shard, tensor in own}
        return _Run(self, plan, links, tensors, take, give).run()

    def _agree(self, mine: list[Shard], needs: bool) -> Plan:
        if self.plan is not None:
            if self._known != (mine, needs):
                raise ValueError(
                    f"rank {self.peers.rank}: its shards, or that it has an engine, changed since "
                    "the first push; make a new channel"
                )
            return self.plan
        rows = [
            decode(row, tuple[list[Shard], bool])
            for row in self.peers.everyone().gather_bytes(encode((mine, needs)))
        ]
        holdings = {rank: shards for rank, (shards, _) in enumerate(rows)}
        wanting = [rank for rank, (_, wants) in enumerate(rows) if wants]
        self.plan = layout.plan(holdings, self._sites, wanting, self._max_bytes)
        self._known = (mine, needs)
        return self.plan

    def _join(self, plan: Plan) -> _Links:
        """The groups that this rank is in. Each is made by all of its ranks at once, and in this
        order on every one of them, since making it waits for all."""
        rank, slow, sites = self.peers.rank, None, {}
        if rank in plan.linked():
            slow = self.peers.group("links", plan.linked(), self.device)
        for number in range(len(plan.sites)):
            members = plan.members(number)
            if rank in members:
                alone = len(members) == 1
                group = None if alone else self.peers.group(f"site{number}", members, self.device)
                sites[number] = group
        return _Links(slow, sites)

    # ---- memory

    def room(self, num_bytes: int) -> Tensor:
        """Memory for a part, counted until it is given back to `free`."""
        self.hold(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def hold(self, num_bytes: int) -> None:
        """Count memory that somebody else made."""
        self._held += num_bytes
        self.transient_bytes = max(self.transient_bytes, self._held)

    def free(self, num_bytes: int) -> None:
        """It is no longer held."""
        self._held -= num_bytes

    # ---- copies

    def packing(self, number: int, part: Part, tensors: Sequence[Tensor]) -> reshard.Plan:
        """From shards to a part."""
        key = (number, part.owner, part.root, "pack")
        if key not in self._copies:
            specs = [reshard.TensorSpec(tuple(t.shape), t.dtype, t.stride()) for t in tensors]
            pieces = [
                reshard.Piece(tensor=i, offset=slot.offset, shape=tuple(tensors[i].shape))
                for i, slot in enumerate(part.slots)
            ]
            self._copies[key] = reshard.Plan(specs, pieces, part.num_bytes)
        return self._copies[key]

    def unpacking(self, number: int, part: Part) -> reshard.Plan:
        """From a part to the tensors of its bucket."""
        key = (number, part.owner, part.root, "unpack")
        if key not in self._copies:
            assert self.plan is not None
            metas = self.plan.loads[number].tensors
            specs = [reshard.TensorSpec(m.shape, getattr(torch, m.dtype)) for m in metas]
            pieces = []
            for slot in part.slots:
                strides = _contiguous(slot.shard.shape)
                pieces.append(
                    reshard.Piece(
                        tensor=slot.tensor,
                        offset=slot.offset,
                        shape=layout.shard_shape(slot.shard),
                        start=slot.shard.start * strides[slot.shard.dim],
                        tensor_strides=strides,
                    )
                )
            self._copies[key] = reshard.Plan(specs, pieces, part.num_bytes)
        return self._copies[key]


class _Run:
    """One push on one rank."""

    def __init__(
        self,
        relay: Relay,
        plan: Plan,
        links: _Links,
        own: dict[tuple[str, int], Tensor],
        take: Take,
        give: Give,
    ) -> None:
        self._relay, self._plan, self._links = relay, plan, links
        self._own, self._take, self._give = own, take, give
        self._rank, self._limit = relay.peers.rank, relay.peers.timeout_s
        self._needs = self._rank in self._plan.needs
        self._one_exchange = relay.one_exchange and plan.is_two_way
        self._sent: deque[tuple[int, _Message]] = deque()
        self._damage: Failure | None = None
        self._most = 2 * self._plan.bucket_bytes

    def run(self) -> Failure | None:
        """All buckets."""
        coming = [] if self._one_exchange else self._post(0)
        for number, load in enumerate(self._plan.loads):
            if self._one_exchange:
                coming = self._post(number, self._outgoing(load))
            else:
                for part in self._outgoing(load):
                    self._settle(self._most - part.num_bytes)
                    self._post_parts(number, [], [part])
            if self._links.sites:  # what it sends has to be gone before there is room for that
                self._settle(0)
            arrived = self._arrive(number, coming)
            early = not self._one_exchange and self._fits(number)
            if early:
                coming = self._post(number + 1)
            bucket = self._collect(number, load, arrived)
            if not early and not self._one_exchange:
                coming = self._post(number + 1)
            if bucket is not None:
                self._give(*bucket)
                self._relay.free(load.num_bytes)
        self._settle(0)
        return self._damage

    # ---- between sites

    @property
    def _slow(self) -> Group:
        assert self._links.slow is not None
        return self._links.slow

    def _post(self, number: int, outgoing: Sequence[Part] = ()) -> list[_Message]:
        """Begin to receive a bucket's parts over the slow link, and to send some."""
        return self._post_parts(number, self._incoming(number), outgoing)

    def _post_parts(
        self, number: int, incoming: Sequence[Part], outgoing: Sequence[Part]
    ) -> list[_Message]:
        """One exchange. Returns what is received; what is sent is for `_settle`."""
        parts = [*incoming, *outgoing]
        if not parts:
            return []
        rooms = [self._relay.room(_message_bytes(part)) for part in incoming]
        rooms += [self._packed(number, part) for part in outgoing]
        peers = [p.owner for p in incoming] + [p.root for p in outgoing]
        pairs, count = list(zip(rooms, peers, strict=True)), len(incoming)
        with _Naming(self, number, parts[0], 0, peers[0]):
            works = self._slow.exchange(pairs[:count], pairs[count:], number)
        messages = [_Message(*row) for row in zip(parts, rooms, works, strict=True)]
        self._sent += [(number, message) for message in messages[count:]]
        return messages[:count]

    def _outgoing(self, load: Load) -> list[Part]:
        """What this rank sends to other sites."""
        return [part for part in load.parts if part.owner == self._rank != part.root]

    def _incoming(self, number: int) -> list[Part]:
        """What this rank receives from other sites."""
        loads = self._plan.loads
        parts = loads[number].parts if number < len(loads) else ()
        return [part for part in parts if part.root == self._rank != part.owner]

    def _fits(self, number: int) -> bool:
        """Whether what comes next has room beside this bucket and its parts: the slow link then
        goes on while the site broadcasts."""
        load = self._plan.loads[number]
        here = [part for part in load.parts if part.site in self._links.sites]
        own = [_message_bytes(part) for part in here if part.root == self._rank]
        others = [_message_bytes(part) for part in here if part.root != self._rank]
        after = [_message_bytes(part) for part in self._incoming(number + 1)]
        whole = load.num_bytes if self._needs else 0
        return whole + sum(own) + max(others, default=0) + sum(after) <= self._most

    def _arrive(self, number: int, coming: list[_Message]) -> dict[tuple[int, int], Tensor]:
        """What has come over the slow link, by owner and root."""
        arrived = {}
        for message in coming:
            part = message.part
            with _Naming(self, number, part, 0, part.owner):
                self._slow.wait(message.work)
            arrived[part.owner, part.root] = message.buffer
        coming.clear()  # the memory goes part by part
        return arrived

    def _settle(self, most: int) -> None:
        """Wait until at most so many bytes are being sent."""
        while self._sent and sum(m.part.num_bytes for _, m in self._sent) > most:
            number, message = self._sent.popleft()
            with _Naming(self, number, message.part, 0, message.part.root):
                self._slow.wait(message.work)
            self._relay.free(len(message.buffer))

    def _packed(self, number: int, part: Part) -> Tensor:
        """A part of this rank's own shards with its checksum."""
        tensors = [self._own[slot.shard.name, slot.shard.start] for slot in part.slots]
        buffer = self._relay.room(_message_bytes(part))
        copy = self._relay.packing(number, part, tensors)
        _write_sum(buffer, copy.pack(tensors, buffer[: part.num_bytes]))
        return buffer

    # ---- inside the site

    def _collect(
        self, number: int, load: Load, arrived: dict[tuple[int, int], Tensor]
    ) -> tuple[Bucket, Tensor] | None:
        """Take part in the broadcasts of this rank's site; the whole bucket where it is needed."""
        bucket = None
        if self._needs:
            self._relay.hold(load.num_bytes)
            bucket = self._take(load.num_bytes)
        views = [] if bucket is None else _views(load, bucket)
        for part in load.parts:
            if part.site not in self._links.sites:
                continue
            if (part.owner, part.root) in arrived:
                buffer = arrived.pop((part.owner, part.root))
            elif part.root == self._rank:
                buffer = self._packed(number, part)
            else:
                buffer = self._relay.room(_message_bytes(part))
            self._spread(number, part, buffer)
            if part.owner != self._rank or self._needs:
                self._open(number, part, buffer, views)
            self._relay.free(len(buffer))
            del buffer
        if bucket is None:
            return None
        said = reshard.checksum(bucket)
        return Bucket(tensors=load.tensors, num_bytes=load.num_bytes, checksum=said), bucket

    def _spread(self, number: int, part: Part, buffer: Tensor) -> None:
        group = self._links.sites[part.site]
        if group is not None:
            peer = part.root if part.root != self._rank else -1
            with _Naming(self, number, part, 1, peer):
                group.broadcast(buffer, part.root)

    def _open(self, number: int, part: Part, buffer: Tensor, views: list[Tensor]) -> None:
        """Verify a part on its way into the bucket."""
        if views:
            found = self._relay.unpacking(number, part).unpack(buffer[: part.num_bytes], views)
        else:
            found = reshard.checksum(buffer[: part.num_bytes])
        want = _read_sum(buffer)
        if found == want or self._damage is not None:
            return
        stage = 0 if part.root == self._rank else 1
        source = part.owner if part.root == self._rank else part.root
        self._damage = self.failure(
            "data",
            number,
            part,
            stage,
            f"what rank {self._rank} got from rank {source} changed on its way: checksum "
            f"{found:#x} instead of {want:#x}",
        )

    def failure(self, kind: Any, number: int, part: Part, stage: int, why: str) -> Failure:
        """Named by bucket and what is in it."""
        first = part.slots[0].shard.name
        where = f"bucket {number} of {len(self._plan.loads)} ({first} ...)"
        return Failure(kind, number, stage, self._rank, f"{where}: {why}")


class _Naming:
    """Around an exchange: what the library says becomes a `LinkError` that names bucket and
    peer."""

    def __init__(self, run: _Run, number: int, part: Part, stage: int, peer: int) -> None:
        self._run, self._where = run, (number, part, stage)
        self._peer = f"rank {peer}" if peer >= 0 else "the ranks of its site"

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, RuntimeError):
            return
        number, part, stage = self._where
        rank, limit = self._run._rank, self._run._limit
        if time.monotonic() - self._start >= 0.9 * limit:
            late = f"rank {rank} waited {limit:g} s for {self._peer}"
            failure = self._run.failure("late", number, part, stage, late)
        else:
            lost = f"rank {rank} lost {self._peer} ({_first_line(error)})"
            failure = self._run.failure("link", number, part, stage, lost)
        raise LinkError(failure) from error


def _first_line(error: BaseException) -> str:
    """What a library says, without where its source lies."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return re.sub(r"^\[\S+\] ", "", line).partition(". This is")[0][:200]


# ---- bytes


def _message_bytes(part: Part) -> int:
    """Of a part and its checksum, which starts at a word."""
    return part.num_bytes + -part.num_bytes % _WORD + _SUM_BYTES


def _write_sum(buffer: Tensor, said: int) -> None:
    signed = said - 2**64 if said >= 2**63 else said
    buffer[-_SUM_BYTES:].view(torch.int64).fill_(signed)


def _read_sum(buffer: Tensor) -> int:
    return int(buffer[-_SUM_BYTES:].view(torch.int64)) % 2**64


def _views(load: Load, bucket: Tensor) -> list[Tensor]:
    """The tensors of a bucket, in its memory."""
    views = []
    for meta in load.tensors:
        dtype = getattr(torch, meta.dtype)
        count = 1
        for size in meta.shape:
            count *= size
        end = meta.offset + count * dtype.itemsize
        views.append(bucket[meta.offset : end].view(dtype).view(meta.shape))
    return views


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
