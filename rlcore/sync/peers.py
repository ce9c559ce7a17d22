"""The ranks that take part in a push: who is there, what went wrong where, and their own groups.

Roles that have nothing else in common meet here: train ranks whose default process group is
Megatron's, and rollout ranks in another cluster. So groups are made from the launcher's store,
under names of their own, beside the default group; what is small and must not hang goes through the
store itself. Every wait has a deadline and names who did not come.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.utils.net import decode, encode

_GRACE_S = 2.0
"""After the first failure the others have this long to tell theirs, so that the cause is known."""


class Failure(msgspec.Struct, frozen=True, order=True):
    """Why a push failed on one rank. The smallest is the cause, as far as it can be known: damage
    is seen where it happens, while a rank that gives up breaks the links of all others. Kinds sort
    by their names, as they should."""

    kind: Literal["data", "engine", "late", "link"]
    bucket: int
    stage: int
    """0: between sites, 1: inside one."""
    rank: int
    text: str


class PushError(RuntimeError):
    """A failed push, as every rank sees it."""


class PushTimeoutError(PushError, TimeoutError):
    """A rank was late."""


class Peers:
    """The ranks 0..world_size-1 of a channel. Every rank makes one, and calls the methods that are
    collective in the same order."""

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        store: Any = None,
        *,
        timeout_s: float = 600.0,
        name: str = "sync",
    ) -> None:
        """Without a store, the ranks and the store are those of the default process group; without
        that either, a world of one.

        Args:
            timeout_s: of every wait.
            name: of the groups and the keys; two channels of one store need two.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s {timeout_s}: give a time above 0")
        if store is None and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            rank, world_size = dist.get_rank(), dist.get_world_size()
        if store is None and (world_size or 1) > 1:
            raise ValueError(f"world_size {world_size}: needs the store that the ranks meet at")
        self.rank, self.world_size = rank or 0, world_size or 1
        self.timeout_s = timeout_s
        self._name = name
        self._store = dist.PrefixStore(f"rlcore/{name}", store or dist.HashStore())
        self._pushes = 0
        self._generation = 0
        self._groups: dict[str, Group] = {}

    # ---- a push

    def arrive(self) -> None:
        """Wait until every rank has entered. PushTimeoutError names the ranks that have not."""
        self._pushes += 1
        self._forget(self._pushes - 2)
        if self._failed():
            raise PushTimeoutError(
                f"push {self._pushes}: rank {self.rank} is late, the others have given up"
            )
        if missing := self._meet("here"):
            self._store.add(self._key("failed"), 1)
            raise PushTimeoutError(
                f"push {self._pushes}: rank {self.rank} waited {self.timeout_s:g} s for "
                f"{_ranks(missing)} to enter"
            )

    def finish(self, failure: Failure | None) -> None:
        """Wait for the outcome on all ranks. Raises one and the same PushError on each of them when
        one failed, naming the cause; every group is made anew then."""
        push = self._pushes
        if failure is not None:
            self._store.set(self._key("why", self.rank), encode(failure))
            self._store.add(self._key("failed"), 1)
            self._drop()  # whoever waits for this rank learns it now
        missing = self._meet("done", at_once=failure is not None)
        if not self._failed() and not missing:
            return
        if self._failed():
            missing = self._await_all("done", _GRACE_S)
        self._drop()
        failures = [
            decode(self._store.get(key), Failure)
            for key in (self._key("why", rank) for rank in range(self.world_size))
            if self._store.check([key])
        ]
        lost = f"; {_ranks(missing)} said nothing" if missing else ""
        if not failures:
            self._store.add(self._key("failed"), 1)
            raise PushTimeoutError(
                f"push {push}: rank {self.rank} waited {self.timeout_s:g} s for "
                f"{_ranks(missing)} to end"
            )
        cause = min(failures)
        error = PushTimeoutError if cause.kind == "late" else PushError
        raise error(f"push {push}: {cause.text}{lost}; no engine decodes before a whole push")

    def _meet(self, what: str, at_once: bool = False) -> list[int]:
        """Say that this rank is at a point and wait for all; the ranks that did not come. Whoever
        comes `at_once` ends the wait for all."""
        self._store.set(self._key(what, self.rank), b"1")
        if self._store.add(self._key(what), 1) == self.world_size or at_once:
            self._store.set(self._key(what, "all"), b"1")
        with suppress(RuntimeError):  # of a wait that is over
            self._store.wait([self._key(what, "all")], timedelta(seconds=self.timeout_s))
            return []
        return self._absent(what)

    def _await_all(self, what: str, seconds: float) -> list[int]:
        keys = [self._key(what, rank) for rank in range(self.world_size)]
        with suppress(RuntimeError):
            self._store.wait(keys, timedelta(seconds=seconds))
        return self._absent(what)

    def _absent(self, what: str) -> list[int]:
        return [r for r in range(self.world_size) if not self._store.check([self._key(what, r)])]

    def _failed(self) -> bool:
        return self._store.add(self._key("failed"), 0) > 0

    def _key(self, what: str, of: int | str = "count") -> str:
        return f"{self._pushes}/{what}/{of}"

    def _forget(self, push: int) -> None:
        """Remove this rank's keys of an old push."""
        if push > 0:
            for what in ("here", "done", "why"):
                self._store.delete_key(f"{push}/{what}/{self.rank}")

    # ---- groups

    def group(self, name: str, ranks: Sequence[int], device: torch.device) -> "Group":
        """The group of this name, made at its first use; collective over `ranks`. Messages are of
        memory on `device`: NCCL carries a GPU's, gloo the host's."""
        if name not in self._groups:
            store = dist.PrefixStore(f"groups{self._generation}/{name}", self._store)
            self._groups[name] = Group(name, tuple(ranks), self.rank, store, device, self.timeout_s)
        return self._groups[name]

    def everyone(self) -> "Group":
        """The group of all ranks, on the host."""
        return self.group("all", range(self.world_size), torch.device("cpu"))

    def _drop(self) -> None:
        """Close all links, which ends the waits of whoever is at their other end."""
        for group in self._groups.values():
            group.close()
        self._groups = {}
        self._generation = self._pushes

    def close(self) -> None:
        """Leave the groups."""
        self._drop()


