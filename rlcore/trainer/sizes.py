"""Hold the tensor-parallel size of the rollout engines, and the objects that depend on this size.

    1 engine over 2 ranks          2 engines over 1 rank each
    [ rank 0   rank 1 ]    <->     [ rank 0 ] [ rank 1 ]

On rank 0, a policy (`sched/planner.py`) chooses the size for the next rollout. Before the weight
update, every rank stops its engine and starts its share of an engine of the new size (`device.py`).
Samples do not depend on the layout, except for rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlcore.rollout.controller import Controller
from rlcore.sched.roles import Elastic, EngineSizePolicy, Kind, Stop
from rlcore.trainer.memory import MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """Objects of one rank that depend on the tensor-parallel size of the engines."""

    tp: int
    engine_ranks: Sequence[int]
    """Ranks of this rank's engine; the first rank leads. Empty on a rank that only trains."""
    controller: Callable[[Stop, Elastic | None], Controller]
    """Function that makes the controller of one rollout."""
    elastic: Elastic | None = None
    """Policy that chooses ranks to stop decoding before a rollout is over, on rank 0."""
    plan: MemoryPlan | None = None
    """Memory plan of this rank."""


class EngineSizes:
    """Current size of the engines, and the policy that changes it."""

    def __init__(
        self, sized: Callable[[int], Sized], tp: int, policy: EngineSizePolicy | None = None
    ) -> None:
        """
        Args:
            sized: function that returns the objects for a given engine size.
            policy: policy that chooses every rollout's size, on rank 0; None: the size is fixed.
        """
        self._sized, self.policy = sized, policy
        self.now = sized(tp)

    def make_controller(self, stop: Stop, elastic: Elastic | None) -> Controller:
        """Make the controller of one rollout over the engines of the current size."""
        return self.now.controller(stop, elastic)

    def change(self, tp: int) -> None:
        """Record the new size of the engines. Starts no engine and is not collective."""
        self.now = self._sized(tp)

    def observe(self, kind: Kind, preemptions: int, cache_used: float) -> None:
        """Report the kind, preemptions and cache use of a rollout to the policy."""
        if self.policy is not None:
            self.policy.after(kind, preemptions, cache_used)
