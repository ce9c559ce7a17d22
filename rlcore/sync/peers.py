"""Coordinate the ranks of a weight update: synchronization points, common failures, process groups.

A weight update includes train ranks, whose default process group is Megatron's, and rollout ranks,
possibly in another cluster. So `Peers` makes its own named process groups from the launcher's
store. Small messages that must not hang go through the store itself. Every wait has a deadline; the
error of a timeout names the missing ranks.

A weight update has three synchronization points: `here`, before any exchange; `done`, when all
weights are sent to the engines; `end`, when the engines have loaded the weights. At each point
every rank reports its success or failure, and one atomic value in the store decides for all ranks.
If the value is "failed", all ranks raise the same stored message, even a rank that arrives late.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.config.schema import ClusterConfig
from rlcore.utils.net import decode, encode
from rlcore.utils.timed_store import TimedStore

_GRACE_S = 2.0
"""Seconds to wait, after the first failure, for reports of other failures, to find the cause."""
_LEFT_S = 1.0
"""Seconds to wait for reports from the other ranks of a failed collective. Ranks that do not report
the failure in this time are the missing ranks."""
_LOOK_S = 0.1
"""Longest pause between two checks of the store, in seconds."""
_AT_LAST = 1 << 30
"""Bucket number of a `late` failure at a synchronization point; sorts after all buckets."""
_KEPT = 8
"""Number of past weight updates whose results a late rank can still read."""

Kind = Literal["data", "engine", "learner", "late", "link", "error"]
_ORDER: tuple[Kind, ...] = ("data", "engine", "learner", "late", "link", "error")
Point = Literal["here", "done", "end"]
_WHAT = {"here": "to enter", "done": "to finish its part", "end": "to finish loading"}
_Result = TypeVar("_Result")


class Failure(msgspec.Struct, frozen=True):
    """Failure of a weight update on one rank."""

    kind: Kind
    """Cause. `data`: weights corrupt in transfer. `engine` or `learner`: error of the engine or
    learner. `late`: a peer missed its deadline. `link`: a connection broke. `error`: any other."""
    bucket: int
    stage: int
    """Stage of the transfer. 0: between sites, 1: inside a site, 2: between an engine's ranks."""
    rank: int
    text: str
    peers: tuple[int, ...] = ()
    """Ranks that this rank waited for, or to which it lost the connection."""

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Sort key that puts causes before consequences. Failures of data, engine and learner
        come first. Missed deadlines follow by bucket, because a late rank delays others in later
        buckets. Then come broken links, because a failed rank breaks links; last, other errors."""
        return _ORDER.index(self.kind), self.bucket, self.stage, self.rank


class WeightUpdateError(RuntimeError):
    """A weight update failed. All ranks raise this error with the same message."""


class WeightUpdateTimeoutError(WeightUpdateError, TimeoutError):
    """A weight update failed because a rank missed its deadline."""


class LinkError(RuntimeError):
    """The weight update cannot continue on this rank, because of `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class _Sentence(msgspec.Struct, frozen=True):
    """Error message that all ranks raise."""

    is_late: bool
    text: str


@contextmanager
def blamed(kind: Kind, rank: int, where: str = "") -> Iterator[None]:
    """Convert exceptions of the `with` block to a `LinkError` with a failure of this kind."""
    try:
        yield
    except LinkError:
        raise
    except Exception as error:
        why = f"{where}rank {rank}: {type(error).__name__}: {error}"
        raise LinkError(Failure(kind, -1, 0, rank, why)) from error


class Peers:
    """Ranks 0..world_size-1 of a weight channel. Every rank makes one `Peers`. All ranks call
    collective methods in the same order."""

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        store: Any = None,
        *,
        timeout_s: float = ClusterConfig.timeout_s,
        name: str = "sync",
    ) -> None:
        """Join the weight channel `name`. If `store` is None, use ranks and store of the default
        process group; if there is no such group, this rank is alone.

        Args:
            timeout_s: maximum time of every wait.
            name: prefix of groups and store keys. Channels with the same name are numbered, so all
                ranks must make these channels in the same order. Other channels need other names.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s {timeout_s}: must be above 0")
        if store is None and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            rank, world_size = dist.get_rank(), dist.get_world_size()
        if store is None and (world_size or 1) > 1:
            raise ValueError(f"world_size {world_size}: more than one rank needs a store; pass one")
        self.rank, self.world_size = rank or 0, world_size or 1
        self.timeout_s = timeout_s
        store = dist.PrefixStore(f"rlcore/{name}", store or dist.HashStore())
        number = TimedStore(store, timeout_s).add(f"made/{self.rank}", 1)
        self._groups_store = dist.PrefixStore(str(number), store)
        self._store = TimedStore(self._groups_store, timeout_s)
        self._updates = 0
        self._told = False
        self._groups: dict[str, ExchangeGroup] = {}

    # ---- a weight update

    def begin(self) -> None:
        """Begin a weight update on this rank."""
        self._updates += 1
        self._told = False
        self._forget(self._updates - _KEPT)

    def step(self, point: Point, work: Callable[[], _Result], kind: Kind = "error") -> _Result:
        """Do this rank's work up to a synchronization point, then wait until all ranks have
        succeeded or one has failed; collective.

        Args:
            work: work of this rank; if the work raises an error, the other ranks are notified.
            kind: failure kind for exceptions of `work` that are not a `LinkError`.

        Raises:
            WeightUpdateError, WeightUpdateTimeoutError: a rank failed or did not reach the point.
                The message is the same on every rank. All groups are closed; their next use makes
                new groups.
        """
        error, failure = None, None
        try:
            with blamed(kind, self.rank):
                result = work()
        except LinkError as link:
            failure, error = link.failure, link.__cause__
            if failure.kind in ("late", "link"):
                error = None  # the error's traceback would keep connections open: peers would wait
        try:
            self.vote(point, failure)
        except WeightUpdateError as verdict:
            raise verdict from error
        return result

    def vote(self, point: Point, failure: Failure | None = None) -> None:
        """Report this rank's success or `failure`, and wait for the common result of all ranks. If
        a rank failed, raise WeightUpdateError or WeightUpdateTimeoutError."""
        if failure is not None:
            self.tell(point, failure)
        verdict = self._key(point, "verdict")
        self._store.set(self._key(point, self.rank), "1")
        if self._store.add(self._key(point), 1) == self.world_size:
            self._store.compare_set(verdict, "", "ok")
        came = self._came(verdict, self.timeout_s)
        if not came:
            self._give_up(point)
        if self._store.compare_set(verdict, "", "failed") == b"ok":
            if not came:  # the missing ranks arrived just in time, so remove the report
                self._store.delete_key(self._key("why", self.rank))
            return
        self._drop()
        said = self._sentence(point)
        raise (WeightUpdateTimeoutError if said.is_late else WeightUpdateError)(said.text)

    def tell(self, point: Point, failure: Failure) -> None:
        """Report a failure of this rank before the synchronization point, so that the other ranks
        stop waiting for this rank."""
        if self._told:
            return
        self._told = True
        self._tell_why(encode(failure))
        self._store.compare_set(self._key(point, "verdict"), "", "failed")
        self._drop()

    def _give_up(self, point: Point) -> None:
        """Report the ranks that miss a synchronization point's deadline, but may still arrive."""
        missing = self._absent(point, range(self.world_size))
        if missing and not self._told:
            waited = f"rank {self.rank} waited {self.timeout_s:g} s for {ranks_text(missing)}"
            text = f"{waited} {_WHAT[point]}"
            late = Failure("late", _AT_LAST, 0, self.rank, text, tuple(missing))
            self._tell_why(encode(late))
        elif not missing:  # all ranks arrived, so the last one stores the result
            self._came(self._key(point, "verdict"), _GRACE_S)

    def _tell_why(self, said: bytes) -> None:
        key = self._key("why", self.rank)
        self._store.set(key, said)

    def _came(self, key: str, seconds: float) -> bool:
        with suppress(RuntimeError):  # the store raises RuntimeError after a timeout
            self._store.wait([key], timedelta(seconds=seconds))
            return True
        return False

    def announce(self, news: str) -> None:
        """Announce `news` to all ranks; call before the synchronization point `here`."""
        self._store.set(self._key(news), "1")

    def has_announced(self, news: str) -> bool:
        """Return whether any rank announced `news`; call after the synchronization point `here`."""
        return self._store.check([self._key(news)])

    def _sentence(self, point: Point) -> _Sentence:
        """Return why the weight update failed. The first rank stores the message for all ranks."""
        key = self._key(point, "sentence")
        if not self._store.check([key]):
            said = msgspec.json.encode(self._compose(point)).decode()
            self._store.compare_set(key, "", said)
        return msgspec.json.decode(self._store.get(key), type=_Sentence)

    def _compose(self, point: Point) -> _Sentence:
        everyone = range(self.world_size)
        why = {rank: self._key("why", rank) for rank in everyone}
        if point != "here":  # no rank waits before `here`: every failure is a cause
            self._await(point, everyone, _GRACE_S)
        failures = [
            decode(self._store.get(key), Failure)
            for key in why.values()
            if self._store.check([key])
        ]
        known = {failure.rank for failure in failures}
        missing = [rank for rank in self._absent(point, everyone) if rank not in known]
        if not failures:
            failures = [
                Failure("error", -1, 0, self.rank, "a rank failed without an error message")
            ]
        cause = min(failures, key=lambda failure: failure.order)
        text = f"weight update {self._updates}: {cause.text}"
        if others := [f.text for f in failures if f.kind == "error" and f is not cause]:
            text += f"; {others[0]}"
        if point != "here":
            text += _missing_text(failures, missing)
        return _Sentence(cause.kind == "late", f"{text}; engines wait for a complete weight update")

    def _await(self, what: str, ranks: Iterable[int], seconds: float) -> bool:
        """Wait until `ranks` have set their store key `what`; return whether they have. If `what`
        is not a synchronization point, stop waiting when the weight update fails."""
        end = time.monotonic() + seconds
        keys = [self._key(what, rank) for rank in ranks]
        pause = 0.001
        while not self._store.check(keys):
            if time.monotonic() >= end or (what not in _WHAT and self._has_failed()):
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_S)
        return True

    def _absent(self, what: str, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.check([self._key(what, rank)])]

    def _has_failed(self) -> bool:
        """Return whether the update has failed; during transfers, only a failure sets this key."""
        return self._store.check([self._key("done", "verdict")])

    def _key(self, what: str, of: int | str = "count") -> str:
        return f"{self._updates}/{what}/{of}"

    def _forget(self, update: int) -> None:
        """Remove this rank's keys of an old weight update; rank 0 also removes the shared keys."""
        if update < 1:
            return
        for what in ("here", "done", "end", "why"):
            self._store.delete_key(f"{update}/{what}/{self.rank}")
            for of in ("count", "verdict", "sentence") if self.rank == 0 else ():
                self._store.delete_key(f"{update}/{what}/{of}")

    # ---- groups

    def group(self, name: str, ranks: Sequence[int], device: torch.device) -> "ExchangeGroup":
        """Return the group with this name; the first call makes it, collectively over `ranks`. The
        group exchanges tensors on `device`: NCCL for GPU tensors, gloo for host tensors.

        Raises:
            LinkError: ranks of the group have not joined in time.
        """
        if name in self._groups:
            return self._groups[name]
        where = f"rank {self.rank} could not join the group {name}"
        start, point = time.monotonic(), f"join {name}"
        self._store.set(self._key(point, self.rank), "1")
        # Wait first, because torch does not name missing ranks and NCCL has no timeout here.
        if not self._await(point, ranks, self.timeout_s):
            missing = self._absent(point, ranks)
            raise LinkError(
                self._left(where, start, missing, "the weight update failed on another rank", 0)
            )
        try:
            store = dist.PrefixStore(f"groups{self._updates}/{name}", self._groups_store)
            made = ExchangeGroup(name, tuple(ranks), self.rank, store, device, self.timeout_s)
        except RuntimeError as error:
            others = [rank for rank in ranks if rank != self.rank]
            raise LinkError(self._left(where, start, others, first_line(error), 0)) from error
        self._groups[name] = made
        return made

    def everyone(self) -> "ExchangeGroup":
        """Return the group of all ranks, for host tensors."""
        return self.group("all", range(self.world_size), torch.device("cpu"))

    @contextmanager
    def together(
        self, group: "ExchangeGroup", where: str, bucket: int = -1, stage: int = 0
    ) -> Iterator[None]:
        """Run a collective of `group` in the `with` block. If the collective fails, raise a
        `LinkError` that names the ranks that did not take part."""
        start = time.monotonic()
        group.begin_call()
        try:
            yield
        except RuntimeError as error:
            group.close()  # so that the collective fails on the other ranks, too
            point = f"left {group.name} {group.calls}"
            self._store.set(self._key(point, self.rank), "1")
            self._await(point, group.ranks, _LEFT_S)
            others = [rank for rank in group.ranks if rank != self.rank]
            missing = self._absent(point, group.ranks) or others
            said = first_line(error)
            raise LinkError(self._left(where, start, missing, said, stage, bucket)) from error

    def gather(
        self, group: "ExchangeGroup", mine: bytes, where: str, bucket: int = -1
    ) -> list[bytes]:
        """Gather `mine` from every rank of a group for host tensors, in the order of its ranks.

        Raises:
            LinkError: the gather failed; the message names the missing ranks.
        """
        with self.together(group, where, bucket, stage=2):
            return group.gather_bytes(mine)

    def _left(
        self, where: str, start: float, missing: Sequence[int], said: str, stage: int, bucket=-1
    ) -> Failure:
        return lost(self.rank, where, start, self.timeout_s, missing, said, stage, bucket)

    def renew(self) -> None:
        """Close all groups, because their members will change; call this on all ranks."""
        self._drop()

    def _drop(self) -> None:
        """Close all groups, so that no rank continues to wait for this rank."""
        for group in self._groups.values():
            group.close()
        self._groups = {}

    def close(self) -> None:
        """Close all groups."""
        self._drop()


def alone() -> Peers:
    """Return a `Peers` with this rank only, even if there is a default process group."""
    return Peers(0, 1, dist.HashStore())


def lost(
    rank: int,
    where: str,
    start: float,
    limit_s: float,
    peers: Sequence[int],
    said: str,
    stage: int,
    bucket: int = -1,
) -> Failure:
    """Return the failure of a wait that began at `start`. Its kind is `late` if the deadline has
    passed, else `link`."""
    names, at = ranks_text(peers), f"{where}: " if where else ""
    if time.monotonic() - start >= 0.9 * limit_s:
        text = f"{at}rank {rank} waited {limit_s:g} s for {names}"
        return Failure("late", bucket, stage, rank, text, tuple(peers))
    text = f"{at}rank {rank} lost {names} ({said})"
    return Failure("link", bucket, stage, rank, text, tuple(peers))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without torch's source location."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return re.sub(r"^\[\S+\] ", "", line).partition(". This is")[0][:200]


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 3`, or `ranks 1, 2`."""
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _missing_text(failures: Sequence[Failure], missing: Sequence[int]) -> str:
    """Return a text that names the missing ranks. If all failures are broken links, a missing rank
    with a broken link has exited. Any other missing rank may only be slow."""
    broken = all(failure.kind == "link" for failure in failures)
    seen = {peer for failure in failures for peer in failure.peers} if broken else set()
    gone = [rank for rank in missing if rank in seen]
    slow = [rank for rank in missing if rank not in seen]
    text = f"; {ranks_text(gone)} {_have(gone)} exited" if gone else ""
    if slow:
        text += f"; {ranks_text(slow)} {_have(slow)} not answered within {_GRACE_S:g} s"
    return text


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


class ExchangeGroup:
    """Process group whose methods take global rank numbers. If a peer is missing, a wait raises
    RuntimeError, and the group can no longer be used."""

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        store: Any,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.name, self.ranks, self.device = name, ranks, device
        self.calls = 0
        """Number of `Peers.together` blocks that used this group."""
        self._place = {rank: i for i, rank in enumerate(ranks)}
        self._wait = timedelta(seconds=timeout_s)
        place = self._place[rank]
        self._group: Any  # Any, because torch's type stubs lack most methods
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._wait
            self._group = dist.ProcessGroupNCCL(store, place, len(ranks), options)
            # Make NCCL's communicator now: that needs all ranks, but an exchange has only two.
            self.broadcast(torch.zeros(1, device=device), ranks[0])
        else:
            self._group = dist.ProcessGroupGloo(store, place, len(ranks), self._wait)

    def begin_call(self) -> None:
        """Count a `Peers.together` block that uses this group."""
        self.calls += 1

    def exchange(
        self,
        receives: Sequence[tuple[Tensor, int]],
        sends: Sequence[tuple[Tensor, int]],
        tag: int,
    ) -> list[Any]:
        """Begin to receive and send (tensor, peer) pairs. Return a handle per tensor for `wait`;
        keep the tensors alive until `wait` returns. NCCL has no tags and runs a rank's exchanges in
        order, so two ranks that send to each other must do so in one exchange."""
        batched = self.device.type == "cuda"
        if batched:
            self._group._start_coalescing()
        works = [self._group.recv([t], self._place[peer], tag) for t, peer in receives]
        works += [self._group.send([t], self._place[peer], tag) for t, peer in sends]
        if batched:
            return [self._group._end_coalescing()] * len(works)
        return works

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Broadcast a tensor from rank `root` to all ranks of the group."""
        options = dist.BroadcastOptions()
        options.rootRank = self._place[root]
        options.timeout = self._wait
        self.wait(self._group.broadcast([tensor], options))

    def wait(self, work: Any) -> None:
        """Wait until a send or receive is complete. The deadline makes NCCL block this thread."""
        work.wait(self._wait)

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Gather the bytes of every rank, in the order of `ranks`; host groups only."""
        sizes = self._gather(torch.tensor([len(mine)]))
        most = max(int(size) for size in sizes)
        padded = torch.zeros(max(most, 1), dtype=torch.uint8)
        if mine:
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = self._gather(padded)
        return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        out = [torch.empty_like(tensor) for _ in self.ranks]
        self.wait(self._group.allgather([out], [tensor]))
        return out

    def close(self) -> None:
        """Close all connections without waiting."""
        if self._group is None:
            return
        with suppress(RuntimeError):  # ignore errors of a broken group
            self._group.abort()
        self._group = None
