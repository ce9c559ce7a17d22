"""Connect a process to the other ranks that torchrun started, and disconnect at the end."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlcore.config import rules
from rlcore.config.schema import ClusterConfig
from rlcore.rollout.transport import CHANNELS, Hub, LocalHub, ZmqHub, listening_host
from rlcore.utils import collective, listen
from rlcore.utils.errors import ConfigError
from rlcore.utils.flight_recorder import FlightRecorder, has_agent
from rlcore.utils.health import Health, meet
from rlcore.utils.sealed import SealedStore, share_secret
from rlcore.utils.timed_store import TimedStore, call_within, silent_store

ANSWER_S = 5.0
"""Seconds that a failing rank waits for the store's answer whether another rank failed first."""
READ_S = 5.0
"""Maximum seconds that rank 0 waits for the other ranks to read its store before it exits."""


@dataclass(frozen=True, slots=True)
class World:
    """Position of this process in the run, and its connections to the other ranks."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    store: Any
    """torchrun's key-value store, with a key prefix for this start; None in a world of one rank."""
    rollout_ranks: int = 0
    """Number of ranks that only sample (the last ranks); 0: all ranks sample and train."""
    everyone: dist.ProcessGroup | None = None
    """Process group of all ranks; None if the default process group has all ranks."""
    timeout_s: float = ClusterConfig.timeout_s
    """Deadline of a wait for other ranks, or for the store."""
    health: Health | None = None
    """Heartbeats of all ranks, and the flight record of this rank."""
    secret: bytes = b""
    """Secret that only this run's ranks know; empty in a world of one rank."""

    @property
    def sealed(self) -> SealedStore:
        """Store whose values only this run's ranks can write."""
        return SealedStore(TimedStore(self.store, self.timeout_s), self.secret)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on this node, and on every other one."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    @property
    def train_ranks(self) -> int:
        """Number of ranks that train: the first ranks, as Megatron's global ranks start at 0."""
        return self.size - self.rollout_ranks

    @property
    def trains(self) -> bool:
        return self.rank < self.train_ranks

    @property
    def samples(self) -> bool:
        return not self.rollout_ranks or not self.trains

    def phase(self, name: str) -> None:
        """Set the phase in the flight record during start-up; in steps, `Spans` sets the phase."""
        if self.health is not None:
            self.health.flight.phase(name)

    def fails_first(self) -> bool:
        """Return True on the first rank that calls this method, False on all others."""
        if self.store is None:
            return True
        try:
            return TimedStore(self.store, ANSWER_S).add("failed", 1) == 1
        except (ConnectionError, dist.DistError):
            # Rank 0 exited, and so failed first. If torchrun's agent did, no rank can know.
            return has_agent()
        except TimeoutError:  # no rank can know; a reason twice is better than none
            return True


def pin(rollout_ranks: int, rollout_cores: Sequence[int], train_cores: Sequence[int]) -> None:
    """Bind this rank and its child processes to the CPU cores of its role. If no cores are given,
    do nothing. Must be called before any thread or process is started.

    Raises:
        ConfigError: this process may not use one of the cores.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    check_cores(rollout_cores, train_cores)
    if cores := rollout_cores if rank >= size - rollout_ranks else train_cores:
        os.sched_setaffinity(0, cores)


def check_cores(rollout_cores: Sequence[int], train_cores: Sequence[int]) -> None:
    """Raise ConfigError if this process may not use one of these CPU cores."""
    allowed = os.sched_getaffinity(0)
    for key, cores in (("rollout_cores", rollout_cores), ("train_cores", train_cores)):
        if not allowed.issuperset(cores):
            raise ConfigError(
                f"--cluster.{key} {' '.join(map(str, cores))}: this process may only use cores "
                f"{', '.join(map(str, sorted(allowed)))}; choose from these"
            )


def join(
    timeout_s: float, rollout_ranks: int, folder: Path, interface: str = "", refusal: str = ""
) -> World:
    """Make the default process group (NCCL and gloo with GPUs, gloo without).

    The group has all ranks. But with `rollout_ranks`, the last ranks only sample, and train ranks
    and rollout ranks have one group each. Without torchrun the world has one rank.

    Args:
        folder: the run's folder, for flight records. Its parent folder gets a file by which the
            ranks share a secret.
        interface: network interface to listen on; empty: the loopback if all ranks are on one node,
            otherwise torch's choice.
        refusal: reason why this rank cannot start; empty: none.

    Raises:
        ConfigError: a rank refuses, no rank would train, or the ranks do not see the same folder.
            Every rank raises the same error.
        TimeoutError: some ranks have not joined; the error names them.
    """
    has_cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if has_cuda else torch.device("cpu")
    try:
        choose_interface(interface)
    except ConfigError as error:
        refusal = refusal or str(error)
    refusal = refusal or rules.of_roles(rollout_ranks, int(os.environ.get("WORLD_SIZE", 1)))
    if has_cuda and not refusal:
        # Megatron needs this variable for kernel order; CUDA reads it with the first context.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(device)
    # TORCH_FR_BUFFER_SIZE makes torch keep each group's last collectives, for flight records.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")
    backend = "cpu:gloo,cuda:nccl" if has_cuda else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "WORLD_SIZE" not in os.environ:
        if refusal:
            raise ConfigError(refusal)
        health = _health(FlightRecorder(0, 1, folder), timeout_s)
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        return World(0, 1, 0, device, None, health=health)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = connect(rank, timeout_s)
    lobby = TimedStore(
        dist.PrefixStore(f"rlcore/{os.environ.get('TORCHELASTIC_RUN_ID', '0')}", store), timeout_s
    )
    flight = FlightRecorder(rank, size, folder)
    health = _health(flight, timeout_s)
    first, count, everyone = 0, size, None  # first rank and number of ranks with this rank's role
    try:
        at = flight.at | {"refusal": refusal}
        known, meeting = meet(lobby, at, size, timeout_s, time.monotonic)
        if found := _refusals(known):
            raise ConfigError(found)
        health.met(known)
        # The prefix is new at each start, so that no rank reads addresses of exited ranks.
        start = f"rlcore/{meeting}"
        secret = share_secret(
            folder.with_name(f".{folder.name}.{meeting}.secret"),
            rank,
            size,
            TimedStore(dist.PrefixStore(start, store), timeout_s),
            timeout_s,
            time.monotonic,
        )
        clone = store.clone  # type: ignore[attr-defined]  # the stubs lack it
        own = call_within(timeout_s, clone, silent_store(timeout_s))
        health.enter(SealedStore(dist.PrefixStore(f"{start}/health", own), secret))
        hub = dist.PrefixStore(f"{start}/hub", store)
        if rollout_ranks:
            split = size - rollout_ranks
            first, count = (0, split) if rank < split else (split, rollout_ranks)
            apart = dist.PrefixStore(f"{start}/everyone", store)
            everyone = collective.everyone(apart, rank, size, timeout_s)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"{start}/groups{first}", store),
            rank=rank - first,
            world_size=count,
            timeout=timeout,
            # With this device, NCCL connects here, not in a step, and its groups share memory.
            device_id=device if has_cuda else None,
        )
    except ConfigError:  # no alarm: wrong settings need no flight records
        health.close()
        _wait_for_readers(lobby, rank, size)
        raise
    except (RuntimeError, OSError) as error:
        health.alarm(f"failed: {error}")
        health.close()
        raise
    return World(
        rank, size, local_rank, device, hub, rollout_ranks, everyone, timeout_s, health, secret
    )


def _refusals(known: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the reasons of all ranks that refuse to start, one line for each reason; "" if no rank
    refuses. Reasons that not all ranks have name their ranks."""
    reasons: dict[str, list[int]] = {}
    for rank, at in sorted(known.items()):
        if at["refusal"]:
            reasons.setdefault(at["refusal"], []).append(rank)
    lines = []
    for reason, ranks in reasons.items():
        hosts = ", ".join(sorted({known[rank]["host"] for rank in ranks}))
        which = f"rank {', '.join(map(str, ranks[:8]))}{', ...' if ranks[8:] else ''} on {hosts}: "
        lines.append(("" if len(ranks) == len(known) else which) + reason)
    return "\n".join(lines)


