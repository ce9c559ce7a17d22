"""Build the rollout parts of a rank: engine, rewards, worker, rounds, asynchronous rollout."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlcore.cli.builders.engine import make_engine, make_episodes, make_host
from rlcore.cli.builders.model import sampling_of
from rlcore.cli.builders.observers import of_agent, watch
from rlcore.cli.builders.prompts import is_chat, run_tokenizer
from rlcore.cli.builders.rewards import make_deadlines, make_scorer, own_judges
from rlcore.cli.builders.start import BuildContext
from rlcore.cli.world import make_hub
from rlcore.config import rules
from rlcore.config.schema import Config
from rlcore.envs import registry as envs
from rlcore.envs.dialogue import Dialogue
from rlcore.envs.scorer import EnvScorer
from rlcore.hf.tokenizer import Tokenizer
from rlcore.mcore.layout import layout_of
from rlcore.metrics.screen import Screen
from rlcore.protocols import Engine, Scorer
from rlcore.records import Sampling
from rlcore.rollout.async_rollout import AsyncRollout
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.exchange import StageLayers
from rlcore.rollout.histospec import HistoryStore
from rlcore.rollout.replay import EventLog, Recorder, controller_of
from rlcore.rollout.round import Heartbeat, Rollout
from rlcore.rollout.round_log import Log, Rounds
from rlcore.rollout.transport import Hub
from rlcore.rollout.worker import NoScorer, RolloutWorker
from rlcore.sched.prompt_source import EpochPrompts
from rlcore.sched.reward_timeout import AdaptiveTimeout
from rlcore.sched.roles import PromptSource
from rlcore.trainer.policies import make_async_controller
from rlcore.trainer.sizes import EngineSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSide:
    """Parts of one rank for sampling and scoring."""

    tokenizer: Tokenizer
    sampling: Sampling
    engine: Engine | None
    """Engine of this rank; None on a rank that only trains."""
    in_child: bool
    """Whether the engine runs in a child process."""
    hub: Hub
    worker: RolloutWorker
    rollout: Rollout
    deadlines: AdaptiveTimeout | None
    """Per-prompt timeouts of rewards; None if no reward has adaptive_timeout."""
    screen: Screen | None
    """Terminal output of rank 0; None on other ranks."""


def make_side(start: BuildContext, sizes: EngineSizes) -> SamplingSide:
    """Start engine and rewards of a rank, and connect the rank to the other ranks."""
    cfg, world = start.cfg, start.world
    tokenizer = run_tokenizer(cfg, start.hf.eos_ids)
    sampling, deadlines = sampling_of(cfg, tokenizer), make_deadlines(cfg)
    scorer: Scorer = NoScorer(deadlines)
    engine: Engine | None = None
    in_child = False
    if world.samples:
        scorer, engine, in_child = _make_sampler(start, tokenizer, deadlines, lambda: worker)
    hub = make_hub(world, cfg.cluster.interface, cfg.rollout.draft in rules.FROM_HISTORY)
    for part in (hub, scorer, engine):
        if part is not None:
            start.on_close(part.close)
    worker = RolloutWorker(
        hub,
        engine,
        scorer,
        tokenizer.decode,
        cfg.rollout.stall_timeout_s,
        cfg.cluster.timeout_s,
        cfg.debug.reward_barrier,
        is_endless=cfg.select.mode == "async",
        keep_sample=start.callbacks.keep_sample if start.callbacks is not None else None,
        observers=of_agent(start),
        stages=_stages(start),
    )
    screen = Screen(cfg.run.steps, progress=cfg.log.progress) if start.is_first else None
    if screen is not None:
        start.on_close(screen.close)
    only_sample = range(world.train_ranks, world.size)
    rollout = Rollout(
        hub,
        worker,
        sizes.make_controller,
        on_progress=screen.advance if screen is not None else None,
        rollout_ranks=only_sample,
        rounds=_make_rounds(start) if start.is_first else None,
        library=_make_library(cfg) if start.is_first else None,
    )
    start.spans.listen(watch(start, screen, Heartbeat(hub, only_sample)))
    return SamplingSide(
        tokenizer=tokenizer,
        sampling=sampling,
        engine=engine,
        in_child=in_child,
        hub=hub,
        worker=worker,
        rollout=rollout,
        deadlines=deadlines,
        screen=screen,
    )


def _stages(start: BuildContext) -> StageLayers | None:
    """Return the layers whose routes each train rank gets; None: samples come whole."""
    cfg, ranks, count = start.cfg, start.world.train_ranks, start.hf.num_layers
    # A record of the run has whole samples, which one rank of a model-parallel group writes.
    if cfg.algo.routing_replay != "rollout" or cfg.train.pp == 1 or cfg.debug.record:
        return None
    layers = [layout_of(cfg.train, ranks, rank).stage_layers(count) for rank in range(ranks)]
    return StageLayers(count, layers.__getitem__)


def _make_sampler(
    start: BuildContext,
    tokenizer: Tokenizer,
    deadlines: AdaptiveTimeout | None,
    worker: Callable[[], RolloutWorker],
) -> tuple[Scorer, Engine, bool]:
    """Return rewards and engine of a rank that samples, and whether the engine is a child process.
    `worker` returns the rank's worker, which is built later and knows a round's prompts."""
    cfg, world = start.cfg, start.world
    engine = make_engine(cfg, start.hf, world)
    if own_judges(cfg):  # the engine sizes its cache by free memory, which a judge would take
        engine.is_starting(cfg.cluster.timeout_s)
    rewards = make_scorer(cfg, world, deadlines)
    in_child = isinstance(engine, ChildEngine)
    if not cfg.select.env:
        assert rewards is not None
        return rewards, engine, in_child
    shown = Dialogue(
        tokenizer,
        is_chat=is_chat(cfg),
        num_tokens=start.hf.vocab_size,
        tools=envs.tools_of(cfg.select.env, cfg.env),
    )
    episodes = make_episodes(
        cfg,
        world,
        engine,
        shown,
        tokenizer.decode,
        lambda group: worker().prompts[group],
        make_host(cfg, start.hf, world, tokenizer),
    )
    return EnvScorer(episodes.outcomes, rewards), episodes, in_child


def _make_rounds(start: BuildContext) -> Rounds:
    """Return the log of this run's rounds, which also replays the log of --debug.replay."""
    debug, replay = start.cfg.debug, None
    if debug.replay and start.cfg.select.mode != "async":
        replay = Log(Path(debug.replay))
    progress = start.progress
    rounds = Rounds(
        start.folder,
        seed=start.cfg.run.seed,
        step=lambda: progress.step,
        replay=replay,
        writes=start.writes,
    )
    start.on_close(rounds.close)
    return rounds


