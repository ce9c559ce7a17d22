"""What a loop works with: the parts of one rank of a run. Built by `cli/builders/`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rlcore.algos.kl import AdaptiveController
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.protocols import Engine, Learner
from rlcore.records import Sampling
from rlcore.rollout.flow import Flow
from rlcore.rollout.round import Rollout
from rlcore.trainer.device import Device
from rlcore.trainer.progress import Data, Observers, Progress, Ranks
from rlcore.trainer.resume import Checkpoints
from rlcore.utils.spans import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One rank of one run."""

    cfg: Config
    hf: HFConfig
    """Architecture of the model in training."""
    folder: Path
    ranks: Ranks
    algo: ModuleType
    kl: AdaptiveController
    """Scales the coefficients of the KL."""
    device: Device
    """Owns engine, learner and critic."""
    rollout: Rollout
    flow: Flow | None = None
    """Sampling beside training, with --mode async."""
    sampling: Sampling
    data: Data
    progress: Progress
    spans: Spans
    observers: Observers
    checkpoints: Checkpoints
    stop_requested: Callable[[], bool] = lambda: False
    """This rank got a SIGTERM."""
    on_done: Callable[[], None] = lambda: None
    """Called when nothing is left to do or to save."""
    close: Callable[[], None] = lambda: None
    """Ends what was started, last first. Safe to call twice."""

    @property
    def learner(self) -> Learner:
        """The actor in training, on a rank that trains."""
        learner = self.device.parts.learner
        assert learner is not None, "this rank only samples"
        return learner

    @property
    def critic(self) -> Learner | None:
        """The value model, if the advantages need one."""
        return self.device.parts.critic

    @property
    def engine(self) -> Engine | None:
        """This rank's engine, or its part of one over several ranks; None if it only trains."""
        return self.device.parts.engine

    @property
    def step(self) -> int:
        """Steps done, or under way."""
        return self.progress.step

    @property
    def trains_actor(self) -> bool:
        """Whether the critic is past its first steps, in which it learns alone."""
        return self.critic is None or self.step > self.cfg.critic.warmup_steps

    @property
    def num_updates(self) -> int:
        """Optimizer steps per rollout and epoch."""
        total = self.cfg.data.prompts_per_step * self.cfg.rollout.samples_per_prompt
        return total // (self.cfg.train.samples_per_update or total)
