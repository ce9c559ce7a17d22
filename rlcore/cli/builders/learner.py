"""Build the learner and critic of a rank that trains."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlcore.cli.builders.start import BuildContext
from rlcore.cli.world import World
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.mcore.layout import model_parallel_groups
from rlcore.protocols import Learner
from rlcore.trainer.policies import estimator
from rlcore.trainer.progress import Ranks

if TYPE_CHECKING:
    from rlcore.mcore.learner import MegatronLearner


def total_updates(cfg: Config, alone: int = 0) -> int:
    """Return the number of optimizer steps in the run. The first `alone` training steps, which
    train only the critic, are not counted."""
    samples = cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt
    rounds = max(cfg.run.steps - alone, 0)
    return rounds * cfg.train.epochs * (samples // (cfg.train.samples_per_update or samples))


def make_learner(cfg: Config, hf: HFConfig, world: World) -> "MegatronLearner":
    """Build the Megatron learner. Megatron is imported here, so that --help stays fast."""
    from rlcore.mcore.learner import MegatronLearner

    return MegatronLearner(
        hf,
        cfg.model,
        cfg.train,
        lora=cfg.lora,
        device=world.device,
        temperature=cfg.rollout.temperature,
        seed=cfg.run.seed,
        total_updates=total_updates(cfg, cfg.critic.warmup_steps if estimator(cfg) == "gae" else 0),
        keep_reference=cfg.algo.needs_reference,
        replays_routing=cfg.algo.routing_replay != "none",
        timeout_s=cfg.cluster.timeout_s,
    )


def make_critic(cfg: Config, hf: HFConfig, world: World) -> "MegatronLearner":
    """Build the value model, with the parallel layout of the learner."""
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
        moe_aux_loss_coef=0.0,
        moe_z_loss_coef=0.0,
        moe_bias_update_rate=0.0,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Learner and critic of one rank; both are None on a rank that only samples."""

    learner: "Learner | None" = None
    critic: "Learner | None" = None
    model_parallel_groups: Sequence[Sequence[int]]
    dp_rank: int = -1
    """Data-parallel rank; -1 on a rank that only samples."""

    def ranks(self, world: World) -> Ranks:
        """Return this rank's number, its data-parallel rank and its process groups."""
        return Ranks(
            rank=world.rank,
            size=world.size,
            model_parallel_groups=self.model_parallel_groups,
            dp_rank=self.dp_rank,
            everyone=world.everyone,
        )


def make_models(start: BuildContext) -> Models:
    """Build the learner, and also the critic if the advantage estimator needs one."""
    cfg, world = start.cfg, start.world
    layout = model_parallel_groups(cfg.train, world.train_ranks)
    if not world.trains:
        return Models(model_parallel_groups=layout)
    learner, critic = make_learner(cfg, start.hf, world), None
    start.on_close(learner.close)
    if estimator(cfg) == "gae":
        critic = make_critic(cfg, start.hf, world)
        start.on_close(critic.close)
    return Models(
        learner=learner,
        critic=critic,
        model_parallel_groups=layout,
        dp_rank=learner.layout.dp_rank,
    )
