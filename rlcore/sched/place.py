"""Where a request goes."""

from collections.abc import Mapping

from rlcore.records import GroupId, RequestId, group_of


class LeastLoaded:
    """The replica with the fewest live requests; the lowest rank among equals. A group stays with
    the replica that took its first request while that one has room, so the prompt is prefilled
    once; or, with `spread`, every request goes by itself: a prompt of long answers then does not
    keep one replica busy alone (prompt replication, arXiv 2510.11345)."""

    def __init__(self, max_running: int, *, spread: bool = False) -> None:
        """`max_running`: requests that a replica takes at a time; what has no room waits at the
        controller for whoever is free first (queue scheduling)."""
        self._max_running, self._spread = max_running, spread
        self._home: dict[GroupId, int] = {}

    def choose(self, request: RequestId, load: Mapping[int, int]) -> int | None:
        group = group_of(request)
        home = self._home.get(group)
        if home is not None and load.get(home, self._max_running) < self._max_running:
            return home
        rank = min(load, key=lambda r: (load[r], r), default=None)
        if rank is None or load[rank] >= self._max_running:
            return None
        if not self._spread:
            self._home[group] = rank
        return rank

    def forget(self, group: GroupId) -> None:
        """It has no more requests."""
        self._home.pop(group, None)

    def clear(self) -> None:
        """Forget the homes: all replicas start again, and have nothing."""
        self._home.clear()
