"""Tensor-parallel size of the rollout engines, and everything that follows from it.

    1 engine over 2 ranks          2 engines over 1 rank each
    [ rank 0   rank 1 ]    <->     [ rank 0 ] [ rank 1 ]

Rank 0's policy (`sched/planner.py`) chooses the size of the next round. Before the push, every rank
ends its engine and starts its share of one of the new size (`device.py`). Samples do not depend on
the layout, except for rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlcore.rollout.controller import Controller
from rlcore.sched.roles import Elastic, Kind, Sizes, Stop
from rlcore.trainer.memory import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """What follows from the tensor-parallel size of the engines, on one rank."""

    tp: int
    engine_ranks: Sequence[int]
    """Ranks that this rank's engine spans, the first one leads; none on a rank that only trains."""
    controller: Callable[[Stop, Elastic | None], Controller]
    """Makes the controller of one round."""
    elastic: Elastic | None = None
    """Which ranks leave decoding before a round is over, on rank 0."""
    plan: Plan | None = None
    """Memory plan of this rank."""


class EngineSizes:
    """The size that the engines have now, and the policy that changes it."""

    def __init__(self, sized: Callable[[int], Sized], tp: int, policy: Sizes | None = None) -> None:
        """
        Args:
            sized: returns what follows from a size.
            policy: chooses the size of every round; on rank 0, if the size may change.
        """
        self._sized, self.policy = sized, policy
        self.now = sized(tp)

    def make_controller(self, stop: Stop, elastic: Elastic | None) -> Controller:
        """Return the controller of one round over the engines of the current size."""
        return self.now.controller(stop, elastic)

    def change(self, tp: int) -> None:
        """From now on the engines have this size. Not collective; starts nothing."""
        self.now = self._sized(tp)

    def observe(self, kind: Kind, preemptions: int, cache_used: float) -> None:
        """Tell the policy how a round of this kind went."""
        if self.policy is not None:
            self.policy.after(kind, preemptions, cache_used)
