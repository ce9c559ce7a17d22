"""Who came first."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from msgspec import Struct, structs

from rlcore.records import RequestId
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


class Counted(Struct, frozen=True, array_like=True):
    """A response that counted in the round of a log."""

    id: RequestId
    num_tokens: int
    score: float
    error: str = ""
    """As in `RewardResult`."""


class Misfit(ValueError):
    """The log is of another run."""


class ByLog:
    """In the order of a log, whatever the clock says: `--debug.replay`. What the log does not have
    is held back for ever: in the round of the log it was late.

    Nothing counts before everything that the log has, and that was started, has its reward. So
    nothing is aborted before either, and two replays decode the same requests side by side.
    """

    def __init__(
        self,
        counted: Sequence[Counted],
        requests: Callable[[], Iterable[RequestState]],
        misfit: Callable[[str], Misfit] = Misfit,
    ) -> None:
        """`requests`: all of the round. `misfit` makes a sentence of what the log's round does."""
        self._misfit = misfit
        self._known = {c.id: c for c in counted}
        self._order = deque(counted)
        self._requests = requests
        self._arrived: dict[RequestId, RequestState] = {}
        self.others: list[RequestId] = []
        """Responses of another length or score than in the log: those weights were others, or this
        machine rounds in another way."""

    def arrive(self, request: RequestState) -> None:
        """It has its reward. Where one of the two scores is a substitute, the log's holds: whether
        a reward comes in time is the clock's decision, too."""
        logged, result = self._known.get(request.id), request.result
        assert result is not None, request.id
        if logged is None:
            return
        self._arrived[request.id] = request
        if logged.num_tokens != request.num_tokens:
            self.others.append(request.id)
        elif logged.error or result.error:
            request.reward(structs.replace(result, score=logged.score, error=logged.error))
        elif logged.score != result.score:
            self.others.append(request.id)

    def next(self, is_open: Callable[[RequestState], bool]) -> RequestState | None:
        """Misfit where what comes next in the log cannot come here."""
        if any(r.result is None and r.id in self._known and is_open(r) for r in self._requests()):
            return None
        if not self._order:
            raise self._misfit(f"was over with {len(self._known)} responses")
        following = self._order[0].id
        request = self._arrived.get(following)
        if request is None:
            raise self._misfit(f"counts {following} next, which was not started here")
        if not is_open(request):
            raise self._misfit(f"counts {following} next, whose group is closed here")
        self._order.popleft()
        return request
