"""Metrics, progress and alarms of a run."""

import logging
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlcore.cli import splits
from rlcore.cli.builders.devices import ranks_per_node
from rlcore.cli.builders.folder import run_folder
from rlcore.cli.world import World
from rlcore.config import resolve
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.metrics.screen import Screen
from rlcore.metrics.sinks import Prometheus, Sink, Wandb
from rlcore.metrics.trace import RunTrace
from rlcore.records import AnyCommand, AnyEvent
from rlcore.rollout.round import Heartbeat
from rlcore.sched.balance import Balance
from rlcore.trainer.progress import Progress
from rlcore.utils import collective, log
from rlcore.utils.deadline import Watchdog
from rlcore.utils.log import announce
from rlcore.utils.spans import Spans

if TYPE_CHECKING:  # Redis is for those that share their nodes
    pass


def make_sinks(cfg: Config) -> list[Sink]:
    """Where metrics go besides the run's folder. ConfigError where one cannot work."""
    sinks: list[Sink] = []
    if port := cfg.log.prometheus_port:
        sinks.append(Prometheus(cfg.log.prometheus_host, port, run_folder(cfg).name))
        announce("metrics", f"http://{cfg.log.prometheus_host}:{port}/metrics")
    if cfg.log.wandb:
        sinks.append(Wandb(cfg.log.wandb, run_folder(cfg), resolve.keys(cfg)))
    return sinks


def watch(
    cfg: Config,
    world: World,
    screen: Screen | None,
    heartbeat: Heartbeat,
    on_close: Callable[[Callable[[], None]], object],
) -> Callable[[str], None]:
    """Listener of the phases: the screen shows them, the flight record has them, ranks that only
    sample hear that rank 0 goes on, and a watchdog raises the alarm where this rank stands still.
    Under gloo the rank then ends, since Megatron's gradient reduction waits there without a
    deadline; NCCL ends its waits itself. Rounds of sampling, and waits for rank 0, have a verdict
    of their own."""
    ends, gang = world.size > 1 and world.device.type == "cpu", world.gang

    def alarm(verdict: str) -> None:
        if gang is not None:
            gang.alarm(verdict, ends=ends)
            return
        log.log.error(verdict)
        if ends:
            logging.shutdown()
            os._exit(1)

    dog = Watchdog(
        cfg.cluster.timeout_s,
        run_folder(cfg) / "logs" / f"stacks{world.rank}.txt",
        describe=lambda: f"the {world.size - 1} other ranks, seen from rank {world.rank}",
        on_overrun=alarm,
    )
    on_close(dog.close)

    def listen(phase: str) -> None:
        dog.beat("" if phase in ("gen", "eval", "wait") else phase)
        heartbeat.alive()
        world.phase(phase)
        if screen is not None:
            screen.phase(phase)

    return listen


def make_balance(cfg: Config, hf: HFConfig, world: World) -> Balance:
    """Who proposes how many ranks sample. Says what the last steps of this run, or the data sheet,
    say of that."""
    plan = splits.planner(cfg, world.size, ranks_per_node(world))
    folder, said = run_folder(cfg), ""
    if world.device.type == "cuda":
        try:
            said = splits.by_data_sheet(plan, cfg, hf, world.size, folder / "rollouts.jsonl")
        except ValueError as error:
            said = f"no estimate of other splits: {error}"
    said = splits.by_last_steps(plan, cfg, folder, world.size) or said
    announce("balance", said or "no rates yet; balance/* has a proposal after the first steps")
    return plan


def make_trace(
    cfg: Config,
    world: World,
    spans: Spans,
    progress: Progress,
    on_close: Callable[[Callable[[], None]], object],
) -> RunTrace | None:
    """Return the trace that this rank writes, with the phases of `spans`; None without --log.trace.
    Collective."""
    if not cfg.log.trace:
        return None
    behind = collective.clock_offset(group=world.everyone)
    trace = RunTrace(run_folder(cfg), world.rank, socket.gethostname(), behind, cfg.log.trace)
    on_close(trace.close)
    spans.listen_to_ends(lambda name, start, end: trace.phase(name, start, end, progress.step))
    return trace


def of_agent(world: World, trace: RunTrace | None) -> list[Callable[[AnyCommand | AnyEvent], None]]:
    """Return what is called with the commands and events of this rank's agent."""
    found: list[Callable[[AnyCommand | AnyEvent], None]] = []
    if trace is not None:
        found.append(trace.see)
    if world.gang is not None:
        found.append(world.gang.flight.see)
    return found
