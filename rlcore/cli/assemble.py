"""Builds everything that one rank of a run holds, from the configuration."""

import importlib.util
import itertools
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlcore import algos
from rlcore.algos.kl import AdaptiveController
from rlcore.cli import splits
from rlcore.cli.world import World, make_hub
from rlcore.config import resolve, rules
from rlcore.config.schema import Config, reward_sections
from rlcore.data import prompts
from rlcore.data.sampler import EpochSampler
from rlcore.envs import registry as envs
from rlcore.envs.dialogue import Dialogue
from rlcore.envs.engine import EpisodeEngine
from rlcore.envs.scorer import EnvScorer
from rlcore.hf.config import HFConfig
from rlcore.hf.tokenizer import Tokenizer, load_tokenizer
from rlcore.mcore.layout import layout_of, replicas
from rlcore.metrics.screen import Screen
from rlcore.metrics.sinks import MetricsWriter, Prometheus, Sink, Wandb
from rlcore.metrics.trace import RunTrace
from rlcore.mux.profile import Profile, Profiler
from rlcore.protocols import Engine, WeightChannel
from rlcore.records import GroupId, Prompt, Sampling
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.judge.residency import footprint
from rlcore.rewards.service import RewardService
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.controller import Controller
from rlcore.rollout.flow import Flow
from rlcore.rollout.histospec import Library
from rlcore.rollout.replay import EventLog, Recorder, controller_of
from rlcore.rollout.replica import Agent, NoScorer
from rlcore.rollout.round import Rollout
from rlcore.rollout.rounds import Log, Rounds
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.rollout.transport import Hub, free_port
from rlcore.sched.balance import Balance
from rlcore.sched.histopipe import Pipe
from rlcore.sched.place import LeastLoaded
from rlcore.sched.planner import Listed, TPPlanner
from rlcore.sched.reward import AdaptiveTimeout
from rlcore.sched.roles import Cell, Elastic, Sizes, Stop
from rlcore.sched.source import EpochOrder
from rlcore.sched.staleness import SampleBuffer
from rlcore.sched.stream import Lengths, StreamWindow, cells
from rlcore.sched.tail_batching import TailBatching
from rlcore.sync.channel import make_channel
from rlcore.sync.peers import Peers
from rlcore.sync.shelf import Shelf
from rlcore.trainer import memory, relayout, report, resume, stream_loop, sync_loop, turns
from rlcore.trainer.run import Run
from rlcore.utils import collective, lock, log
from rlcore.utils.deadline import Watchdog
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import announce
from rlcore.utils.spans import Spans

if TYPE_CHECKING:  # Redis is for those that share their nodes
    from rlcore.mux.gate import Gate, NoGate
    from rlcore.mux.ranks import RanksGate


def run_folder(cfg: Config) -> Path:
    return Path(cfg.run.dir) / (cfg.run.name or "run")


def open_folder(cfg: Config, world: World) -> None:
    """Make the run's folder and log to it. An older run that this one does not go on with gives way
    first, or its log would go on in the folder that it is moved to. Collective. ConfigError where
    the folder cannot be made."""
    folder, aside = run_folder(cfg), None
    log.setup(world.rank)
    if world.rank == 0:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            if who := lock.hold(folder.with_name(f".{folder.name}.lock")):
                raise ConfigError(
                    f"--run.name {folder.name}: {who} is at work in {folder}, and two runs would "
                    "mix their metrics and delete each other's checkpoints; give another name, or "
                    "end that one first"
                )
            wanted = resume.wanted_by(cfg, folder)
            starts = wanted == "auto" and not resume.found(folder)
            if starts or wanted == "fresh":
                aside = resume.move_aside(folder)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise cannot_be_made(cfg, e) from e
    collective.barrier(world.everyone)
    log.setup(world.rank, folder / "logs")
    if aside is not None:
        log.log.info("the older run of this name is now %s", aside)
    for line in rules.warnings(cfg) if world.rank == 0 else ():
        log.log.warning("%s", line)


def cannot_be_made(cfg: Config, error: OSError) -> ConfigError:
    """What to raise where the run's folder cannot be made."""
    return ConfigError(
        f"--run.dir {cfg.run.dir}: the folder {run_folder(cfg)} cannot be made "
        f"({error.strerror}: {error.filename}); choose another"
    )


TORCH_ENGINE = "rlcore.rollout.torch_engine.engine:build"
SGLANG_ENGINE = "rlcore.rollout.sglang_engine.engine:build"


