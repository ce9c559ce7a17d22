"""What a loop works with: everything that one rank of a run holds. Built by `cli/assemble.py`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed import ProcessGroup

from rlcore.algos.kl import AdaptiveController
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.metrics.screen import Screen
from rlcore.metrics.sinks import MetricsWriter
from rlcore.protocols import Engine, Learner, PhaseGate, WeightChannel
from rlcore.records import Prompt, Sampling
from rlcore.rollout.flow import Flow
from rlcore.rollout.round import Rollout
from rlcore.sched.balance import Balance
from rlcore.sched.reward import AdaptiveTimeout
from rlcore.sched.roles import Elastic, Source
from rlcore.sync.shelf import Shelf
from rlcore.trainer.memory import Residency
from rlcore.utils.spans import Spans

if TYPE_CHECKING:
    from rlcore.trainer.relayout import Relayout
    from rlcore.trainer.turns import Leaver


class Sampler(Protocol):
    """The resumable order of the training prompts; its state holds `num_rows` and `position`."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(kw_only=True)
class Run:
    """One rank of one run. `source`, `balance`, `elastic`, `sampler`, `eval_sets`, `writer` and
    `screen` are rank 0's alone, which always trains."""

    cfg: Config
    hf: HFConfig
    """Of the model in training."""
    folder: Path
    rank: int
    world_size: int
    replicas: Sequence[Sequence[int]]
    """Global ranks of every data-parallel rank's model replica."""
    dp_rank: int
    """-1 on a rank that only samples."""
    algo: ModuleType
    learner: Learner | None
    """None on a rank that only samples."""
    engine: Engine | None
    """This rank's engine, or its part of one over `engine_ranks`; None on a rank that only
    trains."""
    channel: WeightChannel
    rollout: Rollout
    flow: Flow | None = None
    """Sampling beside training, with --mode async."""
    sampling: Sampling
    spans: Spans
    everyone: ProcessGroup | None = None
    """Of all ranks, where the default group is that of the ranks that train, or of those that
    sample."""
    critic: Learner | None = None
    """The value model, where the advantages need one."""
    kl: AdaptiveController = field(default_factory=lambda: AdaptiveController(0.0, 1))
    """Scales the KL's coefficients."""
    deadlines: AdaptiveTimeout | None = None
    """Of rewards, where they adapt to prompts."""
    engine_ranks: Sequence[int] = ()
    relayout: "Relayout | None" = None
    """Where the engines may change their size between steps."""
    gate: PhaseGate | None = None
    """Where other jobs have the same nodes: phases wait for their turn."""
    shelf: Shelf | None = None
    """With `gate`, on a rank that samples: the weights while its engine is away."""
    leaver: "Leaver | None" = None
    """With `gate`, where the tail of a rollout may leave this rank's node."""
    memory: Residency | None = None
    """Measures at every switch of the device between engine and learner."""
    balance: Balance | None = None
    """Proposes how many ranks sample, with --mode async."""
    source: Source | None = None
    elastic: Elastic | None = None
    """Which ranks train before a round is over, with --mode stream."""
    sampler: Sampler | None = None
    eval_sets: Sequence[tuple[str, Sequence[Prompt]]] = ()
    writer: MetricsWriter | None = None
    screen: Screen | None = None
    pieces: Callable[[Sequence[int]], list[str]] | None = None
    """The text of each token, on rank 0."""
    step: int = 0
    """Steps done."""
    version: int = 0
    """Of the weights that the engines have."""
    pending: dict[str, float] = field(default_factory=dict)
    """Metrics of the current step so far."""
    on_step: list[Callable[[dict[str, float]], None]] = field(default_factory=list)
    """On rank 0: hear the metrics of every step."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Updates of each model in a row that were left out, since they were not finite."""
    told_to_end: Callable[[], bool] = lambda: False
    """This rank has heard a SIGTERM."""
    ends: bool = False
    """All ranks know that this step is the last one of this process."""
    on_done: Callable[[], None] = lambda: None
    """Hears that nothing is left to do or to save."""
    on_close: list[Callable[[], None]] = field(default_factory=list)

    @property
    def learners(self) -> list[Learner]:
        """Every model in training."""
        return [model for model in (self.learner, self.critic) if model is not None]

    @property
    def trains(self) -> bool:
        """This rank has a learner; else it only samples."""
        return self.learner is not None

    @property
    def trains_actor(self) -> bool:
        """The critic is past its first steps, in which it learns alone."""
        return self.critic is None or self.step > self.cfg.critic.warmup_steps

    @property
    def is_last_step(self) -> bool:
        """This process does no step after this one."""
        return self.ends or self.step >= self.cfg.run.steps

    @property
    def leads_replica(self) -> bool:
        """The first of the ranks that hold the same samples: it alone counts them."""
        return self.replicas[self.dp_rank][0] == self.rank

    @property
    def num_updates(self) -> int:
        """Optimizer steps per rollout and epoch."""
        total = self.cfg.data.prompts_per_step * self.cfg.rollout.samples_per_prompt
        return total // (self.cfg.train.samples_per_update or total)

    def close(self) -> None:
        """End what was started, last first."""
        for close in reversed(self.on_close):
            close()
        self.on_close.clear()
