"""Sharing of nodes with other jobs (--mux.url)."""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.cli.builders.folder import run_folder
from rlcore.cli.builders.rewards import own_judges
from rlcore.cli.world import World
from rlcore.config.schema import Config
from rlcore.mux.profile import Profile, Profiler
from rlcore.sched.roles import Cell
from rlcore.trainer import report
from rlcore.utils import collective
from rlcore.utils.errors import ConfigError

if TYPE_CHECKING:  # Redis is for those that share their nodes
    from rlcore.mux.gate import Gate, NoGate
    from rlcore.mux.ranks import RanksGate


BOTH = ("rollout", "train")
POOLS = {"start": BOTH, "eval": ("rollout",), "save": ("train",)}
"""That a phase uses where it is not named after its pool."""
POOLS_COLOCATED = dict.fromkeys(("start", "step", "train", "eval", "save"), BOTH)
"""Where every rank samples and trains."""


NODE, ROLLOUT_NODE = "RLCORE_NODE", "RLCORE_ROLLOUT_NODE"
"""In the environment: what a node is called, where host names do not tell nodes apart; the second
is for ranks that only sample."""


def check_mux(cfg: Config) -> None:
    """ConfigError where a job with --mux.url has a judge of its own, which never leaves its GPU."""
    if cfg.mux.url and own_judges(cfg):
        raise ConfigError(
            "--mux.url: a judge of the run's own stays on the nodes between its phases; give "
            "--reward.url the address of a server, or take another reward"
        )


def make_gate(
    cfg: Config,
    world: World,
    alive: Callable[[], None],
    tell: Callable[[dict[str, float]], None],
) -> "RanksGate | None":
    """Return this rank's gate in the cluster of --mux.url; None for a job that is alone, or decides
    to be. Collective. ConfigError on every rank if what is asked for is not possible.

    Args:
        alive: called while all ranks wait for a permit.
        tell: called on rank 0 with the metrics of every phase.
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
            f"--mux.tail_nodes {mux.tail_nodes}: must be less than the nodes that sample, of which "
            f"there are {len(cells)}, or the tail of a rollout has none to leave; give 0"
        )

    def connect() -> "Gate | NoGate":
        profile = None
        if mux.profile:
            profile = replace(Profile.read(Path(mux.profile)), slo=mux.slo)
        return gates.connect(
            address_of(mux.url),
            mux.job or run_folder(cfg).name,
            profile,
            otherwise=mux.otherwise,
            slo=mux.slo,
            colocated=not world.rollout_ranks,
            pools=POOLS if world.rollout_ranks else POOLS_COLOCATED,
            hosts=partial(nodes_by_pool, names, world.rollout_ranks),
            keep=mux.tail_nodes,
            lease_s=mux.lease_s,
            wait_s=mux.wait_s,
        )

    first = world.rank == 0
    gate = ranks.join(
        connect if first else None,
        world.everyone,
        run_folder(cfg) if first else None,
        alive=alive,
        tell=tell,
    )
    if gate is not None and mux.tail_nodes:
        gate.leave_early(cells)
    return gate


def address_of(url: str) -> str:
    """--mux.url, where it is not given itself. ConfigError where the environment lacks it."""
    if not url.startswith("env:"):
        return url
    if not (found := os.environ.get(url.removeprefix("env:"), "")):
        raise ConfigError(
            f"--mux.url {url}: the environment has no such variable; export it, with the address "
            "that `rlcore mux add JOB` prints"
        )
    return found


def node_name(cfg: Config, world: World) -> str:
    """Of the node that this rank is on. Jobs whose ranks say the same name share a node; without
    GPUs its cores may be nodes (`--cluster.rollout_cores`)."""
    name = os.environ.get(NODE) or socket.gethostname()
    if not world.trains:
        name = os.environ.get(ROLLOUT_NODE) or name
    if world.device.type != "cpu":  # jobs of other cores take the same GPUs
        return name
    cores = cfg.cluster.train_cores if world.trains else cfg.cluster.rollout_cores
    return f"{name} core {'+'.join(map(str, sorted(cores)))}" if cores else name


def nodes_by_pool(
    names: Sequence[str], rollout_ranks: int, profile: Profile
) -> dict[str, list[str]]:
    """The nodes that a job samples and trains on, in the order of its ranks, whose nodes `names`
    are. Where every rank does both, the first nodes by name count to the train pool and the last to
    the rollout pool, as many as the profile says, and a single one to both."""
    split = len(names) - rollout_ranks
    if rollout_ranks:
        return {
            "rollout": list(dict.fromkeys(names[split:])),
            "train": list(dict.fromkeys(names[:split])),
        }
    nodes = sorted(set(names))  # or jobs on the same nodes, in another order, would not meet
    apart = profile.train_nodes if len(nodes) > 1 else 0
    return {"rollout": nodes[apart:], "train": nodes[: apart or 1]}


def cells_by_node(names: Sequence[str], rollout_ranks: int) -> list[Cell]:
    """The engines, of one rank each, on every rollout node."""
    found: dict[str, list[int]] = {}
    split = len(names) - rollout_ranks
    for rank, name in enumerate(names):
        if rank >= split:
            found.setdefault(name, []).append(rank)
    return [Cell(ranks=tuple(r), leaders=tuple(r), dp_ranks=()) for r in found.values()]


def make_profiler(cfg: Config, names: Sequence[str], rollout_ranks: int) -> Profiler:
    """Writes what other jobs' schedulers have to know of this one, whose ranks are on the nodes
    `names`. Where every rank does both, half of the nodes are taken to be of either pool, and a
    single one to have both in it."""
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
    )


def on_step(
    cfg: Config, world: World, gate: "RanksGate | None"
) -> tuple[Callable[[dict[str, float]], None], ...]:
    """Return what is called on rank 0 with the metrics of every step: the gate, or a profiler for
    jobs that may share their nodes later. Collective."""
    if gate is not None:
        return (gate.see,) if world.rank == 0 else ()
    if cfg.select.mode != "sync" or not report.counts_nodes(cfg):
        return ()
    names = collective.gather_texts(node_name(cfg, world), world.everyone)
    return (make_profiler(cfg, names, world.rollout_ranks).see,) if world.rank == 0 else ()