def assemble(cfg: Config, world: World) -> Run:
    """One rank's `Run`, restored from its newest checkpoint where there is one. ConfigError where
    the configuration cannot work; what was started is ended then."""
    began = time.monotonic()
    with ExitStack() as started:
        gate = make_gate(cfg, world)
        if gate is None:
            run = _assemble(cfg, world, started.callback)
        else:
            started.callback(gate.close)
            world.phase("start: turn")
            with gate.phase("start"):
                run = _assemble(cfg, world, started.callback, gate)
                for state in (turns.EngineState(run), turns.LearnerState(run)):
                    state.store()
        run.on_close = [started.pop_all().close]
    run.spans.add("start", time.monotonic() - began)
    return run


def _assemble(
    cfg: Config,
    world: World,
    on_close: Callable[[Callable[[], None]], object],
    gate: "RanksGate | None" = None,
) -> Run:
    """What takes long to start (engine, reward children) starts first and gets ready while the
    learner is built; what may be wrong in the data is found before that."""
    cfg = with_tasks(cfg)
    if world.rollout_ranks:  # engine and learner do not share a device
        cfg = replace(cfg, train=replace(cfg.train, offload=False))
    world.phase("start: engine")
    hf = model_config(cfg)
    residency = make_residency(cfg, hf, world)
    sizes = make_relayout(cfg, hf, world)
    elastic = make_elastic(cfg, hf, world)
    tokenizer = load_tokenizer(cfg.model.tokenizer or cfg.model.path, eos_ids=hf.eos_ids)
    sampling = sampling_of(cfg, tokenizer)
    deadlines = make_deadlines(cfg)
    scorer = make_scorer(cfg, world, deadlines) if world.samples else None
    engine = make_engine(cfg, hf, world) if world.samples else None
    in_child = isinstance(engine, ChildEngine)
    if cfg.select.env and engine is not None:
        shown = Dialogue(tokenizer, is_chat=is_chat(cfg), num_tokens=hf.vocab_size)
        engine = make_episodes(
            cfg, world, engine, shown, tokenizer.decode, lambda group: agent.prompts[group]
        )
        scorer = EnvScorer(engine.outcomes, scorer)
    hub = make_hub(world, cfg.cluster.interface)
    for part in (hub, scorer, engine):
        if part is not None:
            on_close(part.close)
    limits = cfg.rollout.deadline_s, cfg.cluster.timeout_s
    agent = Agent(
        hub,
        engine,
        scorer or NoScorer(deadlines),
        tokenizer.decode,
        *limits,
        cfg.debug.reward_barrier,
    )
    screen = None
    if world.rank == 0:
        screen = Screen(cfg.run.steps, progress=cfg.log.progress)
        on_close(screen.close)
    rollout = Rollout(
        hub,
        agent,
        partial(make_controller, cfg, world.size),
        timeout_s=cfg.cluster.timeout_s,
        on_progress=screen.advance if screen else None,
        samplers=range(world.train_ranks, world.size),
    )
    if cfg.rollout.draft in rules.FROM_HISTORY and world.rank == 0:
        rollout.library = Library(max_tokens=cfg.draft.max_tokens, epochs=cfg.draft.epochs)
    flow = None
    is_async = cfg.select.mode == "async"
    replay = None
    if cfg.debug.replay and world.rank == 0 and not is_async:
        replay = Log(Path(cfg.debug.replay))
    data = load_data(with_room(cfg, hf), tokenizer) if world.rank == 0 else {}
    world.phase("start: learner")
    if cfg.train.offload:  # the learner is built where the engine will be; the first push wakes it
        engine.sleep(["weights", "kv_cache"])
        collective.barrier()  # it is asleep on all its ranks when its first has said so
    if is_async:
        flow = make_flow(cfg, world, hub, agent, data.get("source"), sampling)
        on_close(flow.close)
    learner = critic = None
    if world.trains:
        learner = make_learner(cfg, hf, world)
        on_close(learner.close)
    if world.trains and wants(cfg) == "gae":
        critic = make_critic(cfg, hf, world)
        on_close(critic.close)
    to_shelf = gate is not None
    channel = make_weight_channel(cfg, world, in_child, to_shelf=to_shelf)
    run = Run(
        cfg=cfg,
        hf=hf,
        folder=run_folder(cfg),
        rank=world.rank,
        world_size=world.size,
        everyone=world.everyone,
        replicas=replicas(cfg.train, world.train_ranks),
        dp_rank=learner.layout.dp_rank if learner is not None else -1,
        algo=algos.module(cfg.select.algo),
        learner=learner,
        critic=critic,
        kl=AdaptiveController(cfg.algo.kl_target, cfg.algo.kl_horizon),
        engine=engine,
        engine_ranks=engine_ranks(cfg, world.rank) if world.samples else (),
        relayout=sizes,
        channel=channel,
        gate=gate,
        rollout=rollout,
        flow=flow,
        sampling=sampling,
        deadlines=deadlines,
        memory=residency,
        spans=Spans(listener=watch(cfg, world, screen, rollout, on_close)),
        screen=screen,
        pieces=tokenizer.pieces,
        **data,
    )
    if gate is not None:
        if cfg.mux.tail_nodes:
            run.elastic, run.leaver = gate.tail, turns.Leaver(run)
            agent.streamer = run.leaver
        gate.alive, gate.tell = run.spans.alive, lambda found: run.pending.update(found)
        if world.rank == 0:
            run.on_step.append(gate.see)
        if world.samples:
            run.shelf = Shelf(cfg.rollout.tp)
            on_close(run.shelf.close)
    elif cfg.select.mode == "sync" and report.counts_nodes(run):
        names = collective.gather_texts(node_name(cfg, world), world.everyone)
        if world.rank == 0:
            run.on_step.append(make_profiler(cfg, names, world.rollout_ranks).see)
    if cfg.log.trace:
        behind = collective.clock_offset(group=world.everyone)
        record = RunTrace(run.folder, world.rank, socket.gethostname(), behind, cfg.log.trace)
        on_close(record.close)
        agent.observers.append(record.see)
        run.spans.on_end = lambda name, start, end: record.phase(name, start, end, run.step)
    agent.repair = partial(sync_loop.repair_engines, run)
    if elastic is not None:
        run.elastic, agent.streamer = elastic, stream_loop.Stream(run)
    if world.gang is not None:
        world.gang.flight.step = lambda: run.step
        agent.observers.append(world.gang.flight.see)
        run.told_to_end = lambda: world.gang.ends
        run.on_done = partial(setattr, world.gang, "is_done", True)
    world.phase("start: checkpoint")
    checkpoint = resume.choose(run)
    if checkpoint is not None:
        resume.load(run, checkpoint)
    if world.rank == 0:
        if checkpoint is not None and checkpoint.is_relative_to(run.folder):
            tell_changes(cfg, run.folder / "config.json")
        if is_async:
            run.balance = make_balance(cfg, hf, world)
        resolve.save(cfg, run.folder / "config.json")
        run.writer = MetricsWriter(
            run.folder,
            cfg.log.tensorboard,
            next_step=run.step + 1 if run.step else 0,
            sinks=make_sinks(cfg),
        )
        on_close(run.writer.close)
        rollout.rounds = Rounds(
            run.folder,
            seed=cfg.run.seed,
            step=lambda: run.step,
            next_step=run.step + 1 if run.step else 0,
            replay=replay,
        )
        on_close(rollout.rounds.close)
    world.phase("")
    if world.gang is not None:
        world.gang.grace_s = cfg.checkpoint.grace_s
    return run


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
    rollout: Rollout,
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
        rollout.alive()
        world.phase(phase)
        if screen is not None:
            screen.phase(phase)

    return listen


