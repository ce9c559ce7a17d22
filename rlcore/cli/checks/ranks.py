"""Check what the ranks of a run share: the store, the folder of runs, and all-reduces.

Every check ends within a deadline and names the ranks that are missing.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlcore.cli import world
from rlcore.cli.builders.folder import run_folder
from rlcore.cli.checks import CheckResult, attempt
from rlcore.config.schema import Config
from rlcore.rollout.transport import listening_host
from rlcore.utils.flight_recorder import FlightRecorder
from rlcore.utils.health import meet
from rlcore.utils.sealed import share_secret
from rlcore.utils.timed_store import TimedStore, call_within, silent_store

ALL_REDUCE_S = 60.0
"""Maximum seconds of an all-reduce, the start of its communicator included."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Place:
    """Position of this process among the ranks, as torchrun gives it."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def here(cls) -> "Place":
        """Read the position from the environment. Without torchrun there is one rank."""
        size = int(os.environ.get("WORLD_SIZE", 1))
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            size=size,
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        )

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return int(os.environ.get("GROUP_RANK", self.rank // self.local_size))


@dataclass(frozen=True, slots=True)
class Checked:
    """Results of the checks between ranks."""

    results: list[CheckResult]
    has_met: bool = True
    """Whether all ranks have joined."""
    is_stuck: bool = False
    """Whether a thread may still be in a collective, so that only `os._exit` ends the process."""


def connect(cfg: Config, place: Place) -> tuple[dist.TCPStore | None, CheckResult]:
    """Choose the interface, and connect to torchrun's store; None if the store does not answer."""
    master, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def look() -> str:
        world.choose_interface(cfg.cluster.interface)
        host = listening_host(master, cfg.cluster.interface, not world.is_one_node())
        return f"the store at {master}, port {port}, answers; this node listens on {host}"

    try:
        result = attempt("network", look)
    except OSError as error:  # the name of the master is unknown
        result = CheckResult("network", "FAIL", f"MASTER_ADDR {master}: {error}; set HEAD_ADDR")
    try:
        return world.connect(place.rank, cfg.cluster.timeout_s), result
    except TimeoutError as error:
        return None, CheckResult("network", "FAIL", str(error))


def check(cfg: Config, place: Place, store: dist.TCPStore, prefix: str) -> Checked:
    """Check that all ranks join, see the folder of runs, and reduce together. `prefix`: of keys in
    the store that no earlier start has used."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    at = FlightRecorder(place.rank, place.size, None).at | {"device": device}
    lobby = TimedStore(dist.PrefixStore(prefix, store), cfg.cluster.timeout_s)
    try:
        known, name = meet(lobby, at, place.size, cfg.cluster.timeout_s, time.monotonic)
    except (TimeoutError, RuntimeError) as error:
        return Checked([CheckResult("ranks", "FAIL", str(error))], has_met=False)
    joined = CheckResult("ranks", "PASS", f"all {place.size} have joined")
    results = [joined, shared_folder(cfg, place, lobby, name)]
    if text := _mixed(known):
        return Checked([*results, CheckResult("nccl", "FAIL", text)])
    limit_s = min(cfg.cluster.timeout_s, ALL_REDUCE_S)
    for stage in stages(place, device):
        results.append(reduce_together(stage, place, known, store, prefix, limit_s))
        if results[-1].state == "FAIL":
            return Checked(results, is_stuck=True)
    return Checked(results)


def shared_folder(cfg: Config, place: Place, store: Any, name: str) -> CheckResult:
    """Check that all ranks see the folder of runs. `name`: of this start, for a file's name."""
    folder = run_folder(cfg)
    file = folder.with_name(f".{folder.name}.{name}.secret")

    def look() -> str:
        share_secret(file, place.rank, place.size, store, cfg.cluster.timeout_s, time.monotonic)
        return f"all ranks see {folder.parent}"

    try:
        return attempt("shared", look)
    except TimeoutError as error:
        return CheckResult("shared", "FAIL", str(error))


def _mixed(known: Mapping[int, Mapping[str, Any]]) -> str:
    """Return an error if some ranks have a GPU and others have none; else ""."""
    without = [rank for rank, at in sorted(known.items()) if at["device"] == "cpu"]
    if len(without) in (0, len(known)):
        return ""
    which = names(without, known)
    return f"{which} finds no GPU, but other ranks do; see the driver check of that node"


