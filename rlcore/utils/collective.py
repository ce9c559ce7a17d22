"""Run small collectives over the default process group (the ranks of one role) or a given group,
such as the group of all ranks (`everyone`). With a single rank, collectives return at once."""

import os
import statistics
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

Op = Literal["sum", "max", "min"]
Group = dist.ProcessGroup | None
"""Process group; None: the default group."""


_devices: dict[int, list[Any]] = {}
"""Gloo devices by process id; a forked child makes its own, as it lacks its parent's threads."""


def share_gloo_device() -> None:
    """Make all gloo process groups share one device. Call this before the first group is made.

    By default each group has a separate device, whose thread wakes about a hundred times a second.
    Megatron makes about forty groups for a layout. In an idle process, 80 groups use 0.1 of a core
    with separate devices, and 0.003 with a shared device (torch 2.13, 2 cores).
    """
    made = dist.ProcessGroupGloo.__init__
    if getattr(made, "shares", False):
        return

    def init(
        self: dist.ProcessGroupGloo,
        store: Any,
        rank: int,
        size: int,
        timeout: Any = default_pg_timeout,
    ) -> None:
        if not isinstance(timeout, timedelta):  # torch passed an options object that has devices
            made(self, store, rank, size, timeout)
            return
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in stubs
        options._devices = _devices_here()
        options._timeout = timeout
        options._threads = 2 * len(options._devices)  # torch's default number of threads
        made(self, store, rank, size, options)

    init.shares = True  # type: ignore[attr-defined]  # mark rlcore's method
    dist.ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]  # replace torch's method


def _devices_here() -> list[Any]:
    """Return this process's gloo devices, chosen as torch would choose them for each group."""
    pid = os.getpid()
    if pid not in _devices:
        make, names = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME", "")
        found = [make.create_device(interface=name) for name in names.split(",") if name]
        _devices[pid] = found or [make.create_default_device()]
    return _devices[pid]


def everyone(store: Any, rank: int, world_size: int, timeout_s: float) -> dist.ProcessGroup:
    """Make a gloo group of all ranks; the default groups hold one role's ranks. Collective.

    Args:
        store: the launcher's store, under a prefix that nothing else uses.
        timeout_s: deadline of every wait in the group.
    """
    made = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))
    return made  # type: ignore[return-value]  # a backend has a group's methods


def is_alone(group: Group = None) -> bool:
    """Return whether the group has no other rank."""
    if group is not None:
        return group.size() == 1
    return not dist.is_initialized() or dist.get_world_size() == 1


def place(group: Group = None) -> tuple[int, int]:
    """Return rank and number of ranks in the group."""
    if is_alone(group):
        return 0, 1
    return _rank(group), dist.get_world_size() if group is None else group.size()


def is_first(group: Group = None) -> bool:
    """Return whether this rank is the group's first."""
    return place(group)[0] == 0


def reduce_floats(values: list[float], op: Op = "sum", group: Group = None) -> list[float]:
    """Reduce the values element-wise over all ranks, in float64, on the CPU."""
    if is_alone(group) or not values:
        return values
    return reduce_tensor(torch.tensor(values, dtype=torch.float64), op, group).tolist()


def reduce_tensor(values: torch.Tensor, op: Op = "sum", group: Group = None) -> torch.Tensor:
    """Reduce a tensor on the CPU element-wise over all ranks, in place, and return it. Its shape
    must be the same on all ranks."""
    if not is_alone(group):
        dist.all_reduce(values, op=getattr(dist.ReduceOp, op.upper()), group=group)
    return values


def barrier(group: Group = None) -> None:
    """Wait until every rank has arrived; the process group's time-out applies."""
    if not is_alone(group):
        reduce_floats([0.0], group=group)


def any_rank(flag: bool, group: Group = None) -> bool:
    """Return whether the flag is set on any rank."""
    return reduce_floats([float(flag)], "max", group)[0] > 0


def clock_offset(rounds: int = 9, group: Group = None) -> float:
    """Return how many seconds this machine's clock (`time.time`) is behind the first rank's clock;
    0 on the first rank's machine. Measured as the median over `rounds` barriers, which all ranks
    leave at about the same time. Collective."""
    if is_alone(group):
        return 0.0
    first = _rank(group) == 0
    here = float(zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes()))
    same = here == reduce_floats([here if first else 0.0], group=group)[0]
    behind = []
    for _ in range(rounds):
        barrier(group)
        now = time.time()
        behind.append(reduce_floats([now if first else 0.0], group=group)[0] - now)
    return 0.0 if same else statistics.median(behind)


def _rank(group: Group) -> int:
    return dist.get_rank() if group is None else group.rank()


def broadcast_text(text: str, group: Group = None) -> str:
    """Return the first rank's text on every rank."""
    return broadcast_bytes(text.encode(), group).decode()


def broadcast_bytes(data: bytes, group: Group = None) -> bytes:
    """Return the first rank's bytes on every rank."""
    if is_alone(group):
        return data
    mine = _rank(group) == 0
    data = data + b"." if mine else b""  # torch cannot send an empty tensor
    size = int(reduce_floats([float(len(data))], "max", group)[0])
    buffer = torch.zeros(size, dtype=torch.uint8)
    if mine:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, group=group, group_src=0)
    return buffer.numpy().tobytes()[:-1]


def gather_bytes(data: bytes, group: Group = None) -> list[bytes]:
    """Return every rank's bytes in rank order on the first rank; an empty list on the others."""
    if is_alone(group):
        return [data]
    rank, size = place(group)
    lengths = torch.zeros(size, dtype=torch.int64)
    lengths[rank] = len(data)
    dist.all_reduce(lengths, group=group)
    buffer = torch.zeros(1 + int(lengths.max()), dtype=torch.uint8)  # torch sends no empty tensor
    buffer[: len(data)] = torch.frombuffer(bytearray(data + b"."), dtype=torch.uint8)[:-1]
    found = [torch.empty_like(buffer) for _ in range(size)] if rank == 0 else None
    dist.gather(buffer, found, group=group, group_dst=0)
    return [x[:n].numpy().tobytes() for x, n in zip(found or (), lengths.tolist(), strict=False)]


def gather_texts(text: str, group: Group = None) -> list[str]:
    """Return every rank's text in rank order, on every rank; texts are cut after 255 bytes."""
    if is_alone(group):
        return [text]
    rank, size = place(group)
    data = text.encode()[:255]
    table = torch.zeros(size, 256, dtype=torch.uint8)
    table[rank, : len(data) + 1] = torch.tensor([len(data), *data], dtype=torch.uint8)
    dist.all_reduce(table, group=group)  # Each rank fills its row; all other rows are 0.
    return [bytes(row[1 : row[0] + 1]).decode(errors="replace") for row in table.tolist()]