def model_config(cfg: Config) -> HFConfig:
    """The start model's architecture, with --model.num_layers applied."""
    return with_layers(cfg, HFConfig.from_folder(cfg.model.path))


def with_layers(cfg: Config, hf: HFConfig) -> HFConfig:
    """The architecture with --model.num_layers applied. ConfigError where weights are loaded."""
    if cfg.model.num_layers:
        if not cfg.model.random_init:
            raise ConfigError(
                f"--model.num_layers {cfg.model.num_layers}: only with --model.random_init, the "
                "folder's weights have all their layers"
            )
        hf = hf.with_(num_layers=cfg.model.num_layers)
    return hf


def with_room(cfg: Config, hf: HFConfig) -> Config:
    """Prompts may be as long as the model's positions allow besides an answer: the engine would
    refuse longer ones in the middle of the run. ConfigError where an answer alone takes all."""
    room = hf.max_positions - cfg.rollout.max_tokens
    if room < 1:
        raise ConfigError(
            f"--rollout.max_tokens {cfg.rollout.max_tokens}: prompt and response share the model's "
            f"{hf.max_positions} positions; take fewer"
        )
    if cfg.data.max_prompt_tokens <= room:
        return cfg
    announce("prompts", f"at most {room} tokens, so that an answer fits the model's positions too")
    return replace(cfg, data=replace(cfg.data, max_prompt_tokens=room))


def tell_changes(cfg: Config, file: Path) -> None:
    """Warn where a resumed run has other settings than `file` says that it had."""
    if not file.is_file():
        return
    old, new = json.loads(file.read_text()), json.loads(resolve.to_json(cfg))
    changes = [
        f"--{section}.{key} {old[section][key]} -> {value}"
        for section in new
        for key, value in new[section].items()
        if section not in ("log", "debug") and f"{section}.{key}" not in ("run.steps", "run.resume")
        if old.get(section, {}).get(key, value) != value
    ]
    if changes:
        log.log.warning("the resumed run had other settings: %s", ", ".join(changes))


