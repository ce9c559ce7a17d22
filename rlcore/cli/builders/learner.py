"""Learner and critic of a rank that trains."""

from dataclasses import replace
from typing import TYPE_CHECKING

from rlcore import algos
from rlcore.cli.world import World
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig

if TYPE_CHECKING:  # Redis is for those that share their nodes
    pass


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
