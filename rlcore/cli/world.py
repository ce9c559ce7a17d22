"""Joining torchrun's world and leaving it in order."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlcore.rollout.transport import Hub, LocalHub, ZmqHub, listening_host


@dataclass(frozen=True, slots=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    store: Any
    """torchrun's key-value store under a prefix of this start; None in a world of one."""

    def fails_first(self) -> bool:
        """True for the first rank that asks."""
        if self.store is None:
            return True
        try:
            return self.store.add("failed", 1) == 1
        except dist.DistError:  # the store went with the rank that held it: that one was first
            return False


def join(timeout_s: float) -> World:
    """Make the default process group (NCCL and gloo with GPUs, gloo without). Without torchrun a
    world of one."""
    has_cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if has_cuda else torch.device("cpu")
    if has_cuda:
        # Megatron orders its kernels by it, and CUDA reads it when the first context is made.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if has_cuda else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "WORLD_SIZE" not in os.environ:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        return World(0, 1, 0, device, None)
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # a restarted gang must not read the addresses of the one that died
    start = "/".join(os.environ.get(f"TORCHELASTIC_{k}", "0") for k in ("RUN_ID", "RESTART_COUNT"))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"{start}/groups", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    return World(rank, size, local_rank, device, dist.PrefixStore(f"{start}/hub", store))


def make_hub(world: World, interface: str) -> Hub:
    """Inboxes for this world."""
    if world.size == 1:
        return LocalHub()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    host = listening_host(os.environ.get("MASTER_ADDR", ""), interface, here < world.size)
    return ZmqHub(world.rank, world.size, world.store, host)


def leave() -> None:
    """Wait for the others, then close the process group: without it a run may abort at exit."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
