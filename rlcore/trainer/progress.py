"""Define small parts of a run: its ranks, its data on rank 0, its progress, and its observers."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed import ProcessGroup

from rlcore.data.conversations import Demonstration
from rlcore.hf.tokenizer import Tokenizer
from rlcore.metrics.screen import Screen
from rlcore.metrics.sinks import MetricsWriter
from rlcore.records import Prompt
from rlcore.sched.balance import Balance
from rlcore.sched.roles import PromptSource
from rlcore.trainer.callbacks import Callbacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Position of this rank in the run."""

    rank: int
    size: int
    """Number of ranks of the run."""
    model_parallel_groups: Sequence[Sequence[int]]
    """Global ranks of the model-parallel group of each data-parallel rank."""
    dp_rank: int
    """Data-parallel rank; -1 on a rank that only samples."""
    everyone: ProcessGroup | None = None
    """Group of all ranks; None if the default group already contains them all."""

    @property
    def trains(self) -> bool:
        """Whether this rank has a learner; otherwise it only samples."""
        return self.dp_rank >= 0

    @property
    def leads_model_parallel_group(self) -> bool:
        """Whether this is the first rank of its model-parallel group. Only this rank counts the
        group's samples."""
        return self.model_parallel_groups[self.dp_rank][0] == self.rank


class DataOrder(Protocol):
    """Order of the training prompts. Checkpoints save its state: `num_rows`, `position`, ..."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Prompts of a run. Only rank 0 has prompts and distributes them; empty on other ranks."""

    order: DataOrder | None = None
    source: PromptSource | None = None
    eval_sets: Sequence[tuple[str, Sequence[Prompt]]] = ()
    demonstrations: Sequence[Demonstration] = ()
    """Rows that are trained beside the samples (--data.demonstrations)."""


class Progress:
    """Progress of a run: current step, version of the engines' weights, metrics of the step."""

    def __init__(self) -> None:
        self.step = 0
        """Number of the current or most recent step; 0 before the first step."""
        self.version = 0
        """Version of the engines' weights."""
        self.metrics: dict[str, float] = {}
        """Metrics of the current step so far."""
        self.advantages: dict[str, float] = {}
        """Advantages of the current step by sample id, if each is one number."""
        self.stops = False
        """Whether this step is the last one of this process; the same on all ranks."""
        self.is_complete = False
        """Whether the run ends before --run.steps because a callback has asked for it."""
        self._skipped: dict[str, int] = {}
        self._save_is_due = False
        self._saved_at = time.monotonic()

    def begin(self, step: int) -> None:
        """Set the current step, at the start of a step or when a checkpoint is restored."""
        self.step, self.advantages = step, {}

    def sent_weights(self, version: int) -> None:
        """Record that the engines get the weights of this version."""
        self.version = version

    def stop(self, *, is_complete: bool = False) -> None:
        """End the run after the current step, which completes the run if `is_complete`."""
        self.stops, self.is_complete = True, is_complete

    @property
    def save_is_due(self) -> bool:
        """Whether this step ends with a checkpoint for the time since the last; the same on all
        ranks."""
        return self._save_is_due

    def save_is_late(self, minutes: float) -> bool:
        """Return whether the last checkpoint, or the start, was that long ago; 0: never."""
        return bool(minutes) and time.monotonic() - self._saved_at > 60 * minutes

    def request_save(self) -> None:
        """End the current step with a checkpoint."""
        self._save_is_due = True

    def begin_save(self) -> None:
        """Record that a checkpoint is being written."""
        self._save_is_due, self._saved_at = False, time.monotonic()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the current step; a later value of a name replaces an earlier one."""
        self.metrics.update(metrics)

    def add_advantages(self, advantages: Mapping[str, float]) -> None:
        """Add advantages of samples to the current step, for the log of rollouts."""
        self.advantages.update(advantages)

    def take(self) -> dict[str, float]:
        """Return the metrics of the step and clear them."""
        found, self.metrics = self.metrics, {}
        return found

    def skipped(self, model: str, is_skipped: bool) -> int:
        """Record whether an update of `model` was skipped. Return the number of skips in a row."""
        self._skipped[model] = self._skipped.get(model, 0) + 1 if is_skipped else 0
        return self._skipped[model]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """Receivers of the metrics of a run, on rank 0; the other ranks have the tokenizer alone."""

    writer: MetricsWriter | None = None
    screen: Screen | None = None
    balance: Balance | None = None
    """Predictor of the best number of rollout ranks, with --mode async."""
    callbacks: Callbacks | None = None
    """The user's callbacks; None if there are none."""
    on_step: Sequence[Callable[[dict[str, float]], None]] = ()
    """Functions called with the metrics of every step."""
    tokenizer: Tokenizer | None = None
    """Tokenizer of the run, for the log of rollouts."""
