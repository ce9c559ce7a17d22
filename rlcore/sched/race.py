"""Who came first."""

import heapq
from collections.abc import Callable, Iterable
from typing import Protocol

from rlcore.sched.roles import RequestState


class Race(Protocol):
    """The order in which responses count. Without one it is that of their rewards, which the clock
    decides."""

    def arrive(self, request: RequestState) -> None:
        """It has its reward."""

    def next(self, is_open: Callable[[RequestState], bool]) -> RequestState | None:
        """The one that counts next, once. None while another might come before it; what is not open
        cannot."""


class ByTokens:
    """By length, as if all had started together and decoded at one speed; the earlier request among
    equals. The clock has no say, so a run repeats itself: `--debug.deterministic`."""

    def __init__(self, requests: Callable[[], Iterable[RequestState]]) -> None:
        """`requests`: all of the round; a response is at least as long as is known of it."""
        self._requests = requests
        self._held: list[tuple[tuple[int, int], RequestState]] = []

    def arrive(self, request: RequestState) -> None:
        heapq.heappush(self._held, (_place(request), request))

    def next(self, is_open: Callable[[RequestState], bool]) -> RequestState | None:
        while self._held and not is_open(self._held[0][1]):
            heapq.heappop(self._held)
        if not self._held:
            return None
        place, first = self._held[0]
        open_ = (r for r in self._requests() if r.result is None and is_open(r))
        if any(_place(r) < place for r in open_):
            return None
        heapq.heappop(self._held)
        return first


def _place(request: RequestState) -> tuple[int, int]:
    return request.num_tokens, request.order
