"""Choose the tensor-parallel size of the rollout engines for each round. RollPacker, arXiv
2509.21009.

If a round has over 5 % more preemptions than the previous round, the KV caches are too small: the
ranks per engine are doubled, up to one node. After four rounds without preemption, the ranks per
engine are halved, so that twice as many engines decode more requests in parallel.

Differences from the paper: short and long rounds have separate sizes and histories, because a
change between the kinds would look like a rise. Engines with nearly full KV caches are not halved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlcore.utils.errors import ConfigError

RISE = 1.05
"""Ratio of a round's preemptions to the previous round's above which the engine size is doubled."""
CALM_ROUNDS = 4
"""Number of rounds without preemption after which the engine size is halved."""
FULL = 0.9
"""Share of the KV cache in use above which the engine size is not halved."""


@dataclass(slots=True)
class _RoundKind:
    """State for one kind of round, such as short or long."""

    tp: int
    before: int | None = None
    """Number of preemptions in the previous round; None before the first round."""
    calm: int = 0

    def end_round(self, preemptions: int) -> int | None:
        """Record the preemptions of a round. Return the previous round's preemptions, or None after
        the first round."""
        before, self.before = self.before, preemptions
        self.calm = 0 if preemptions else self.calm + 1
        return before

    def resize(self, tp: int) -> None:
        """Set the engine size and reset the count of rounds without preemption."""
        self.tp, self.calm = tp, 0


class TPPlanner:
    """Policy that doubles or halves the tensor-parallel size of the engines between rounds."""

    def __init__(
        self, tp: int, max_tp: int, sizes: Mapping[str, int] | None = None, *, min_tp: int = 1
    ) -> None:
        """
        Args:
            tp: initial size, such as the best of `python -m rlcore profile`.
            max_tp: ranks of a node, or fewer if the model's heads cannot be divided further.
            sizes: initial sizes by kind of round, if different from `tp`.
            min_tp: smallest size with enough memory for weights and KV cache.

        Raises:
            ValueError: a size is not a power of two, too small or too large.
        """
        for name, size in {"tp": tp, **(sizes or {})}.items():
            if size < min_tp or size > max_tp or size & (size - 1):
                raise ValueError(f"{name} {size}: must be a power of two from {min_tp} to {max_tp}")
        self._tp, self._max, self._min = tp, max_tp, min_tp
        self._kinds = {kind: _RoundKind(size) for kind, size in (sizes or {}).items()}

    def size(self, kind: str) -> int:
        """Return the tensor-parallel size for the next round of this kind."""
        return self._of(kind).tp

    def after(self, kind: str, preemptions: int, cache_used: float = 0.0) -> int:
        """Record the end of a round, and return the size for the next round of this kind.

        Args:
            preemptions: number of preemptions, summed over all engines.
            cache_used: peak share of the KV cache in use, maximum over engines.
        """
        now = self._of(kind)
        before = now.end_round(preemptions)
        if before is not None and preemptions > RISE * before and 2 * now.tp <= self._max:
            now.resize(2 * now.tp)
        elif now.calm >= CALM_ROUNDS and now.tp > self._min and cache_used <= FULL:
            now.resize(now.tp // 2)
        return now.tp

    def _of(self, kind: str) -> _RoundKind:
        return self._kinds.setdefault(kind, _RoundKind(self._tp))

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain JSON."""
        return {kind: asdict(known) for kind, known in self._kinds.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a saved `state`. If this run does not allow one of its sizes, raise ConfigError."""
        found = {kind: _RoundKind(**known) for kind, known in state.items()}
        for kind, known in found.items():
            if not self._min <= known.tp <= self._max:
                raise ConfigError(
                    f"the checkpoint has engines of {known.tp} ranks for {kind} rounds, but this "
                    f"run allows {self._min} to {self._max}; resume on similar nodes, or start a "
                    "new run from the checkpoint's weights"
                )
        self._kinds = found


class FixedSizes:
    """Policy that takes each round's tensor-parallel size from a fixed list, for tests. All rounds
    after the end of the list have the last size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self._rounds = tuple(sizes), 0

    def size(self, kind: str) -> int:
        return self._sizes[min(self._rounds, len(self._sizes) - 1)]

    def after(self, kind: str, preemptions: int, cache_used: float = 0.0) -> None:
        self._rounds += 1

    def state(self) -> dict[str, Any]:
        return {"rounds": self._rounds}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rounds = state["rounds"]
