"""The tensor-parallel size of the rollout engines, from round to round. RollPacker, arXiv
2509.21009.

More preemptions than in the round before: the caches are too small, so engines of twice the ranks
take over, up to those of a node. Four rounds without any: engines of half the ranks, of which there
are twice as many, decode more side by side.

Differs from the paper: short and long rounds have a size and a history of their own, since they
alternate and the change from one to the other would look like a sudden rise; and engines that are
nearly full are not halved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlcore.utils.errors import ConfigError

RISE = 1.05
"""Preemptions over those of the round before that count as more."""
CALM_ROUNDS = 4
"""Rounds without a preemption before engines are halved."""
FULL = 0.9
"""Share of the cache in use above which they are not."""


@dataclass(slots=True)
class _Kind:
    """What is known of the rounds of one kind."""

    tp: int
    before: int | None = None
    """Preemptions of its last round."""
    calm: int = 0

    def end_round(self, preemptions: int) -> int | None:
        """Note the preemptions of a round. Returns those of the round before; None: there was
        none."""
        before, self.before = self.before, preemptions
        self.calm = 0 if preemptions else self.calm + 1
        return before

    def resize(self, tp: int) -> None:
        """Take another size, and count the calm rounds from there."""
        self.tp, self.calm = tp, 0


class TPPlanner:
    """Grows and shrinks by factors of two, between rounds."""

    def __init__(
        self, tp: int, max_tp: int, sizes: Mapping[str, int] | None = None, *, min_tp: int = 1
    ) -> None:
        """
        Args:
            tp: the size at the start, such as the best of `python -m rlcore profile`.
            max_tp: ranks of a node, or fewer where the model's heads do not divide further.
            sizes: sizes of kinds of rounds that start with another one.
            min_tp: the smallest whose memory holds the weights and a cache.

        Raises:
            ValueError: a size is no power of two, too small or too large.
        """
        for name, size in {"tp": tp, **(sizes or {})}.items():
            if size < min_tp or size > max_tp or size & (size - 1):
                raise ValueError(
                    f"{name} {size}: a power of two, at least {min_tp} and at most {max_tp}"
                )
        self._tp, self._max, self._min = tp, max_tp, min_tp
        self._kinds = {kind: _Kind(size) for kind, size in (sizes or {}).items()}

    def size(self, kind: str) -> int:
        """For the next round of this kind."""
        return self._of(kind).tp

    def after(self, kind: str, preemptions: int, cache_used: float = 0.0) -> int:
        """A round is over: the size for the next one of its kind.

        Args:
            preemptions: of all engines.
            cache_used: the largest share of its cache that an engine had in use.
        """
        now = self._of(kind)
        before = now.end_round(preemptions)
        if before is not None and preemptions > RISE * before and 2 * now.tp <= self._max:
            now.resize(2 * now.tp)
        elif now.calm >= CALM_ROUNDS and now.tp > self._min and cache_used <= FULL:
            now.resize(now.tp // 2)
        return now.tp

    def _of(self, kind: str) -> _Kind:
        return self._kinds.setdefault(kind, _Kind(self._tp))

    def state(self) -> dict[str, Any]:
        """What `restore` needs; plain JSON."""
        return {kind: asdict(known) for kind, known in self._kinds.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. ValueError where a size does not fit this machine."""
        found = {kind: _Kind(**known) for kind, known in state.items()}
        for kind, known in found.items():
            if not self._min <= known.tp <= self._max:
                raise ConfigError(
                    f"the checkpoint has engines of {known.tp} ranks for {kind} rounds, here they "
                    f"may have {self._min} to {self._max}; resume on nodes like those before, or "
                    "start a new run from the checkpoint's weights"
                )
        self._kinds = found


class Listed:
    """Sizes by step, for tests: the last one holds from then on."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self._rounds = tuple(sizes), 0

    def size(self, kind: str) -> int:
        """For the next round."""
        return self._sizes[min(self._rounds, len(self._sizes) - 1)]

    def after(self, kind: str, preemptions: int, cache_used: float = 0.0) -> None:
        """A round is over."""
        self._rounds += 1

    def state(self) -> dict[str, Any]:
        """What `restore` needs; plain JSON."""
        return {"rounds": self._rounds}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._rounds = state["rounds"]