def _wait_for_readers(store: Any, rank: int, size: int) -> None:
    """If rank 0 hosts the store, keep it alive until all ranks have read why no rank starts."""
    if has_agent():
        return
    end = time.monotonic() + READ_S
    with suppress(TimeoutError, ConnectionError):  # the reason matters more than the store
        store.add("refused", 1)
        while rank == 0 and store.add("refused", 0) < size and time.monotonic() < end:
            time.sleep(0.02)


def choose_interface(interface: str) -> None:
    """Let torch's stores and gloo listen on `interface`; empty: on the loopback if all ranks are on
    one node. Raise ConfigError if this node lacks the interface."""
    if interface:
        listen.address_of(interface)
    if interface or is_one_node():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface or "lo")
    listen.bind_stores(interface)
    collective.share_gloo_device()


def is_one_node() -> bool:
    """Return whether all ranks are on this node."""
    size = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", size) == size


def _health(flight: FlightRecorder, timeout_s: float) -> Health:
    on_main = threading.current_thread() is threading.main_thread()
    return Health(flight, None, silence_s=timeout_s).start(signals=on_main)


def connect(rank: int, timeout_s: float) -> dist.TCPStore:
    """Connect to torchrun's store without waiting for other ranks; `meet` names missing ranks."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = has_agent()
    problem = (
        f"start-up: rank {rank} got no answer from MASTER_ADDR {host}, port {port} within "
        f"--cluster.timeout_s {timeout_s:g}; check that torchrun runs on node 0 and that this "
        "node can reach it"
    )

    def make() -> dist.TCPStore:
        return dist.TCPStore(
            host,
            port,
            is_master=rank == 0 and not agent,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=not agent,
        )

    try:
        # torch's own deadline ends with the connection: a frozen host accepts and never answers.
        return call_within(timeout_s + ANSWER_S, make, problem)
    except dist.DistNetworkError as error:
        raise TimeoutError(problem) from error


def host_of(world: World, interface: str) -> str:
    """Return the address of this rank's node at which the other ranks reach it."""
    several_nodes = world.ranks_per_node < world.size
    return listening_host(os.environ.get("MASTER_ADDR", ""), interface, several_nodes)


def make_hub(world: World, interface: str, drafts: bool) -> Hub:
    """Return the hub for messages between the ranks. `drafts`: whether rank 0 collects histories
    as draft source."""
    if world.size == 1:
        return LocalHub()
    host = host_of(world, interface)
    channels = [c for c in CHANNELS if c != "histories" or drafts]
    return ZmqHub(world.rank, world.size, world.sealed, host, world.secret, channels)


def leave(world: World) -> None:
    """Wait for all ranks, then destroy the process group, so that the process exits cleanly."""
    if dist.is_initialized():
        collective.barrier(world.everyone)
        dist.destroy_process_group()
