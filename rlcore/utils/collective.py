"""Small collectives over the default process group; on a world of one they return at once."""

import statistics
import time
import zlib
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

Op = Literal["sum", "max", "min"]


def is_alone() -> bool:
    """No other rank to talk to."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def reduce_floats(values: list[float], op: Op = "sum") -> list[float]:
    """Element-wise over all ranks, in float64, on the CPU."""
    if is_alone() or not values:
        return values
    t = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(t, op=getattr(dist.ReduceOp, op.upper()))
    return t.tolist()


def barrier() -> None:
    """Wait for every rank; the process group's deadline applies."""
    if not is_alone():
        reduce_floats([0.0])


def any_rank(flag: bool) -> bool:
    """Whether the flag is set anywhere."""
    return reduce_floats([float(flag)], "max")[0] > 0


def clock_offset(rounds: int = 9) -> float:
    """Seconds that this machine's clock (`time.time`) is behind rank 0's, 0 on rank 0's machine:
    the median over some barriers, which all ranks leave at about the same moment. Collective."""
    if is_alone():
        return 0.0
    rank = dist.get_rank()
    here = float(zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes()))
    same = here == reduce_floats([here if rank == 0 else 0.0])[0]
    behind = []
    for _ in range(rounds):
        barrier()
        now = time.time()
        behind.append(reduce_floats([now if rank == 0 else 0.0])[0] - now)
    return 0.0 if same else statistics.median(behind)


def broadcast_text(text: str) -> str:
    """Rank 0's text on every rank."""
    if is_alone():
        return text
    mine = dist.get_rank() == 0
    data = text.encode() + b"." if mine else b""  # never empty: an empty tensor cannot be sent
    size = int(reduce_floats([float(len(data))], "max")[0])
    buffer = torch.zeros(size, dtype=torch.uint8)
    if mine:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return bytes(buffer.tolist()).decode()[:-1]