def sampling_of(cfg: Config, tokenizer: Tokenizer) -> Sampling:
    """How training samples are drawn."""
    r = cfg.rollout
    stops = tuple(dict.fromkeys([*tokenizer.eos_ids, *r.stop_ids]))
    return Sampling(
        temperature=r.temperature,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        max_tokens=r.max_tokens,
        stop_ids=() if cfg.debug.full_length else stops,
    )


def make_residency(cfg: Config, hf: HFConfig, world: World) -> memory.Residency:
    """Holds this rank to its memory plan. ConfigError where that cannot work."""
    if problems := rules.of_world(cfg, world.size, ranks_per_node(world)):
        raise ConfigError("\n".join(problems))
    plan, gpu_bytes = memory_plan(cfg, hf, world)
    if plan.problems:
        raise ConfigError("\n".join(plan.problems))
    if said := memory.too_large(plan, gpu_bytes):
        log.log.warning("%s", said)
    return memory.Residency(plan, world.device)


def memory_plan(cfg: Config, hf: HFConfig, world: World) -> tuple[memory.Plan, int]:
    """Of this rank, and the bytes of its GPU; 0 where there is none."""
    cuda = world.device.type == "cuda"
    gpu_bytes = torch.cuda.get_device_properties(world.device).total_memory if cuda else 0
    others = beside(judges_of(cfg)) if cuda and world.samples else memory.NOBODY
    if not world.trains:
        plan = memory.make_sampler(cfg, hf, world.rank, gpu_bytes=gpu_bytes, beside=others)
        return plan, gpu_bytes
    layout = layout_of(cfg.train, world.train_ranks, world.rank)
    plan = memory.make(
        cfg, hf, layout, gpu_bytes=gpu_bytes, cuda=cuda, beside=others, has_engine=world.samples
    )
    return plan, gpu_bytes


def judges_of(cfg: Config) -> list[tuple[JudgeRewardConfig, HFConfig]]:
    """Judges on our own devices, with their architectures."""
    own = own_judges(cfg).values()
    return [(section, HFConfig.from_folder(section.model, "--reward.model")) for section in own]


def judge_sections(cfg: Config) -> dict[str, JudgeRewardConfig]:
    """Sections of judges, by key."""
    sections = reward_sections(cfg.reward).items()
    return {k: s for k, s in sections if isinstance(s, JudgeRewardConfig)}


def own_judges(cfg: Config) -> dict[str, JudgeRewardConfig]:
    """Sections of judges on our own devices, by key."""
    return {k: s for k, s in judge_sections(cfg).items() if not s.url}


def beside(judges: Sequence[tuple[JudgeRewardConfig, HFConfig]]) -> memory.Beside:
    """What judges take on each GPU, for the memory plan."""
    found = [footprint(section, hf) for section, hf in judges]
    if not found:
        return memory.NOBODY
    context = memory.TRAINER_CONTEXT * len(found)
    stay, work, host = (sum(getattr(f, k) for f in found) for k in ("stay", "work", "host"))
    return memory.Beside(
        always=(memory.Item("judge", stay + context, True),),
        generate=(memory.Item("judge's work", work, True, True),),
        host=(memory.Item("judge's layers", host),) if host else (),
    )


def ranks_per_node(world: World) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world.size))


def make_deadlines(cfg: Config) -> AdaptiveTimeout | None:
    """Deadlines of rewards that adapt to prompts, where they shall."""
    for r in reward_sections(cfg.reward).values():
        if r.adaptive_timeout:  # one of a sum at most
            return AdaptiveTimeout(r.timeout_least_s, r.timeout_s, r.timeout_factor)
    return None


def with_tasks(cfg: Config) -> Config:
    """With the prompts of an environment that makes its own."""
    task = cfg.env.TASK
    if not task or (cfg.data.train, cfg.data.val) == ((task,), (task,)):
        return cfg
    val = (task,) if cfg.data.val or cfg.eval.every else ()
    announce("prompts", f"of --env {cfg.select.env}: the generated task {task}")
    return replace(cfg, data=replace(cfg.data, train=(task,), val=val))


def is_chat(cfg: Config) -> bool:
    """Environments speak as the user of a chat; generated tasks as plain text."""
    template, tasks = cfg.data.template, prompts.TASKS.keys() & set(cfg.data.train)
    return template == "chat" or (template == "auto" and not tasks)


def make_episodes(
    cfg: Config,
    world: World,
    engine: Engine,
    dialogue: Dialogue,
    decode: Callable[[list[int]], str],
    prompt_of: Callable[[GroupId], Prompt],
) -> EpisodeEngine:
    """The engine of a rank whose responses are episodes. With --debug.deterministic they take
    their turns together."""
    announce("env", f"{cfg.select.env}, {cfg.env.workers} processes")
    return EpisodeEngine(
        engine,
        cfg.select.env,
        envs.resolve(cfg.select.env),
        cfg.env,
        dialogue=dialogue,
        decode=decode,
        prompt_of=prompt_of,
        seed=cfg.run.seed,
        barrier=cfg.debug.env_barrier or cfg.debug.deterministic,
        log_file=run_folder(cfg) / "logs" / f"env{world.rank}.log",
    )


