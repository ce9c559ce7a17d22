"""Who trains while others still decode. RollPacker's stream trainer, arXiv
2509.21009, Algorithm 1.

Towards the end of a round few responses are left and most of an engine's batch is empty. Then half
of the replicas hand their live requests to the others, which go on from the tokens that there are,
and train the groups that are complete. Every sample of the step is trained once, from the weights
of the step, and the gradient is a sum: when it is added up does not matter.

Half of the replicas is the last half of the cells, rank 0's excluded. It is asked first when 20 %
of the responses are done, then every 5 % up to 50 %, and waits until what is left fits into those
that stay: as many requests as they decode at a time, and in their caches

    sum over live requests of  prompt + min(E[length | length > tokens so far], max_tokens)

with the lengths of responses that have ended, in this and earlier rounds; a request is taken to be
as long as it may be while none was longer.

Differs from the paper: it asks for the caches alone. Requests that wait for a place would make the
round longer than the training that it hides.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate

from rlcore.sched.roles import Cell, GroupState, Live
from rlcore.utils.errors import ConfigError

HISTORY = 8192
"""Lengths that are remembered."""


class Lengths:
    """How long responses get, from those that have ended."""

    def __init__(self, history: int = HISTORY) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None
        self._history = history

    def add(self, length: int) -> None:
        """One more has ended; the oldest is forgotten."""
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > self._history:
            old = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, old) - 1]
        self._sums = None

    def mean_above(self, length: int) -> float | None:
        """Mean of those longer than `length`; None where there is none."""
        at = bisect_right(self._sorted, length)
        if at == len(self._sorted):
            return None
        if self._sums is None:
            self._sums = [0, *accumulate(self._sorted)]
        return (self._sums[-1] - self._sums[at]) / (len(self._sorted) - at)


class StreamWindow:
    """The policy of Algorithm 1."""

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        cache_tokens: float,
        max_running: int,
        batch_tokens: int,
        first: float,
        last: float,
        every: float,
        lengths: Lengths | None = None,
    ) -> None:
        """
        Args:
            cells: as from `cells`.
            cache_tokens: that one engine's cache holds.
            max_running: requests that one engine decodes at a time.
            batch_tokens: that a model replica trains at a time, roughly.
            first, last: shares of the responses done between which replicas may be released.
            every: steps between, at which that is asked.
            lengths: of responses that have ended before.

        Raises:
            ValueError: there is one cell, which cannot decode and train at once.
        """
        if len(cells) < 2:
            raise ConfigError(
                "--mode stream: half of the replicas train while the others decode, and here all "
                "ranks are one engine or one model replica; start more ranks, or take --mode sync"
            )
        ordered = sorted(cells, key=lambda c: min(c.ranks))
        self._half = ordered[len(ordered) - len(ordered) // 2 :]
        self._cache_tokens, self._max_running = cache_tokens, max_running
        self._batch_tokens = batch_tokens
        self._first, self._last, self._every = first, last, every
        self.lengths = lengths or Lengths()
        self.start()

    def start(self) -> None:
        self._asked_at = 0.0
        self._has_released = False

    def finished(self, num_tokens: int) -> None:
        self.lengths.add(num_tokens)

    def release(
        self, done: int, wanted: int, live: Callable[[], Iterable[Live]], up: Collection[int]
    ) -> Sequence[Cell]:
        share = done / max(wanted, 1)
        if self._has_released or not self._first <= share <= self._last:
            return ()
        if share - self._asked_at < self._every - 1e-9:
            return ()
        self._asked_at = share
        leaving = {leader for cell in self._half for leader in cell.leaders}
        stay = [leader for leader in up if leader not in leaving]
        left = list(live())
        if not stay or len(left) > self._max_running * len(stay):
            return ()
        if self._peak_tokens(left) > self._cache_tokens * len(stay):
            return ()
        self._has_released = True
        return self._half

    def take(self, ready: Sequence[GroupState], cell: Cell) -> int:
        """As many as fill a micro-batch of every model replica, at least one for each."""
        room, least, tokens = self._batch_tokens * len(cell.dp_ranks), len(cell.dp_ranks), 0
        for n, group in enumerate(ready):
            prompt = len(group.work.prompt.tokens)
            tokens += sum(prompt + r.num_tokens for r in group.counted)
            if tokens > room and n >= least:
                return n
        return len(ready)

    def left(self, rank: int) -> None:
        raise AssertionError("whoever stops decoding trains")

    def _peak_tokens(self, live: Iterable[Live]) -> float:
        total = 0.0
        for request in live:
            mean = self.lengths.mean_above(request.length)
            total += request.prompt + min(request.limit if mean is None else mean, request.limit)
        return total


def cells(
    engines: Sequence[Sequence[int]],
    replicas: Sequence[Sequence[int]],
    lockstep: Sequence[Sequence[int]] = (),
) -> list[Cell]:
    """The finest partition of the ranks in which every engine and every model replica is whole.

    Args:
        engines: ranks of each engine, of which the first leads.
        replicas: ranks of each model replica, by data-parallel rank.
        lockstep: further sets of ranks that only train together (those that share experts).
    """
    of: dict[int, set[int]] = {}
    for together in (*engines, *replicas, *lockstep):
        merged = set(together).union(*(of.get(r, ()) for r in together))
        for rank in merged:
            of[rank] = merged
    found = {min(ranks): ranks for ranks in of.values()}
    return [
        Cell(
            ranks=tuple(sorted(ranks)),
            leaders=tuple(e[0] for e in engines if e[0] in ranks),
            dp_ranks=tuple(d for d, ranks_of in enumerate(replicas) if ranks_of[0] in ranks),
        )
        for _, ranks in sorted(found.items())
    ]
