"""Sampling side of a rank."""

from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.cli.builders.folder import run_folder
from rlcore.cli.builders.sizes import make_pipe, make_place
from rlcore.cli.world import World
from rlcore.config.schema import Config
from rlcore.records import Sampling
from rlcore.rollout.flow import Flow
from rlcore.rollout.replay import EventLog, Recorder, controller_of
from rlcore.rollout.replica import Agent
from rlcore.rollout.transport import Hub
from rlcore.sched.source import EpochOrder
from rlcore.sched.staleness import SampleBuffer

if TYPE_CHECKING:  # Redis is for those that share their nodes
    pass


def make_flow(
    cfg: Config,
    world: World,
    hub: Hub,
    agent: Agent,
    source: EpochOrder | None,
    sampling: Sampling,
) -> Flow:
    """Return this rank's part of `--mode async`. `source`: on rank 0, which has the controller."""
    controller, log_ = None, None
    samplers = range(world.train_ranks, world.size)
    if cfg.debug.replay and world.trains:
        log_ = EventLog(Path(cfg.debug.replay), cfg.run.seed)
    if source is not None:
        tp, leaders = cfg.rollout.tp, samplers[:: cfg.rollout.tp]
        controller = controller_of(log_)(
            buffer=SampleBuffer(
                cfg.data.prompts_per_step, cfg.async_.alpha, cfg.async_.extra_prompts
            ),
            issue=lambda count: source.issue(count, sampling),
            trainers=range(world.train_ranks),
            samplers=samplers,
            ranks=leaders,
            members={first: range(first + 1, first + tp) for first in leaders},
            place=make_pipe(cfg, leaders) if cfg.rollout.place == "histopipe" else make_place(cfg),
            deadline_s=cfg.rollout.deadline_s,
            dynamic=cfg.async_.dynamic,
        )
    record = Recorder(run_folder(cfg), cfg.run.seed) if cfg.debug.record and world.trains else None
    return Flow(
        hub,
        agent,
        controller,
        samplers=samplers,
        deadline_s=cfg.rollout.deadline_s,
        record=record,
        replay=log_,
    )