def make_scorer(
    cfg: Config, world: World, deadlines: AdaptiveTimeout | None
) -> RewardService | None:
    """The rank's rewards; None where environments alone score."""
    if cfg.select.env and envs.resolve(cfg.select.env).scored_by == "env":
        return None
    return RewardService(
        cfg.select.reward,
        config=cfg.reward,
        seed=cfg.run.seed,
        log_file=run_folder(cfg) / "logs" / f"reward{world.rank}.log",
        deadlines=deadlines,
    )


def make_engine(cfg: Config, hf: HFConfig, world: World) -> Engine:
    """This rank's sampler, or its share of one over --rollout.tp ranks. ConfigError where SGLang is
    asked for and not installed."""
    r = cfg.rollout
    if r.engine == "sglang":
        return _sglang_engine(cfg, hf, world)
    settings = engine_settings(cfg, hf, world)
    inline = r.process == "inline" or (r.process == "auto" and world.size == 1)
    announce(
        "engine", f"torch, {settings['dtype']}, {'in this process' if inline else 'child process'}"
    )
    if inline:
        del settings["config"]
        return TorchEngine(hf, **(settings | {"device": world.device}))
    return ChildEngine(
        TORCH_ENGINE,
        settings,
        threads=r.threads,
        rank=world.rank,
        deadline_s=cfg.cluster.timeout_s,
    )


def engine_settings(cfg: Config, hf: HFConfig, world: World) -> dict[str, Any]:
    """What the engine of --rollout.engine is built of, as plain data. An engine over several ranks
    needs each one's place besides."""
    r = cfg.rollout
    settings = {
        "config": hf.to_dict(),
        "device": str(world.device),
        "dtype": cfg.model.dtype if r.dtype == "auto" else r.dtype,
        "seed": cfg.run.seed,
        "max_running": r.max_running,
        "cache_tokens": r.cache_tokens,
        "max_model_tokens": max_model_tokens(cfg, hf),
        "threads": r.threads,
        "progress_s": r.progress_s,
        "fp32_head": r.fp32_lm_head,
        "rank": world.rank,
    }
    if r.engine == "torch":
        return settings | {
            "decode_floor_ms": cfg.debug.decode_floor_ms,
            "quantize": r.quantize,
            "draft": r.draft,
            "draft_settings": draft_settings(cfg),
        }
    check_engine(cfg)
    return settings | {
        "memory_fraction": r.gpu_memory_utilization,
        "draft": r.draft,
        "draft_width": cfg.draft.width,
        "draft_settings": draft_settings(cfg),
        "sglang": {k: _value(v) for k, _, v in (x.partition("=") for x in r.sglang)},
        "deadline_s": cfg.cluster.timeout_s,
    }


def check_engine(cfg: Config) -> None:
    """ConfigError where SGLang is asked for and not installed."""
    if cfg.rollout.engine == "sglang" and importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "--rollout.engine sglang: SGLang is not installed here; run bash tools/setup.sh "
            "--sglang, or use --rollout.engine torch"
        )


def draft_settings(cfg: Config) -> dict[str, Any]:
    """How an engine drafts. With --debug.deterministic nothing of it depends on the clock: an index
    of histories is waited for, and drafts are always on."""
    names = ("window", "start", "growth", "min_match", "max_match", "factor", "min_prob")
    steady = cfg.debug.deterministic
    return {name: getattr(cfg.draft, name) for name in names} | {
        "gate": cfg.draft.gate and not steady,
        "wait": steady,
    }


def max_model_tokens(cfg: Config, hf: HFConfig) -> int:
    """The longest prompt with the longest response."""
    return min(hf.max_positions, cfg.data.max_prompt_tokens + cfg.rollout.max_tokens)