@dataclass(frozen=True, slots=True)
class Stage:
    """All-reduce of one backend; all ranks take part at the same time, each in its group."""

    backend: str
    group: Sequence[int]
    """Ranks of this rank's group."""
    scope: str
    """Description of the groups, such as `all ranks`."""


def stages(place: Place, device: str) -> list[Stage]:
    """Return the all-reduces of a run on `device`, in order."""
    everyone = range(place.size)
    found = [Stage("gloo", everyone, "all ranks")]
    if device == "cuda":
        first = place.rank - place.local_rank
        node = range(first, first + place.local_size)
        found.append(Stage("nccl", node, "the ranks of each node"))
        if len(node) < place.size:
            found.append(Stage("nccl", everyone, "all ranks"))
    return found


def reduce_together(
    stage: Stage,
    place: Place,
    known: Mapping[int, Mapping[str, Any]],
    store: dist.TCPStore,
    prefix: str,
    limit_s: float,
) -> CheckResult:
    """Run a stage and compare with the other ranks, all groups included. The result is the same on
    every rank. `known`: the ranks' states, as `meet` returns them."""
    prefix = f"{prefix}/{stage.backend}/{stage.scope}"
    keys = TimedStore(dist.PrefixStore(prefix, store), limit_s)
    # A wait in the thread would block this thread's use of the same connection.
    clone = store.clone  # type: ignore[attr-defined]  # not in stubs
    own = dist.PrefixStore(prefix, call_within(limit_s, clone, silent_store(limit_s)))

    def run() -> None:
        try:
            all_reduce(stage, place, own, limit_s)
            error = ""
        except Exception as failure:  # NCCL and gloo raise several types
            error = str(failure).partition("\n")[0] or type(failure).__name__
        own.set(f"ended/{place.rank}", error)

    threading.Thread(target=run, name="all-reduce", daemon=True).start()
    missing = wait_for(keys, "ended", range(place.size), limit_s)
    ended = [rank for rank in range(place.size) if rank not in missing]
    errors = {rank: said for rank in ended if (said := keys.get(f"ended/{rank}").decode())}
    text = f"an all-reduce over {stage.scope}"
    if not errors and not missing:
        return CheckResult(stage.backend, "PASS", f"{text} works")
    if errors:
        text += f" failed on {names(list(errors), known)}: {next(iter(errors.values()))}"
    else:
        text += f" has not ended within {limit_s:g} s on {names(missing, known)}"
    remedy = (
        "check the network between these nodes, --cluster.interface and NCCL_SOCKET_IFNAME; "
        "NCCL_DEBUG=INFO prints more"
    )
    return CheckResult(stage.backend, "FAIL", f"{text}; {remedy}")


def all_reduce(stage: Stage, place: Place, store: Any, limit_s: float) -> None:
    """Make a process group, reduce a number, and destroy the group.

    Raises:
        RuntimeError: the sum is wrong, or the backend failed.
    """
    device = torch.device("cpu")
    if stage.backend == "nccl":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        stage.backend,
        store=dist.PrefixStore(f"group{stage.group[0]}", store),
        rank=stage.group.index(place.rank),
        world_size=len(stage.group),
        timeout=timedelta(seconds=2 * limit_s),  # the caller's deadline comes first
        device_id=device if stage.backend == "nccl" else None,
    )
    number = torch.ones(1, device=device)
    dist.all_reduce(number)
    total = int(number.item())
    dist.destroy_process_group()
    if total != len(stage.group):
        raise RuntimeError(f"the sum of {len(stage.group)} ones is {total}")


def wait_for(store: Any, key: str, ranks: Sequence[int], seconds: float) -> list[int]:
    """Wait until the store has `key/<rank>` for all ranks, at most some seconds. Return the ranks
    without it."""
    end = time.monotonic() + seconds
    while ranks and not store.check([f"{key}/{rank}" for rank in ranks]):
        if time.monotonic() > end:
            return [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
        time.sleep(_POLL_S)
    return []


def names(ranks: Sequence[int], known: Mapping[int, Mapping[str, Any]]) -> str:
    """Return ranks and their hosts as text."""
    text = "rank " + ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{text} on {', '.join(sorted({known[rank]['host'] for rank in ranks}))}"
