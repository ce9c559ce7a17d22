"""Metrics, progress and alarms of a run."""

import logging
import os
import socket
from collections.abc import Callable, Sequence

from rlcore.cli import splits
from rlcore.cli.builders.devices import ranks_per_node
from rlcore.cli.builders.folder import run_folder
from rlcore.cli.builders.start import Start
from rlcore.cli.world import World
from rlcore.config import resolve
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.metrics.screen import Screen
from rlcore.metrics.sinks import MetricsWriter, Prometheus, Sink, Wandb
from rlcore.metrics.trace import RunTrace
from rlcore.records import AnyCommand, AnyEvent
from rlcore.rollout.round import Heartbeat
from rlcore.sched.balance import Balance
from rlcore.trainer.progress import Observers
from rlcore.utils import collective, log
from rlcore.utils.deadline import Watchdog
from rlcore.utils.log import announce


def make_sinks(cfg: Config) -> list[Sink]:
    """Where metrics go besides the run's folder. ConfigError where one cannot work."""
    sinks: list[Sink] = []
    if port := cfg.log.prometheus_port:
        sinks.append(Prometheus(cfg.log.prometheus_host, port, run_folder(cfg).name))
        announce("metrics", f"http://{cfg.log.prometheus_host}:{port}/metrics")
    if cfg.log.wandb:
        sinks.append(Wandb(cfg.log.wandb, run_folder(cfg), resolve.keys(cfg)))
    return sinks


def watch(start: Start, screen: Screen | None, heartbeat: Heartbeat) -> Callable[[str], None]:
    """Listener of the phases: the screen shows them, the flight record has them, ranks that only
    sample hear that rank 0 goes on, and a watchdog raises the alarm where this rank stands still.
    Under gloo the rank then ends, since Megatron's gradient reduction waits there without a
    deadline; NCCL ends its waits itself. Rounds of sampling, and waits for rank 0, have a verdict
    of their own."""
    cfg, world = start.cfg, start.world
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
        start.folder / "logs" / f"stacks{world.rank}.txt",
        describe=lambda: f"the {world.size - 1} other ranks, seen from rank {world.rank}",
        on_overrun=alarm,
    )
    start.on_close(dog.close)

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


def of_agent(start: Start) -> list[Callable[[AnyCommand | AnyEvent], None]]:
    """Return what is called with the commands and events of this rank's agent: the trace, with
    --log.trace, and the flight record. Collective."""
    found: list[Callable[[AnyCommand | AnyEvent], None]] = []
    cfg, world, progress = start.cfg, start.world, start.progress
    if cfg.log.trace:
        behind = collective.clock_offset(group=world.everyone)
        trace = RunTrace(start.folder, world.rank, socket.gethostname(), behind, cfg.log.trace)
        start.on_close(trace.close)
        start.spans.listen_to_ends(
            lambda name, begin, end: trace.phase(name, begin, end, progress.step)
        )
        found.append(trace.see)
    if world.gang is not None:
        found.append(world.gang.flight.see)
    return found


def make_observers(
    start: Start,
    screen: Screen | None,
    pieces: Callable[[Sequence[int]], list[str]],
    on_step: Sequence[Callable[[dict[str, float]], None]],
) -> Observers:
    """Return where the metrics go, on rank 0. After the checkpoint is loaded: the files are cut
    back to its step."""
    cfg, step = start.cfg, start.progress.step
    balance = make_balance(cfg, start.hf, start.world) if cfg.select.mode == "async" else None
    writer = MetricsWriter(
        start.folder,
        cfg.log.tensorboard,
        next_step=step + 1 if step else 0,
        sinks=make_sinks(cfg),
    )
    start.on_close(writer.close)
    return Observers(writer=writer, screen=screen, balance=balance, on_step=on_step, pieces=pieces)


def signals(start: Start) -> tuple[Callable[[], bool], Callable[[], None]]:
    """Return whether this rank got a SIGTERM, and what to call when nothing is left to do."""
    gang, progress = start.world.gang, start.progress
    if gang is None:
        return (lambda: False), (lambda: None)
    gang.flight.watch_step(lambda: progress.step)
    gang.allow_grace(start.cfg.checkpoint.grace_s)
    return (lambda: gang.ends), gang.done