def _sglang_engine(cfg: Config, hf: HFConfig, world: World) -> ChildEngine:
    """SGLang ends the process that it lives in when a part of it dies, hence always a child."""
    plain = engine_settings(cfg, hf, world)
    where = "CUDA" if world.device.type == "cuda" else "CPU"
    tp = f"tp {cfg.rollout.tp}" + (" and others" if rules.changes_size(cfg) else "")
    announce("engine", f"sglang on {where}, {plain['dtype']}, {tp}, child process")
    sizes, starts, sized = 0, itertools.count(), cfg  # how often the size was set, starts since

    def resize(tp: int) -> None:
        nonlocal sizes, starts, sized
        sizes, starts, sized = sizes + 1, itertools.count(), with_tp(cfg, tp)

    def settings() -> dict[str, Any]:
        tp, share = sized.rollout.tp, {}
        if tp > 1:
            first = world.rank - world.rank % tp
            meeting = f"engine/{sizes}/{first}/{next(starts)}"
            if world.rank == first:
                world.sealed.set(meeting, f"127.0.0.1:{free_port()}")  # all ranks are on one node
            share = {
                "tp": tp,
                "nnodes": tp,
                "node_rank": world.rank - first,
                "dist_init_addr": world.sealed.get(meeting).decode(),
            }
        return engine_settings(sized, hf, world) | share

    return ChildEngine(
        SGLANG_ENGINE,
        settings,
        threads=cfg.rollout.threads,
        rank=world.rank,
        start_s=cfg.cluster.timeout_s,
        resize=resize,
    )


def _value(text: str) -> Any:
    """A value of --rollout.sglang: a number, true, false, a list, or else a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def engine_ranks(cfg: Config, rank: int) -> range:
    """The ranks that the engine of `rank` spans; the first of them takes its requests."""
    first = rank - rank % cfg.rollout.tp
    return range(first, first + cfg.rollout.tp)


def with_tp(cfg: Config, tp: int) -> Config:
    """With engines of another size: all of them together hold and decode as much."""
    r = cfg.rollout
    changed = replace(
        r,
        tp=tp,
        max_running=max(1, r.max_running * tp // r.tp),
        cache_tokens=r.cache_tokens * tp // r.tp,
    )
    return replace(cfg, rollout=changed)


def make_relayout(cfg: Config, hf: HFConfig, world: World) -> relayout.Relayout | None:
    """Where the engines may change their size: who decides, on rank 0, and what has to follow.
    ConfigError where a size that was asked for cannot be."""
    if not rules.changes_size(cfg):
        return None

    def problems(tp: int) -> list[str]:
        sized = with_tp(cfg, tp)
        found = rules.of_world(sized, world.size, ranks_per_node(world))
        found += memory_plan(sized, hf, world)[0].problems
        if 0 < sized.rollout.cache_tokens < memory.longest(cfg, hf):
            found.append(
                f"--rollout.cache_tokens {cfg.rollout.cache_tokens}: engines of {tp} ranks would "
                f"have {sized.rollout.cache_tokens} of them, and one sequence may have "
                f"{memory.longest(cfg, hf)}; raise it"
            )
        return found

    policy: Sizes
    if cfg.debug.rollout_tp:
        if found := [line for tp in cfg.debug.rollout_tp for line in problems(tp)]:
            raise ConfigError(found[0].replace("--rollout.tp", "--debug.rollout_tp"))
        policy = Listed(cfg.debug.rollout_tp)
    else:
        tp, most = cfg.rollout.tp, cfg.rollout.max_tp or ranks_per_node(world)
        if cfg.rollout.max_tp and (found := problems(most)):
            raise ConfigError(found[0].replace("--rollout.tp", "--rollout.max_tp"))
        low = high = tp
        while low > 1 and not problems(low // 2):
            low //= 2
        while 2 * high <= most and not problems(2 * high):
            high *= 2
        announce("planner", f"engines of {low} to {high} ranks, {tp} at the start")
        policy = TPPlanner(tp, high, min_tp=low)

    lengths: Lengths | None = None

    def rebuild(run: Run, tp: int) -> None:
        nonlocal lengths
        sized = with_tp(cfg, tp)
        run.engine_ranks = engine_ranks(sized, run.rank)
        run.channel.relayout(tp)
        run.rollout.make_controller = partial(make_controller, sized, world.size)
        if run.memory is not None:
            run.memory.plan = memory_plan(sized, hf, world)[0]
        if isinstance(run.elastic, StreamWindow):
            lengths = run.elastic.lengths
        try:
            run.elastic = make_elastic(sized, hf, world, lengths)
        except ValueError:  # one engine over all ranks: nobody is left to train meanwhile
            run.elastic = None

    return relayout.Relayout(
        tp=cfg.rollout.tp, policy=policy if world.rank == 0 else None, rebuild=rebuild
    )


def make_weight_channel(
    cfg: Config, world: World, in_child: bool, *, to_shelf: bool = False
) -> WeightChannel:
    """The way of the weights from the learner to this rank's engine, or to its shelf."""
    cuda = world.device.type == "cuda"
    transport = "shm" if in_child else "bytes"
    if cfg.rollout.engine == "sglang" and cuda:
        transport = "cuda_ipc"
    if to_shelf:
        transport = "bytes"
    size = cfg.sync.ranks_per_site or int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    way = rules.route(cfg)
    if cfg.sync.route == "auto" and way != "gather":
        announce("weights", f"{way}, ranks that train are not those that sample")
    return make_channel(
        way,
        transport=transport,
        tp=cfg.rollout.tp,
        max_bytes=cfg.sync.bucket_mb * 2**20,
        sites=[range(i, min(i + size, world.size)) for i in range(0, world.size, size)],
        peers=make_peers(cfg, world),
        device=world.device,
    )


