"""Build one rank's parts of a run from the settings. Each module builds one kind of part:

`folder` (the run's folder and log), `model` (architecture and lengths), `sizes` (tensor-parallel
sizes of the engines), `engine` (torch or SGLang engine, environments), `rewards` (reward service,
judges), `rollout` (worker, rounds, asynchronous rollout), `prompts` (data, on rank 0), `learner`
(actor and critic), `teachers` (of distillation), `weights` (channel for weight updates), `devices`
(memory plan, use of the accelerator), `observers` (metrics, alarms, traces), `sharing` (nodes
shared with other jobs).
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from rlcore import algos
from rlcore.algos.kl import AdaptiveController
from rlcore.cli.builders import (
    devices,
    folder,
    learner,
    model,
    observers,
    prompts,
    rollout,
    sharing,
    sizes,
    teachers,
    weights,
)
from rlcore.cli.builders.start import BuildContext
from rlcore.cli.world import World
from rlcore.config import rules
from rlcore.config.schema import Config
from rlcore.records import Prompt
from rlcore.trainer.callbacks import Callbacks
from rlcore.trainer.device import Parts
from rlcore.trainer.progress import Data, Observers, Progress
from rlcore.trainer.resume import Checkpoints
from rlcore.trainer.run import Run
from rlcore.trainer.shared_device import SharedDevice
from rlcore.utils import collective
from rlcore.utils.spans import Spans
from rlcore.utils.waits import waiting
from rlcore.utils.writes import LogWrites

if TYPE_CHECKING:  # this import needs Redis, which is only required for shared nodes (--mux.url)
    from rlcore.mux.ranks import RanksGate

EvalSets = Sequence[tuple[str, Sequence[Prompt]]]


def run(
    cfg: Config,
    world: World,
    eval_sets: EvalSets | None = None,
    models: learner.Models | None = None,
) -> Run:
    """Build one rank's `Run`, and restore it if --run.resume selects a checkpoint. On an error,
    stop all parts that were started.

    Args:
        eval_sets: validation sets that replace the configured ones, on rank 0.
        models: stands in for the learner and critic, in a run that trains nothing.

    Raises:
        ConfigError: the configuration cannot work.
    """
    began, spans, progress, closing = time.monotonic(), Spans(), Progress(), ExitStack()
    try:
        writes = LogWrites(continues=cfg.checkpoint.on_error == "continue")
        gate = sharing.make_gate(cfg, world, spans.alive, progress.add, writes)
        if gate is not None:
            closing.callback(gate.close)
            world.phase("start: wait_permit")
        with gate.phase("start") if gate is not None else nullcontext():
            built = _run(cfg, world, eval_sets, models, gate, spans, progress, writes, closing)
            if isinstance(built.device, SharedDevice):
                built.device.leave()
    except BaseException:
        closing.close()
        raise
    spans.add("start", time.monotonic() - began)
    return built


def _run(
    cfg: Config,
    world: World,
    eval_sets: EvalSets | None,
    models: learner.Models | None,
    gate: "RanksGate | None",
    spans: Spans,
    progress: Progress,
    writes: LogWrites,
    closing: ExitStack,
) -> Run:
    """Build a run. Engine and reward processes are slow to start, so they start before the learner
    is built. Data is also loaded before the learner, so that errors in the data appear early."""
    cfg = prompts.with_tasks(cfg)
    if world.rollout_ranks:  # engine and learner have separate devices, so nothing is offloaded
        cfg = replace(cfg, train=replace(cfg.train, offload=False))
    world.phase("start: engine")
    start = BuildContext(
        cfg=cfg,
        world=world,
        hf=model.model_config(cfg),
        folder=folder.run_folder(cfg),
        spans=spans,
        progress=progress,
        writes=writes,
        closing=closing,
        callbacks=Callbacks(cfg.run.callbacks) if cfg.run.callbacks else None,
    )
    if gate is None:
        weights.check_allocator(cfg, world.device)
    memory = devices.make_residency(cfg, start.hf, world, trains=models is None)
    tail = gate.tail if gate is not None else None
    engine_sizes = sizes.make_sizes(cfg, start.hf, world, tail)
    with waiting("starting engine and rewards, reading data"):
        side = rollout.make_side(start, engine_sizes)
        data = Data()
        if start.is_first:
            data = prompts.load_data(model.with_room(cfg, start.hf), side.tokenizer, eval_sets)

    world.phase("start: learner")
    if cfg.train.offload:  # the engine sleeps until the first weight update
        assert side.engine is not None
        with waiting("waiting for the engines to start and sleep"):
            side.engine.sleep(["weights", "kv_cache"])
            collective.barrier()  # wait until the first rank of every engine has put it to sleep
        memory.before("build")
    async_rollout = (
        rollout.make_async_rollout(start, side, data.source) if cfg.select.mode == "async" else None
    )
    if models is None:
        with waiting("building the learner, loading its weights"):
            models = learner.make_models(start)
    ranks = models.ranks(world)
    taught = teachers.make_teachers(start, ranks.model_parallel_groups) if models.learner else None
    parts = Parts(
        ranks=ranks,
        engine=side.engine,
        learner=models.learner,
        critic=models.critic,
        channel=weights.make_weight_channel(
            cfg, start.hf, world, in_child=side.in_child, to_shelf=gate is not None
        ),
        restart_engine=side.worker.restart_engine,
        sizes=engine_sizes,
        memory=memory,
        progress=progress,
        spans=spans,
        timeout_s=cfg.cluster.timeout_s,
    )
    device = devices.make_device(cfg, parts, world, gate, start.on_close)
    on_step = sharing.on_step(cfg, start.hf, world, gate, writes)

    world.phase("start: checkpoint")
    kl = AdaptiveController(cfg.algo.kl_target, cfg.algo.kl_horizon)
    checkpoints = Checkpoints(
        cfg=cfg,
        folder=start.folder,
        ranks=ranks,
        learner=models.learner,
        critic=models.critic,
        kl=kl,
        data=data,
        async_rollout=async_rollout,
        library=side.rollout.library,
        deadlines=side.deadlines,
        sizes=engine_sizes.policy,
        async_save=rules.saves_async(cfg, cuda=world.device.type == "cuda"),
    )
    start.on_close(checkpoints.close)
    with waiting("checking the newest checkpoint"):
        checkpoint = checkpoints.choose()
    if checkpoint is not None:
        with waiting(f"loading {checkpoint}"):
            checkpoints.load(checkpoint, progress)
    seen = Observers(tokenizer=side.tokenizer)
    if start.is_first:
        goes_on = checkpoint is not None and checkpoint.is_relative_to(start.folder)
        folder.save_settings(cfg, start.folder, goes_on=goes_on)
        seen = observers.make_observers(start, side.screen, side.tokenizer, on_step)
    world.phase("")
    stop_requested, on_done = observers.signals(start)
    return Run(
        cfg=cfg,
        hf=start.hf,
        folder=start.folder,
        ranks=ranks,
        algo=algos.module(cfg.select.algo),
        kl=kl,
        device=device,
        rollout=side.rollout,
        async_rollout=async_rollout,
        sampling=side.sampling,
        teachers=taught,
        data=data,
        progress=progress,
        spans=spans,
        observers=seen,
        checkpoints=checkpoints,
        stop_requested=stop_requested,
        on_done=on_done,
        close=closing.close,
    )
