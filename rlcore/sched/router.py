"""Route requests to engines."""

import heapq
from collections.abc import Iterable, Mapping

from rlcore.records import GroupId, RequestId, group_of


class Loads(dict[int, int]):
    """Number of unfinished requests of each decoding engine, by leader rank.

    A heap gives the least loaded engine in O(log(engines)). Every change adds an entry to it; an
    entry that is no longer true is dropped when it comes to the top.
    """

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        super().__init__(dict.fromkeys(ranks, 0))
        self._heap = [(0, rank) for rank in sorted(self)]

    def __setitem__(self, rank: int, load: int) -> None:
        super().__setitem__(rank, load)
        heapq.heappush(self._heap, (load, rank))
        if len(self._heap) > 64 + 4 * len(self):
            self._heap = [(load, rank) for rank, load in self.items()]
            heapq.heapify(self._heap)

    def least(self) -> int | None:
        """Return the engine with the fewest requests; ties: lowest rank. None without engines."""
        while self._heap:
            load, rank = self._heap[0]
            if self.get(rank) == load:
                return rank
            heapq.heappop(self._heap)
        return None


class LeastLoaded:
    """`Router` that chooses the engine with the fewest unfinished requests; ties: lowest rank.

    All requests of a group go to the engine of the group's first request while that engine has
    room, so that the prompt is prefilled once. With `spread`, each request is routed alone, and a
    prompt with long responses does not fill one engine (prompt replication, arXiv 2510.11345).
    """

    def __init__(self, max_running: int, *, spread: bool = False) -> None:
        """Make a router. `max_running`: maximum number of requests of an engine at a time. Further
        requests wait at the controller for the first engine with room (queue scheduling)."""
        self._max_running, self._spread = max_running, spread
        self._home: dict[GroupId, int] = {}

    def choose(self, request: RequestId, load: Mapping[int, int]) -> int | None:
        group = group_of(request)
        home = self._home.get(group)
        if home is not None and load.get(home, self._max_running) < self._max_running:
            return home
        if isinstance(load, Loads):
            rank = load.least()
        else:
            rank = min(load, key=lambda r: (load[r], r), default=None)
        if rank is None or load[rank] >= self._max_running:
            return None
        if not self._spread:
            self._home[group] = rank
        return rank

    def forget(self, group: GroupId) -> None:
        """Forget the engine of a group that has no more requests."""
        self._home.pop(group, None)

    def clear(self) -> None:
        """Forget the engines of all groups, after all engines have restarted with no requests."""
        self._home.clear()