BOTH = ("rollout", "train")
POOLS = {"start": BOTH, "eval": ("rollout",), "save": ("train",)}
"""That a phase uses where it is not named after its pool."""
POOLS_COLOCATED = dict.fromkeys(("start", "step", "train", "eval", "save"), BOTH)
"""Where every rank samples and trains."""


def check_mux(cfg: Config) -> None:
    """ConfigError where a job with --mux.url has a judge of its own, which never leaves its GPU."""
    if cfg.mux.url and own_judges(cfg):
        raise ConfigError(
            "--mux.url: a judge of the run's own stays on the nodes between its phases; give "
            "--reward.url the address of a server, or take another reward"
        )


def make_gate(cfg: Config, world: World) -> "RanksGate | None":
    """This rank's gate in the cluster of --mux.url; None for a job that is alone, or decides to be.
    Collective. ConfigError where what is asked for cannot be, on every rank."""
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
        connect if first else None, world.everyone, run_folder(cfg) if first else None
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


NODE, ROLLOUT_NODE = "RLCORE_NODE", "RLCORE_ROLLOUT_NODE"
"""In the environment: what a node is called, where host names do not tell nodes apart; the second
is for ranks that only sample."""


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
    split, found = len(names) - rollout_ranks, {}
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


def make_peers(cfg: Config, world: World) -> Peers:
    """All ranks, whatever default group each is in."""
    if world.everyone is None:
        return Peers(timeout_s=cfg.cluster.timeout_s)
    return Peers(world.rank, world.size, world.store, timeout_s=cfg.cluster.timeout_s)


def make_elastic(
    cfg: Config, hf: HFConfig, world: World, lengths: Lengths | None = None
) -> StreamWindow | None:
    """Who trains in the middle of a round, with --mode stream. ConfigError where all ranks are one
    engine or one model replica. `lengths`: what is known of responses."""
    if cfg.select.mode != "stream":
        return None
    layouts = [layout_of(cfg.train, world.size, rank) for rank in range(world.size)]
    r = cfg.rollout
    return StreamWindow(
        cells(
            [engine_ranks(cfg, rank) for rank in range(0, world.size, r.tp)],
            replicas(cfg.train, world.size),
            [layout.lockstep_ranks for layout in layouts],
        ),
        cache_tokens=r.cache_tokens or r.max_running * max_model_tokens(cfg, hf),
        max_running=r.max_running,
        batch_tokens=cfg.train.tokens_per_micro_batch,
        first=cfg.stream.first,
        last=cfg.stream.last,
        every=cfg.stream.every,
        lengths=lengths,
    )


def make_place(cfg: Config) -> LeastLoaded:
    """Where requests go; of `histopipe`, those of an evaluation.

    Without --rollout.queue everything goes out at once and what has no room waits in the engines.
    Where the controller fills replicas as they get free, the clock decides which requests are
    decoded side by side, the log-probs differ in their last bits, and a resumed run is not the same
    bit by bit.
    """
    r = cfg.rollout
    most = cfg.env.max_running if cfg.select.env else r.max_running
    return LeastLoaded(most if r.queue else sys.maxsize, spread=r.place == "response")


def make_pipe(cfg: Config, leaders: Sequence[int]) -> Pipe:
    """Where requests go by what the epoch before says of their lengths."""
    return Pipe(
        replicas=leaders,
        batch=cfg.data.prompts_per_step,
        longest=cfg.rollout.max_tokens,
        rows=cfg.rollout.max_running,
    )


def make_controller(
    cfg: Config, world_size: int, stop: Stop, elastic: Elastic | None = None
) -> Controller:
    """The controller of one round, which `stop` ends, over the engines of all ranks or of the last
    --cluster.rollout_ranks."""
    tp, apart = cfg.rollout.tp, cfg.cluster.rollout_ranks
    leaders = range(world_size - apart if apart else 0, world_size, tp)
    return Controller(
        ranks=leaders,
        all_ranks=range(world_size),
        members={first: range(first + 1, first + tp) for first in leaders},
        place=make_place(cfg),
        stop=stop,
        deadline_s=cfg.rollout.deadline_s,
        by_tokens=cfg.debug.deterministic,
        elastic=elastic,
    )


