"""Define the completion order: the order in which responses count towards their groups."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from msgspec import Struct, structs

from rlcore.records import RequestId
from rlcore.sched.roles import RequestState


class CompletionOrder(Protocol):
    """Order in which responses count. Without a `CompletionOrder`, responses count in the order in
    which their rewards arrive, which depends on timing."""

    def arrive(self, request: RequestState) -> None:
        """Add a finished and rewarded response."""

    def next(self, is_open: Callable[[RequestState], bool]) -> RequestState | None:
        """Return the next response to count; each response is returned once. While an earlier
        response may still arrive, return None. Do not wait for responses of closed groups."""


class ByTokens:
    """Completion order by response length, as if all requests started together and decoded at equal
    speed. On a tie the earlier request is first. Used by `--debug.deterministic_order`.

    No response counts, and no request is aborted, until all started requests of open groups have
    their rewards. So neither the order nor the batch composition (which changes the last bits of
    log-probs) depends on timing, and runs are repeatable.
    """

    def __init__(self, requests: Callable[[], Iterable[RequestState]]) -> None:
        """Make the order of a round; `requests` returns all requests of the round."""
        self._requests = requests
        self._held: list[tuple[int, int, RequestState]] = []

    def arrive(self, request: RequestState) -> None:
        heapq.heappush(self._held, (request.num_tokens, request.order, request))

    def next(self, is_open: Callable[[RequestState], bool]) -> RequestState | None:
        if any(r.result is None and is_open(r) for r in self._requests()):
            return None
        return heapq.heappop(self._held)[2] if self._held else None


class Counted(Struct, frozen=True, array_like=True):
    """Response that counted in a logged round."""

    id: RequestId
    num_tokens: int
    score: float
    error: str = ""
    """Reason why `score` is a substitute, such as `timeout`; empty for a normal score."""


class ReplayMismatch(ValueError):
    """The log of the replayed run does not match this run."""


class ByLog:
    """Completion order of a logged round, independent of timing, for `--debug.replay`. Responses
    that are not in the log never count, because they were late in the logged round.

    No response counts, and no request is aborted, until all started requests in the log have their
    rewards. So two replays decode with the same batch composition.
    """

    def __init__(
        self,
        counted: Sequence[Counted],
        requests: Callable[[], Iterable[RequestState]],
        misfit: Callable[[str], ReplayMismatch] = ReplayMismatch,
    ) -> None:
        """Make the order of a round; `requests` returns all requests of the round. If the log does
        not match this run, `misfit` makes the error from a text that follows "the logged round"."""
        self._misfit = misfit
        self._known = {c.id: c for c in counted}
        self._order = deque(counted)
        self._requests = requests
        self._arrived: dict[RequestId, RequestState] = {}
        self.others: list[RequestId] = []
        """Ids of the responses whose length or score differs from the log, because the weights
        differ or this machine rounds differently."""

    def arrive(self, request: RequestState) -> None:
        """Add a rewarded response. If the reward failed now or in the logged round, use the logged
        score and error, because reward timeouts depend on timing."""
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
        """Return the next response of the log; None while a started request in the log has no
        reward. If this run did not start the response, its group is closed in this run, or the log
        has no more responses, raise ReplayMismatch."""
        if any(r.result is None and r.id in self._known and is_open(r) for r in self._requests()):
            return None
        if not self._order:
            raise self._misfit(f"has only {len(self._known)} responses")
        following = self._order[0].id
        request = self._arrived.get(following)
        if request is None:
            raise self._misfit(f"has {following} next, which this run did not start")
        if not is_open(request):
            raise self._misfit(f"has {following} next, whose group is closed in this run")
        self._order.popleft()
        return request
