"""Where a request goes."""

from collections.abc import Mapping

from rlcore.records import GroupId


class LeastLoaded:
    """The replica with the fewest live requests; the lowest rank among equals. A group stays with
    the replica that took its first request while that one has room, so the prompt is prefilled
    once."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._home: dict[GroupId, int] = {}

    def choose(self, group: GroupId, load: Mapping[int, int]) -> int | None:
        home = self._home.get(group)
        if home is not None and load.get(home, self._max_running) < self._max_running:
            return home
        rank = min(load, key=lambda r: (load[r], r), default=None)
        if rank is None or load[rank] >= self._max_running:
            return None
        self._home[group] = rank
        return rank

    def clear(self) -> None:
        """Forget the homes: all replicas start again, and have nothing."""
        self._home.clear()