def make_flow(
    cfg: Config,
    world: World,
    hub: Hub,
    agent: Agent,
    source: EpochOrder | None,
    sampling: Sampling,
) -> Flow:
    """This rank's part of `--mode async`. `source`: on rank 0, which has the controller."""
    tp, controller, log_ = cfg.rollout.tp, None, None
    samplers = range(world.train_ranks, world.size)
    if cfg.debug.replay and world.trains:
        log_ = EventLog(Path(cfg.debug.replay), cfg.run.seed)
    if source is not None:
        leaders = samplers[::tp]
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
    return Flow(
        hub,
        agent,
        controller,
        samplers=samplers,
        timeout_s=cfg.cluster.timeout_s,
        deadline_s=cfg.rollout.deadline_s,
        record=Recorder(run_folder(cfg), cfg.run.seed)
        if cfg.debug.record and world.trains
        else None,
        replay=log_,
    )


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


def wants(cfg: Config) -> str:
    """The estimator of the advantages."""
    return algos.estimator(algos.module(cfg.select.algo), cfg.algo)


def total_updates(cfg: Config, alone: int = 0) -> int:
    """Optimizer steps of the whole run, but for `alone` rounds at its start."""
    samples = cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt
    rounds = max(cfg.run.steps - alone, 0)
    return rounds * cfg.train.epochs * (samples // (cfg.train.samples_per_update or samples))


def make_learner(cfg: Config, hf: HFConfig, world: World):
    """The Megatron learner. Imported here: Megatron takes seconds that --help should not pay."""
    from rlcore.mcore.learner import MegatronLearner

    return MegatronLearner(
        hf,
        cfg.model,
        cfg.train,
        device=world.device,
        temperature=cfg.rollout.temperature,
        seed=cfg.run.seed,
        total_updates=total_updates(cfg, cfg.critic.warmup_steps if wants(cfg) == "gae" else 0),
        keep_reference=cfg.algo.needs_reference,
        timeout_s=cfg.cluster.timeout_s,
    )


def make_critic(cfg: Config, hf: HFConfig, world: World):
    """The value model, laid out as the learner is."""
    from rlcore.mcore.learner import MegatronLearner

    c = cfg.critic
    train = replace(
        cfg.train,
        lr=c.lr,
        lr_schedule="constant",
        lr_warmup_updates=c.lr_warmup_updates,
        min_lr=0.0,
        weight_decay=c.weight_decay,
        clip_grad=c.clip_grad,
    )
    return MegatronLearner(
        hf,
        replace(cfg.model, path=c.path or cfg.model.path),
        train,
        device=world.device,
        seed=cfg.run.seed,
        total_updates=total_updates(cfg),
        head="value",
        timeout_s=cfg.cluster.timeout_s,
    )


def counts_rows(cfg: Config) -> bool:
    """One bad row, or too few rows, can end the run."""
    return cfg.data.bad_rows == "refuse" or cfg.select.schedule == "tail_batching"


def load_data(cfg: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """Prompts, their order, and the validation sets, as fields of `Run`: rank 0 alone deals them
    out."""
    train = prompts.load(cfg.data, "train", tokenizer, cfg.run.seed)
    sampler = EpochSampler(len(train) if train.is_finite else None, cfg.run.seed, cfg.data.shuffle)

    eval_sets = prompts.load(cfg.data, "val", tokenizer, cfg.run.seed)
    prompts.overlap(train, eval_sets)  # warns
    source = make_source(cfg, sampler, train.__getitem__)
    return {"sampler": sampler, "source": source, "eval_sets": eval_sets}


def make_source(
    cfg: Config, sampler: EpochSampler, prompt_of: Callable[[int], Prompt]
) -> EpochOrder | TailBatching:
    """The source of --schedule. `prompt_of`: the prompt of a row."""
    sizes = {
        "num_prompts": cfg.data.prompts_per_step,
        "num_samples": cfg.rollout.samples_per_prompt,
    }
    if cfg.select.schedule == "all":

        def next_prompts(n: int) -> list[Prompt]:
            return [prompt_of(row) for _, row in sampler.next(n)]

        return EpochOrder(
            next_prompts,
            **sizes,
            greedy_baseline=wants(cfg) == "remax",
            num_started=cfg.env.num_groups,
            group_size=cfg.env.group_size,
        )
    tail, rows = cfg.tail, sampler.state()["num_rows"]
    starts = int(tail.eta_prompts * cfg.data.prompts_per_step)
    if rows is not None and rows < starts:
        raise ConfigError(
            f"--data.train {' '.join(cfg.data.train)}: has {rows} prompts and a short round starts "
            f"{starts} different ones; lower --data.prompts_per_step"
        )
    return TailBatching(
        sampler.next,
        prompt_of,
        **sizes,
        eta_prompts=tail.eta_prompts,
        eta_samples=tail.eta_samples,
        quotas=rules.quotas(cfg) or None,
        dynamic=tail.dynamic,
        max_factor=tail.max_factor,
    )
