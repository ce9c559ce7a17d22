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
    equals. Nothing counts before everything that was started has its reward, so nothing is aborted
    either: the clock has no say in who wins, nor in who is decoded beside whom, which would show in
    the last bits of the log-probs. A run repeats itself: `--debug.deterministic`."""

    def __init__(self, requests: Callable[[], Iterable[RequestState]]) -> None:
        """`requests`: all of the round."""
        self._requests = requests
        self._held: list[tuple[int, int, RequestState]] = []

    def arrive(self, request: RequestState) -> None:
        heapq.heappush(self._held, (request.num_tokens, request.order, request))

    def next(self, is_open: Callable[[RequestState], bool]) -> RequestState | None:
        if any(r.result is None and is_open(r) for r in self._requests()):
            return None
        return heapq.heappop(self._held)[2] if self._held else None
