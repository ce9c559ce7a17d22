"""Hold the parts of one rank of a run for the training loops; `cli/builders/` makes the parts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rlcore.algos.kl import AdaptiveController
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.protocols import Engine, Learner
from rlcore.records import Sampling
from rlcore.rollout.async_rollout import AsyncRollout
from rlcore.rollout.round import Rollout
from rlcore.teacher.teachers import Teachers
from rlcore.trainer.device import Device
from rlcore.trainer.progress import Data, Observers, Progress, Ranks
from rlcore.trainer.resume import Checkpoints
from rlcore.utils.spans import Spans


@dataclass(frozen=True, kw_only=True)
class Training:
    """Parts of one rank that any training needs, with or without sampling."""

    cfg: Config
    hf: HFConfig
    """Architecture of the model in training."""
    folder: Path
    ranks: Ranks
    data: Data
    progress: Progress
    spans: Spans
    observers: Observers
    checkpoints: Checkpoints
    stop_requested: Callable[[], bool] = lambda: False
    """Function that returns whether this rank has received a SIGTERM."""
    on_done: Callable[[], None] = lambda: None
    """Function called when all steps and saves are done."""
    close: Callable[[], None] = lambda: None
    """Function that stops all parts in reverse order of their start. Idempotent."""

    @property
    def step(self) -> int:
        """Number of the current or most recent step; 0 before the first step."""
        return self.progress.step


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    """All parts of one rank of a run."""

    algo: ModuleType
    kl: AdaptiveController
    """Adaptive controller that scales the KL coefficients."""
    device: Device
    """Device that moves engine, learner and critic on and off the accelerator."""
    rollout: Rollout
    async_rollout: AsyncRollout | None = None
    """Asynchronous sampling, with --mode async; None in other modes."""
    sampling: Sampling
    teachers: Teachers | None = None
    """Teachers of distillation; None without any, and on a rank that only samples."""

    @property
    def learner(self) -> Learner:
        """Actor in training. Only train ranks may read this property."""
        learner = self.device.parts.learner
        assert learner is not None, "rollout ranks have no learner"
        return learner

    @property
    def critic(self) -> Learner | None:
        """Value model of the advantage estimator; None if the estimator needs no values."""
        return self.device.parts.critic

    @property
    def engine(self) -> Engine | None:
        """This rank's engine, or its part of a multi-rank engine; None if the rank only trains."""
        return self.device.parts.engine

    @property
    def trains_actor(self) -> bool:
        """Whether this step trains the actor; the first `critic.warmup_steps` steps do not."""
        return self.critic is None or self.step > self.cfg.critic.warmup_steps

    @property
    def num_updates(self) -> int:
        """Number of optimizer steps per rollout and epoch."""
        total = self.cfg.data.prompts_per_step * self.cfg.rollout.samples_per_prompt
        return total // (self.cfg.train.samples_per_update or total)
