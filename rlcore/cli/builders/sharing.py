"""Connect a job to nodes that it shares with other jobs (--mux.url)."""

import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.cli.builders.folder import run_folder
from rlcore.cli.builders.rewards import own_judges
from rlcore.cli.world import World
from rlcore.config import rules
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.mux.profile import FILE, Profile, Profiler
from rlcore.sched.roles import Cell
from rlcore.trainer import memory, report
from rlcore.utils import collective, phases
from rlcore.utils.errors import ConfigError
from rlcore.utils.writes import LogWrites

if TYPE_CHECKING:  # these imports need Redis, which is only required for shared nodes (--mux.url)
    from rlcore.mux.gate import NoGate, PermitGate
    from rlcore.mux.ranks import RanksGate


POOLS = {"start": phases.POOLS, "testing": ("rollout",), "save_checkpoint": ("train",)}
"""Node pools used by each phase whose name is not a pool's name."""
POOLS_COLOCATED = dict.fromkeys(
    ("start", "step", "train", "testing", "save_checkpoint"), phases.POOLS
)
"""Node pools that each phase uses if every rank samples and trains."""


NODE, ROLLOUT_NODE = "RLCORE_NODE", "RLCORE_ROLLOUT_NODE"
"""Environment variables that replace the host name as a node's name. `RLCORE_ROLLOUT_NODE` is for
ranks that only sample."""


def check_mux(cfg: Config) -> None:
    """Raise ConfigError if a job with --mux.url runs its own judge, since judges keep their GPU."""
    if cfg.mux.url and own_judges(cfg):
        raise ConfigError(
            "--mux.url: a job that shares nodes cannot run its own judge, which stays on the GPU; "
            "set --reward.url to a judge server, or choose another reward"
        )


def make_gate(
    cfg: Config,
    world: World,
    alive: Callable[[], None],
    tell: Callable[[dict[str, float]], None],
    writes: LogWrites,
) -> "RanksGate | None":
    """Return this rank's gate, at which every phase waits for a permit of the shared nodes; None if
    the job does not share its nodes. Collective.

    Args:
        alive: called about every second while all ranks wait for a permit.
        tell: called on rank 0 with the seconds in which a phase waits, loads and stores its state.
        writes: what to do if a write to the log of permits fails.

    Raises:
        ConfigError: the settings cannot work; raised on every rank.
    """
    mux = cfg.mux
    if not mux.url:
        return None
    from rlcore.mux import gate as gates
    from rlcore.mux import ranks

    check_mux(cfg)
    names = collective.gather_texts(node_name(cfg, world), world.everyone)
    cells = cells_by_node(names, world.rollout_ranks)
    if mux.tail_nodes and mux.tail_nodes >= len(cells):
        raise ConfigError(
            f"--mux.tail_nodes {mux.tail_nodes}: must be less than the {len(cells)} rollout nodes, "
            "so that the tail of a rollout can release some; lower it or set 0"
        )

    def connect() -> "PermitGate | NoGate":
        profile = None
        if mux.profile:
            profile = replace(Profile.read(Path(mux.profile)), slo=mux.slo)
        return gates.connect(
            address_of(mux.url),
            mux.job or run_folder(cfg).name,
            profile,
            otherwise=mux.if_unavailable,
            slo=mux.slo,
            colocated=not world.rollout_ranks,
            pools=POOLS if world.rollout_ranks else POOLS_COLOCATED,
            hosts=partial(nodes_by_pool, names, world.rollout_ranks),
            keep=mux.tail_nodes,
            lease_s=mux.lease_s,
            wait_s=mux.max_wait_s,
        )

    first = world.rank == 0
    gate = ranks.join(
        connect if first else None,
        world.everyone,
        run_folder(cfg) if first else None,
        alive=alive,
        tell=tell,
        writes=writes,
    )
    if gate is not None and mux.tail_nodes:
        gate.leave_early(cells)
    return gate


def address_of(url: str) -> str:
    """Return the address of --mux.url; for `env:NAME`, read it from the environment variable.

    Raises:
        ConfigError: the variable is not set.
    """
    if not url.startswith("env:"):
        return url
    if not (found := os.environ.get(url.removeprefix("env:"), "")):
        raise ConfigError(
            f"--mux.url {url}: the environment variable is not set; export it with the address "
            "that `rlcore mux add JOB` prints"
        )
    return found


