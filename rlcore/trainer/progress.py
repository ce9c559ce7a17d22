"""Small parts of a run: its ranks, the data on rank 0, how far it is, and where it reports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed import ProcessGroup

from rlcore.metrics.screen import Screen
from rlcore.metrics.sinks import MetricsWriter
from rlcore.records import Prompt
from rlcore.sched.balance import Balance
from rlcore.sched.roles import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This rank among the others."""

    rank: int
    size: int
    """Number of ranks of the run."""
    replicas: Sequence[Sequence[int]]
    """Global ranks of every data-parallel rank's model replica."""
    dp_rank: int
    """-1 on a rank that only samples."""
    everyone: ProcessGroup | None = None
    """Group of all ranks, if the default group has only the ranks that train or that sample."""

    @property
    def trains(self) -> bool:
        """Whether this rank has a learner; otherwise it only samples."""
        return self.dp_rank >= 0

    @property
    def leads_replica(self) -> bool:
        """Whether this is the first rank of its model replica: it alone counts its samples."""
        return self.replicas[self.dp_rank][0] == self.rank


class DataOrder(Protocol):
    """The resumable order of the training prompts; its state holds `num_rows` and `position`."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Prompts of a run; empty on all ranks but 0, which hands the prompts out."""

    order: DataOrder | None = None
    source: Source | None = None
    eval_sets: Sequence[tuple[str, Sequence[Prompt]]] = ()


class Progress:
    """How far a run is: steps done, version of the engines' weights, metrics of the open step."""

    def __init__(self) -> None:
        self.step = 0
        """Steps done, or under way."""
        self.version = 0
        """Version of the weights that the engines have."""
        self.metrics: dict[str, float] = {}
        """Metrics of the current step so far."""
        self.stops = False
        """All ranks know that this step is the last one of this process."""
        self._skipped: dict[str, int] = {}

    def begin(self, step: int) -> None:
        """Go to this step: the next one, or one that a checkpoint restored."""
        self.step = step

    def pushed(self, version: int) -> None:
        """Record that the engines get the weights of this version."""
        self.version = version

    def stop(self) -> None:
        """End the run after the current step."""
        self.stops = True

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the current step; the last value of a name counts."""
        self.metrics.update(metrics)

    def take(self) -> dict[str, float]:
        """Return the metrics of the step and begin with none."""
        found, self.metrics = self.metrics, {}
        return found

    def skipped(self, model: str, is_skipped: bool) -> int:
        """Note whether an update of `model` was skipped; return how many were in a row."""
        self._skipped[model] = self._skipped.get(model, 0) + 1 if is_skipped else 0
        return self._skipped[model]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """Where the metrics of a run go; empty on all ranks but 0."""

    writer: MetricsWriter | None = None
    screen: Screen | None = None
    balance: Balance | None = None
    """Proposes how many ranks sample, with --mode async."""
    on_step: Sequence[Callable[[dict[str, float]], None]] = ()
    """Called with the metrics of every step."""
    pieces: Callable[[Sequence[int]], list[str]] | None = None
    """Returns the text of each token."""
