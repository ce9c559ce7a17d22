"""Builds everything that one rank of a run holds, from the configuration."""

from pathlib import Path

from rlcore import algos
from rlcore.cli.world import World, make_hub
from rlcore.config import resolve
from rlcore.config.schema import Config
from rlcore.data import prompts
from rlcore.data.sampler import EpochSampler
from rlcore.hf.config import HFConfig
from rlcore.hf.tokenizer import Tokenizer, load_tokenizer
from rlcore.metrics.screen import Screen
from rlcore.metrics.sinks import MetricsWriter
from rlcore.protocols import Engine
from rlcore.records import Prompt, Sampling
from rlcore.rewards.service import RewardService
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.controller import Controller
from rlcore.rollout.replica import Agent
from rlcore.rollout.round import Rollout
from rlcore.rollout.torch_engine import factory
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sched.place import LeastLoaded
from rlcore.sched.source import EpochOrder
from rlcore.sched.stop import All
from rlcore.sync.colocated import ColocatedChannel
from rlcore.trainer import resume
from rlcore.trainer.run import Run
from rlcore.utils.log import announce
from rlcore.utils.spans import Spans


def run_folder(cfg: Config) -> Path:
    return Path(cfg.run.dir) / (cfg.run.name or "run")


def assemble(cfg: Config, world: World) -> Run:
    """One rank's `Run`, restored from its newest checkpoint where there is one. What takes long to
    start (engine, reward children) starts first and gets ready while the learner is built."""
    hf = model_config(cfg)
    tokenizer = load_tokenizer(cfg.model.tokenizer or cfg.model.path, eos_ids=hf.eos_ids)
    sampling = sampling_of(cfg, tokenizer)
    scorer = make_scorer(cfg, world)
    engine = make_engine(cfg, hf, world)
    hub = make_hub(world, cfg.cluster.interface)
    agent = Agent(hub, engine, scorer, tokenizer.decode, cfg.rollout.deadline_s)
    rollout = Rollout(
        hub, agent, lambda: make_controller(cfg, world.size), timeout_s=cfg.cluster.timeout_s
    )
    learner = make_learner(cfg, hf, world)
    screen = None
    if world.rank == 0:
        screen = Screen(cfg.run.steps, progress=cfg.log.progress)
    run = Run(
        cfg=cfg,
        folder=run_folder(cfg),
        rank=world.rank,
        world_size=world.size,
        replicas=learner.replicas,
        dp_rank=learner.layout.dp_rank,
        algo=algos.module(cfg.select.algo),
        learner=learner,
        engine=engine,
        channel=ColocatedChannel(shared_memory=isinstance(engine, ChildEngine)),
        rollout=rollout,
        sampling=sampling,
        spans=Spans(listener=screen.phase if screen else None),
        screen=screen,
        on_close=[hub.close, scorer.close, engine.close, *([screen.close] if screen else [])],
    )
    if world.rank == 0:
        add_data(run, tokenizer)
    checkpoint = resume.choose(run)
    if checkpoint is not None:
        resume.load(run, checkpoint)
    if world.rank == 0:
        resolve.save(cfg, run.folder / "config.json")
        run.writer = MetricsWriter(
            run.folder, cfg.log.tensorboard, next_step=run.step + 1 if run.step else 0
        )
        run.on_close.append(run.writer.close)
    return run


def model_config(cfg: Config) -> HFConfig:
    """The start model's architecture, with --model.num_layers applied."""
    hf = HFConfig.from_folder(cfg.model.path)
    if cfg.model.num_layers:
        if not cfg.model.random_init:
            raise ValueError(
                f"--model.num_layers {cfg.model.num_layers}: only with --model.random_init, the "
                "folder's weights have all their layers"
            )
        hf = hf.with_(num_layers=cfg.model.num_layers)
    return hf


def sampling_of(cfg: Config, tokenizer: Tokenizer) -> Sampling:
    """How training samples are drawn."""
    r = cfg.rollout
    return Sampling(
        temperature=r.temperature,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        max_tokens=r.max_tokens,
        stop_ids=tuple(dict.fromkeys([*tokenizer.eos_ids, *r.stop_ids])),
    )


def make_scorer(cfg: Config, world: World) -> RewardService:
    return RewardService(
        cfg.select.reward,
        config=cfg.reward,
        workers=cfg.reward.workers,
        timeout_s=cfg.reward.timeout_s,
        on_error=cfg.reward.on_error,
        seed=cfg.run.seed,
        log_file=run_folder(cfg) / "logs" / f"reward{world.rank}.log",
    )


def make_engine(cfg: Config, hf: HFConfig, world: World) -> Engine:
    """This rank's sampler: in this process when it is alone, in a child process otherwise, so that
    an abort never waits for a decode and its death is not ours."""
    r = cfg.rollout
    options = {
        "dtype": cfg.model.dtype if r.dtype == "auto" else r.dtype,
        "seed": cfg.run.seed,
        "max_running": r.max_running,
        "cache_tokens": r.cache_tokens,
        "max_model_tokens": min(hf.max_positions, cfg.data.max_prompt_tokens + r.max_tokens),
        "threads": r.threads,
        "progress_s": r.progress_s,
        "decode_floor_ms": cfg.debug.decode_floor_ms,
        "rank": world.rank,
    }
    inline = r.process == "inline" or (r.process == "auto" and world.size == 1)
    announce(
        "engine", f"torch, {options['dtype']}, {'in this process' if inline else 'child process'}"
    )
    if inline:
        return TorchEngine(hf, device=world.device, **options)
    settings = {"config": hf.to_dict(), "device": str(world.device), **options}
    return ChildEngine(factory.NAME, settings, threads=r.threads, rank=world.rank)


def make_controller(cfg: Config, world_size: int) -> Controller:
    """One round's controller with the policies of --schedule."""
    return Controller(
        ranks=range(world_size),
        place=LeastLoaded(cfg.rollout.max_running),
        stop=All(),
        deadline_s=cfg.rollout.deadline_s,
    )


def total_updates(cfg: Config) -> int:
    samples = cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt
    return cfg.run.steps * cfg.train.epochs * (samples // (cfg.train.samples_per_update or samples))


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
        total_updates=total_updates(cfg),
        keep_reference=cfg.algo.kl_coef > 0,
    )


def add_data(run: Run, tokenizer: Tokenizer) -> None:
    """Prompts, their order, and the validation sets: rank 0 alone deals them out."""
    cfg = run.cfg
    train = prompts.load(cfg.data, "train", tokenizer, cfg.run.seed)
    sampler = EpochSampler(len(train) if train.is_finite else None, cfg.run.seed, cfg.data.shuffle)

    def next_rows(n: int) -> list[Prompt]:
        return [train[index] for _, index in sampler.next(n)]

    run.sampler = sampler
    run.source = EpochOrder(next_rows, cfg.rollout.samples_per_prompt)
    run.eval_sets = prompts.load(cfg.data, "val", tokenizer, cfg.run.seed)
    prompts.overlap(train, run.eval_sets)  # warns
