"""Build the parts of a run for metrics, progress and alarms."""

import logging
import os
import socket
from collections.abc import Callable, Sequence

from rlcore.cli import splits
from rlcore.cli.builders.folder import run_folder
from rlcore.cli.builders.start import BuildContext
from rlcore.cli.world import World
from rlcore.config import resolve
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.hf.tokenizer import Tokenizer
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
    """Return the receivers of metrics other than the run's folder: Prometheus and wandb.

    Raises:
        ConfigError: a receiver cannot work.
    """
    sinks: list[Sink] = []
    if port := cfg.log.prometheus_port:
        sinks.append(Prometheus(cfg.log.prometheus_host, port, run_folder(cfg).name))
        announce("metrics", f"http://{cfg.log.prometheus_host}:{port}/metrics")
    if cfg.log.wandb:
        sinks.append(Wandb(cfg.log.wandb, run_folder(cfg), resolve.keys(cfg)))
    return sinks


def watch(
    start: BuildContext, screen: Screen | None, heartbeat: Heartbeat | None = None
) -> Callable[[str], None]:
    """Return the function to call with the name of each new phase. The function updates screen,
    flight record and watchdog, and sends a heartbeat to ranks that only sample, if there are any.

    If a phase hangs, the watchdog raises the alarm. With gloo the watchdog also ends the process,
    since Megatron's gradient reduction has a timeout with NCCL but none with gloo. Generation,
    evaluation and waits for train ranks are not watched, since their own code detects hangs.
    """
    cfg, world = start.cfg, start.world
    ends, health = world.size > 1 and world.device.type == "cpu", world.health

    def alarm(verdict: str) -> None:
        if health is not None:
            health.alarm(verdict, ends=ends)
            return
        log.log.error(verdict)
        if ends:
            logging.shutdown()
            os._exit(1)

    dog = Watchdog(
        cfg.cluster.timeout_s,
        start.folder / "logs" / f"stacks{world.rank}.txt",
        describe=lambda: f"the {world.size - 1} other ranks (reported by rank {world.rank})",
        on_overrun=alarm,
    )
    start.on_close(dog.close)

    def listen(phase: str) -> None:
        dog.beat("" if phase in ("gen", "testing", "wait_learner") else phase)
        if heartbeat is not None:
            heartbeat.alive()
        world.phase(phase)
        if screen is not None:
            screen.phase(phase)

    return listen


def make_balance(cfg: Config, hf: HFConfig, world: World) -> Balance:
    """Return the planner that proposes how many ranks should sample. Log its first proposal, from
    the run's most recent steps or else from the GPU's data sheet."""
    plan = splits.planner(cfg, world.size, world.ranks_per_node)
    folder, said = run_folder(cfg), ""
    if world.device.type == "cuda":
        try:
            said = splits.by_data_sheet(plan, cfg, hf, world.size, folder / "rollouts.jsonl")
        except ValueError as error:
            said = f"no estimate of other numbers of rollout ranks: {error}"
    said = splits.by_last_steps(plan, cfg, folder, world.size) or said
    announce("balance", said or "no estimate yet; see balance/* after the first steps")
    return plan


def of_agent(start: BuildContext) -> list[Callable[[AnyCommand | AnyEvent], None]]:
    """Return the observers of commands and events of this rank's rollout worker: the trace, with
    --log.trace_steps, and the flight record. Collective."""
    found: list[Callable[[AnyCommand | AnyEvent], None]] = []
    cfg, world, progress = start.cfg, start.world, start.progress
    if cfg.log.trace_steps:
        behind = collective.clock_offset(group=world.everyone)
        trace = RunTrace(
            start.folder,
            world.rank,
            socket.gethostname(),
            behind,
            cfg.log.trace_steps,
            start.writes,
        )
        start.on_close(trace.close)
        start.spans.listen_to_ends(
            lambda name, begin, end: trace.phase(name, begin, end, progress.step)
        )
        found.append(trace.see)
    if world.health is not None:
        found.append(world.health.flight.see)
    return found


def make_observers(
    start: BuildContext,
    screen: Screen | None,
    tokenizer: Tokenizer,
    on_step: Sequence[Callable[[dict[str, float]], None]],
) -> Observers:
    """Return the receivers of metrics, on rank 0. The checkpoint must already be loaded, since
    metric files are truncated to the checkpoint's step."""
    cfg, step = start.cfg, start.progress.step
    balance = make_balance(cfg, start.hf, start.world) if cfg.select.mode == "async" else None
    writer = MetricsWriter(
        start.folder,
        cfg.log.tensorboard,
        next_step=step + 1 if step else 0,
        sinks=make_sinks(cfg),
        writes=start.writes,
    )
    start.on_close(writer.close)
    if start.callbacks is not None:
        start.callbacks.on_start(start.folder, resolve.keys(cfg))
    return Observers(
        writer=writer,
        screen=screen,
        balance=balance,
        callbacks=start.callbacks,
        on_step=on_step,
        tokenizer=tokenizer,
    )


def signals(start: BuildContext) -> tuple[Callable[[], bool], Callable[[], None]]:
    """Return two functions: the first returns whether this rank has received a SIGTERM, the second
    must be called when the run is done."""
    health, progress = start.world.health, start.progress
    if health is None:
        return (lambda: False), (lambda: None)
    health.flight.watch_step(lambda: progress.step)
    health.allow_grace(start.cfg.checkpoint.grace_s)
    return (lambda: health.ends), health.done
