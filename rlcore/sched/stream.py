"""Release engines early, so that their ranks train while other engines still decode: RollPacker's
stream trainer, arXiv 2509.21009, Algorithm 1.

Towards the end of a round few responses are unfinished and most of an engine's batch is empty. Then
half of the engines pass their unfinished requests to the other engines, which continue from the
tokens decoded so far. The released ranks train on the complete groups. Every sample of the step is
trained on once, with the weights of the step. Gradients are summed, so the order does not matter.

A cell is a set of ranks that change role together. The last half of the cells is released, never
rank 0's cell. Release is considered when 20 % of the responses are done, then every 5 % up to 50 %.
The unfinished requests must fit into the batches and the KV caches of the remaining engines:

    sum over unfinished requests of  prompt + min(E[length | length > tokens so far], max_tokens)

E is the mean over responses that ended in this and earlier rounds. If no response was longer than a
request's tokens so far, max_tokens is used.

The paper checks only the KV caches. Here also the batches must have room, because queued requests
would lengthen the round by more than the overlapped training saves."""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate

from rlcore.sched.roles import Cell, GroupState, Live
from rlcore.utils.errors import ConfigError

HISTORY = 8192
"""Number of most recent response lengths that are kept."""


class LengthDistribution:
    """Empirical distribution of the lengths of ended responses."""

    def __init__(self, history: int = HISTORY) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None
        self._history = history

    def add(self, length: int) -> None:
        """Add the length of a response that has ended. If there are too many, drop the oldest."""
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > self._history:
            old = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, old) - 1]
        self._sums = None

    def mean_above(self, length: int) -> float | None:
        """Return the mean of all lengths above `length`, or None if no length is above it."""
        at = bisect_right(self._sorted, length)
        if at == len(self._sorted):
            return None
        if self._sums is None:
            self._sums = [0, *accumulate(self._sorted)]
        return (self._sums[-1] - self._sums[at]) / (len(self._sorted) - at)


class StreamWindow:
    """`Elastic` policy of Algorithm 1: release half of the cells once in a round."""

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        cache_tokens: float,
        max_running: int,
        batch_tokens: int,
        earliest: float,
        latest: float,
        check_every: float,
        lengths: LengthDistribution | None = None,
    ) -> None:
        """
        Args:
            cells: result of the function `cells`.
            cache_tokens: capacity of one engine's KV cache, in tokens.
            max_running: maximum number of requests that one engine decodes at a time.
            batch_tokens: approximate number of tokens per micro-batch of a model-parallel group.
            earliest, latest: range of the share of finished responses in which release is allowed.
            check_every: increase of the share of finished responses between two checks.
            lengths: lengths of responses from earlier rounds.

        Raises:
            ValueError: there is only one cell, which cannot decode and train at the same time.
        """
        if len(cells) < 2:
            raise ConfigError(
                "--mode stream: half of the engines train while the others decode, but all ranks "
                "are one engine or one model-parallel group; use more ranks or --mode sync"
            )
        ordered = sorted(cells, key=lambda c: min(c.ranks))
        self._half = ordered[len(ordered) - len(ordered) // 2 :]
        self._cache_tokens, self._max_running = cache_tokens, max_running
        self._batch_tokens = batch_tokens
        self._first, self._last, self._every = earliest, latest, check_every
        self.lengths = lengths or LengthDistribution()
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
        """Return how many `ready` groups fill one micro-batch of every model-parallel group in the
        cell: at least one `ready` group for each model-parallel group, if there are enough."""
        room, least, tokens = self._batch_tokens * len(cell.dp_ranks), len(cell.dp_ranks), 0
        for n, group in enumerate(ready):
            prompt = len(group.work.prompt.tokens)
            tokens += sum(prompt + r.num_tokens for r in group.counted)
            if tokens > room and n >= least:
                return n
        return len(ready)

    def left(self, rank: int) -> None:
        raise AssertionError("engines that stop decoding must train")

    def _peak_tokens(self, live: Iterable[Live]) -> float:
        total = 0.0
        for request in live:
            mean = self.lengths.mean_above(request.length)
            total += request.prompt + min(request.limit if mean is None else mean, request.limit)
        return total


def cells(
    engines: Sequence[Sequence[int]],
    model_parallel_groups: Sequence[Sequence[int]],
    lockstep: Sequence[Sequence[int]] = (),
) -> list[Cell]:
    """Return the finest partition of the ranks that splits no engine and no model-parallel group.

    Args:
        engines: ranks of each engine; the first rank is the leader.
        model_parallel_groups: ranks of each model-parallel group, by data-parallel rank.
        lockstep: further sets of ranks that must not be split, because they share experts.
    """
    of: dict[int, set[int]] = {}
    for together in (*engines, *model_parallel_groups, *lockstep):
        merged = set(together).union(*(of.get(r, ()) for r in together))
        for rank in merged:
            of[rank] = merged
    found = {min(ranks): ranks for ranks in of.values()}
    return [
        Cell(
            ranks=tuple(sorted(ranks)),
            leaders=tuple(e[0] for e in engines if e[0] in ranks),
            dp_ranks=tuple(
                d for d, ranks_of in enumerate(model_parallel_groups) if ranks_of[0] in ranks
            ),
        )
        for _, ranks in sorted(found.items())
    ]