class Group:
    """Some ranks that exchange tensors, under global rank numbers. A wait that ends without its
    peer raises RuntimeError, and the group is void then."""

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
        self._place = {rank: i for i, rank in enumerate(ranks)}
        self._wait = timedelta(seconds=timeout_s)
        place = self._place[rank]
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._wait
            self._group = dist.ProcessGroupNCCL(store, place, len(ranks), options)
            # All ranks make the communicator; an exchange later has only two of them.
            self.broadcast(torch.zeros(1, device=device), ranks[0])
        else:
            self._group = dist.ProcessGroupGloo(store, place, len(ranks), self._wait)

    def exchange(
        self,
        receives: Sequence[tuple[Tensor, int]],
        sends: Sequence[tuple[Tensor, int]],
        tag: int,
    ) -> list[Any]:
        """Begin to receive and to send tensors, each with its peer; what to `wait` for, by tensor.
        The tensors must stay until then. NCCL has no tags and works off a rank's exchanges in their
        order: two ranks that give each other something do so in one exchange."""
        batched = self.device.type == "cuda"
        if batched:
            self._group._start_coalescing()
        works = [self._group.recv([t], self._place[peer], tag) for t, peer in receives]
        works += [self._group.send([t], self._place[peer], tag) for t, peer in sends]
        if batched:
            return [self._group._end_coalescing()] * len(works)
        return works

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """From the root to all."""
        options = dist.BroadcastOptions()
        options.rootRank = self._place[root]
        options.timeout = self._wait
        self.wait(self._group.broadcast([tensor], options))

    def wait(self, work: Any) -> None:
        """Until a message has gone or come. With a deadline NCCL blocks the host, too."""
        work.wait(self._wait)

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """What each rank gave, in the order of `ranks`; on the host."""
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
        """Close the links at once."""
        with suppress(RuntimeError):  # of a group that is broken already
            self._group.abort()
        del self._group


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