def node_name(cfg: Config, world: World) -> str:
    """Return the name of this rank's node. Jobs that use the same name share the node. Without
    GPUs, each set of cores in --cluster.rollout_cores or train_cores counts as one node."""
    name = os.environ.get(NODE) or socket.gethostname()
    if not world.trains:
        name = os.environ.get(ROLLOUT_NODE) or name
    if world.device.type != "cpu":  # jobs on different cores still share the node's GPUs
        return name
    cores = cfg.cluster.train_cores if world.trains else cfg.cluster.rollout_cores
    return f"{name} core {'+'.join(map(str, sorted(cores)))}" if cores else name


def nodes_by_pool(
    names: Sequence[str], rollout_ranks: int, profile: Profile
) -> dict[str, list[str]]:
    """Return a job's nodes by pool, in rank order. `names` are the nodes of all ranks.

    If every rank samples and trains, the nodes are sorted by name. The train pool gets the first
    `profile.train_nodes` nodes, the rollout pool the others. A single node is in both pools.
    """
    split = len(names) - rollout_ranks
    if rollout_ranks:
        return {
            "rollout": list(dict.fromkeys(names[split:])),
            "train": list(dict.fromkeys(names[:split])),
        }
    nodes = sorted(set(names))  # sorted, so that all jobs on these nodes get the same pools
    apart = profile.train_nodes if len(nodes) > 1 else 0
    return {"rollout": nodes[apart:], "train": nodes[: apart or 1]}


def cells_by_node(names: Sequence[str], rollout_ranks: int) -> list[Cell]:
    """Return a cell (ranks that change role together) per rollout node; engines have one rank."""
    found: dict[str, list[int]] = {}
    split = len(names) - rollout_ranks
    for rank, name in enumerate(names):
        if rank >= split:
            found.setdefault(name, []).append(rank)
    return [Cell(ranks=tuple(r), leaders=tuple(r), dp_ranks=()) for r in found.values()]


def make_profiler(
    cfg: Config, names: Sequence[str], rollout_ranks: int, copy_bytes: int = 0
) -> Profiler:
    """Return the profiler that writes this job's profile for the scheduler of shared nodes. `names`
    are the nodes of all ranks. If every rank samples and trains, one half of the nodes counts as
    rollout nodes, the other half as train nodes; a single node counts as both. `copy_bytes`: size
    of a train rank's copy in an asynchronous save."""
    split = len(names) - rollout_ranks
    rollout, train = len(set(names[split:])), len(set(names[:split]))
    if not rollout_ranks:
        rollout, train = max(1, train // 2), (train + 1) // 2
    return Profiler(
        run_folder(cfg),
        max_tokens=cfg.rollout.max_tokens,
        rollout_nodes=rollout,
        train_nodes=train,
        colocated=not rollout_ranks,
        copy_gb=copy_bytes * max(Counter(names[:split]).values()) / 1e9,
    )


def on_step(
    cfg: Config, hf: HFConfig, world: World, gate: "RanksGate | None", writes: LogWrites
) -> tuple[Callable[[dict[str, float]], None], ...]:
    """Return the functions that rank 0 calls with the metrics of every step. The functions report
    to the gate, or to the profiler of a job that may share its nodes later. Collective."""
    if gate is not None:
        return (gate.see,) if world.rank == 0 else ()
    if cfg.select.mode != "sync" or not report.counts_nodes(cfg):
        return ()
    names = collective.gather_texts(node_name(cfg, world), world.everyone)
    copy = 0
    if world.device.type == "cuda" and rules.saves_async(cfg, cuda=True):
        ranks = world.size - world.rollout_ranks
        plan = memory.worst_of(cfg, hf, ranks, gpu_bytes=0.0, has_engine=False)
        copy = sum(item.num_bytes for item in plan.host if item.part == memory.CHECKPOINT_FILES)
    profiler = make_profiler(cfg, names, world.rollout_ranks, copy)

    def see(metrics: dict[str, float]) -> None:
        with writes.to(run_folder(cfg) / FILE):
            profiler.see(metrics)

    return (see,) if world.rank == 0 else ()
