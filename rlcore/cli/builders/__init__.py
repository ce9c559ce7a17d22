"""Builders of a run: each takes settings and returns a finished object.

folder      the run's folder and log          rollout     agent, rounds, asynchronous rollout
model       architecture and lengths          sizes       tensor-parallel sizes of the engines
prompts     data, on rank 0                   learner     actor and critic
rewards     reward service, judges            weights     way of the weights to the engines
engine      torch or SGLang, environments     devices     memory plan, owner of the accelerator
observers   metrics, alarms, traces           sharing     nodes shared with other jobs
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore import algos
from rlcore.algos.kl import AdaptiveController
from rlcore.cli.builders import (
    devices,
    engine,
    folder,
    learner,
    model,
    observers,
    prompts,
    rewards,
    rollout,
    sharing,
    sizes,
    weights,
)
from rlcore.cli.world import World, make_hub
from rlcore.config import resolve, rules
from rlcore.config.schema import Config
from rlcore.envs.dialogue import Dialogue
from rlcore.envs.scorer import EnvScorer
from rlcore.hf.tokenizer import load_tokenizer
from rlcore.mcore.layout import replicas
from rlcore.metrics.screen import Screen
from rlcore.metrics.sinks import MetricsWriter
from rlcore.records import Prompt
from rlcore.rewards.service import RewardService
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.histospec import Library
from rlcore.rollout.replica import Agent, NoScorer
from rlcore.rollout.round import Heartbeat, Rollout
from rlcore.rollout.rounds import Log, Rounds
from rlcore.sched.source import EpochOrder
from rlcore.trainer.device import Parts, SharedDevice
from rlcore.trainer.progress import Data, Observers, Progress, Ranks
from rlcore.trainer.resume import Checkpoints
from rlcore.trainer.run import Run
from rlcore.utils import collective
from rlcore.utils.spans import Spans

if TYPE_CHECKING:  # Redis is needed only where jobs share their nodes
    from rlcore.mux.ranks import RanksGate

EvalSets = Sequence[tuple[str, Sequence[Prompt]]]


def run(cfg: Config, world: World, eval_sets: EvalSets | None = None) -> Run:
    """Return one rank's `Run`, restored from its newest checkpoint if there is one. ConfigError if
    the configuration cannot work; what was started is ended then.

    Args:
        eval_sets: validation sets in place of the configured ones, on rank 0.
    """
    began, spans, progress, closing = time.monotonic(), Spans(), Progress(), ExitStack()
    try:
        gate = sharing.make_gate(cfg, world, spans.alive, progress.add)
        if gate is not None:
            closing.callback(gate.close)
            world.phase("start: turn")
        with gate.phase("start") if gate is not None else nullcontext():
            built = _run(cfg, world, eval_sets, gate, spans, progress, closing)
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
    gate: "RanksGate | None",
    spans: Spans,
    progress: Progress,
    closing: ExitStack,
) -> Run:
    """Build a run. What takes long to start (engine, reward processes) starts first and gets ready
    while the learner is built; what may be wrong in the data is found before that."""
    on_close, first = closing.callback, world.rank == 0
    cfg = prompts.with_tasks(cfg)
    if world.rollout_ranks:  # engine and learner do not share a device
        cfg = replace(cfg, train=replace(cfg.train, offload=False))
    is_async = cfg.select.mode == "async"
    home = folder.run_folder(cfg)

    world.phase("start: engine")
    hf = model.model_config(cfg)
    residency = devices.make_residency(cfg, hf, world)
    engine_sizes = sizes.make_sizes(cfg, hf, world, gate.tail if gate is not None else None)
    tokenizer = load_tokenizer(cfg.model.tokenizer or cfg.model.path, eos_ids=hf.eos_ids)
    sampling = model.sampling_of(cfg, tokenizer)
    deadlines = rewards.make_deadlines(cfg)
    service = rewards.make_scorer(cfg, world, deadlines) if world.samples else None
    scorer: RewardService | EnvScorer | None = service
    sampler = engine.make_engine(cfg, hf, world) if world.samples else None
    in_child = isinstance(sampler, ChildEngine)
    if cfg.select.env and sampler is not None:
        shown = Dialogue(tokenizer, is_chat=prompts.is_chat(cfg), num_tokens=hf.vocab_size)
        sampler = engine.make_episodes(
            cfg, world, sampler, shown, tokenizer.decode, lambda group: agent.prompts[group]
        )
        scorer = EnvScorer(sampler.outcomes, service)
    hub = make_hub(world, cfg.cluster.interface)
    for part in (hub, scorer, sampler):
        if part is not None:
            on_close(part.close)
    trace = observers.make_trace(cfg, world, spans, progress, on_close)
    agent = Agent(
        hub,
        sampler,
        scorer or NoScorer(deadlines),
        tokenizer.decode,
        cfg.rollout.deadline_s,
        cfg.cluster.timeout_s,
        cfg.debug.reward_barrier,
        is_endless=is_async,
        observers=observers.of_agent(world, trace),
    )
    screen = Screen(cfg.run.steps, progress=cfg.log.progress) if first else None
    if screen is not None:
        on_close(screen.close)
    only_sample = range(world.train_ranks, world.size)
    library = rounds = None
    if first and cfg.rollout.draft in rules.FROM_HISTORY:
        library = Library(max_tokens=cfg.draft.max_tokens, epochs=cfg.draft.epochs)
    if first:
        replay = Log(Path(cfg.debug.replay)) if cfg.debug.replay and not is_async else None
        rounds = Rounds(home, seed=cfg.run.seed, step=lambda: progress.step, replay=replay)
        on_close(rounds.close)
    rounds_of_sampling = Rollout(
        hub,
        agent,
        engine_sizes.make_controller,
        cfg.cluster.timeout_s,
        on_progress=screen.advance if screen is not None else None,
        samplers=only_sample,
        rounds=rounds,
        library=library,
    )
    spans.listen(observers.watch(cfg, world, screen, Heartbeat(hub, only_sample), on_close))
    data = prompts.load_data(model.with_room(cfg, hf), tokenizer, eval_sets) if first else Data()

    world.phase("start: learner")
    if cfg.train.offload:  # the learner is built where the engine will be; the first push wakes it
        assert sampler is not None
        sampler.sleep(["weights", "kv_cache"])
        collective.barrier()  # it is asleep on all its ranks when its first has said so
    flow = None
    if is_async:
        assert data.source is None or isinstance(data.source, EpochOrder)
        flow = rollout.make_flow(cfg, world, hub, agent, data.source, sampling)
        on_close(flow.close)
    actor = critic = None
    if world.trains:
        actor = learner.make_learner(cfg, hf, world)
        on_close(actor.close)
        if learner.wants(cfg) == "gae":
            critic = learner.make_critic(cfg, hf, world)
            on_close(critic.close)
    ranks = Ranks(
        rank=world.rank,
        size=world.size,
        replicas=replicas(cfg.train, world.train_ranks),
        dp_rank=actor.layout.dp_rank if actor is not None else -1,
        everyone=world.everyone,
    )
    parts = Parts(
        ranks=ranks,
        engine=sampler,
        learner=actor,
        critic=critic,
        channel=weights.make_weight_channel(
            cfg, world, in_child=in_child, to_shelf=gate is not None
        ),
        restart_engine=agent.restart_engine,
        sizes=engine_sizes,
        memory=residency,
        progress=progress,
        spans=spans,
        timeout_s=cfg.cluster.timeout_s,
    )
    device = devices.make_device(cfg, parts, world, gate, on_close)
    on_step = sharing.on_step(cfg, world, gate)
    if world.gang is not None:
        world.gang.flight.watch_step(lambda: progress.step)

    world.phase("start: checkpoint")
    kl = AdaptiveController(cfg.algo.kl_target, cfg.algo.kl_horizon)
    checkpoints = Checkpoints(
        cfg=cfg,
        folder=home,
        ranks=ranks,
        learner=actor,
        critic=critic,
        kl=kl,
        data=data,
        flow=flow,
        library=library,
        deadlines=deadlines,
        sizes=engine_sizes.policy,
    )
    checkpoint = checkpoints.choose()
    if checkpoint is not None:
        checkpoints.load(checkpoint, progress)
    seen = Observers()
    if first:
        if checkpoint is not None and checkpoint.is_relative_to(home):
            folder.tell_changes(cfg, home / "config.json")
        balance = observers.make_balance(cfg, hf, world) if is_async else None
        resolve.save(cfg, home / "config.json")
        writer = MetricsWriter(
            home,
            cfg.log.tensorboard,
            next_step=progress.step + 1 if progress.step else 0,
            sinks=observers.make_sinks(cfg),
        )
        on_close(writer.close)
        seen = Observers(
            writer=writer, screen=screen, balance=balance, on_step=on_step, pieces=tokenizer.pieces
        )
    world.phase("")
    stop_requested, on_done = _signals(cfg, world)
    return Run(
        cfg=cfg,
        hf=hf,
        folder=home,
        ranks=ranks,
        algo=algos.module(cfg.select.algo),
        kl=kl,
        device=device,
        rollout=rounds_of_sampling,
        flow=flow,
        sampling=sampling,
        data=data,
        progress=progress,
        spans=spans,
        observers=seen,
        checkpoints=checkpoints,
        stop_requested=stop_requested,
        on_done=on_done,
        close=closing.close,
    )


def _signals(cfg: Config, world: World) -> tuple[Callable[[], bool], Callable[[], None]]:
    """Return whether this rank got a SIGTERM, and what to call when nothing is left to do."""
    gang = world.gang
    if gang is None:
        return (lambda: False), (lambda: None)
    gang.allow_grace(cfg.checkpoint.grace_s)
    return (lambda: gang.ends), gang.done