def _make_library(cfg: Config) -> HistoryStore | None:
    """Return the store of earlier responses; None if --rollout.draft does not use them."""
    if cfg.rollout.draft not in rules.FROM_HISTORY:
        return None
    return HistoryStore(max_tokens=cfg.draft.max_history_tokens, epochs=cfg.draft.history_epochs)


def make_async_rollout(
    start: BuildContext, side: SamplingSide, source: PromptSource | None
) -> AsyncRollout:
    """Return this rank's part of the asynchronous rollout (--mode async). `source` is the prompt
    source on rank 0, which runs the controller, and None on other ranks."""
    cfg, world, sampling = start.cfg, start.world, side.sampling
    controller, log_ = None, None
    rollout_ranks = range(world.train_ranks, world.size)
    if cfg.debug.replay and world.trains:
        log_ = EventLog(Path(cfg.debug.replay), cfg.run.seed)
    if source is not None:
        assert isinstance(source, EpochPrompts), (
            "--mode async needs EpochPrompts, which issues single prompts"
        )
        order = source
        controller = make_async_controller(
            cfg, world.size, lambda count: order.issue(count, sampling), controller_of(log_)
        )
    record = None
    if cfg.debug.record and world.trains:
        record = Recorder(start.folder, cfg.run.seed, start.writes)
    async_rollout = AsyncRollout(
        side.hub,
        side.worker,
        controller,
        rollout_ranks=rollout_ranks,
        deadline_s=cfg.rollout.stall_timeout_s,
        record=record,
        replay=log_,
        library=side.rollout.library,
    )
    start.on_close(async_rollout.close)
    return async_rollout
