"""Scores of episodes: what environments gave, and where the kind says so, a reward besides."""

from collections import deque
from collections.abc import Collection, Mapping
from typing import Protocol

from msgspec import structs

from rlcore.envs.engine import Outcome
from rlcore.protocols import Scorer
from rlcore.records import Prompt, RequestId, RewardResult, Sample


class Service(Scorer, Protocol):
    """A reward service, which is closed with this."""

    def close(self) -> None: ...


class EnvScorer:
    """The reward service of a run with environments. A failed episode scores 0 and says why."""

    def __init__(self, outcomes: dict[RequestId, Outcome], service: Service | None) -> None:
        """`outcomes` are those of the rank's engine; each is taken out here. `service` scores the
        text of the last turn; None: environments alone score."""
        self._outcomes, self._service = outcomes, service
        self._done: deque[tuple[RequestId, RewardResult]] = deque()
        self._open: dict[RequestId, Outcome] = {}

    @property
    def num_pending(self) -> int:
        """Episodes that were submitted and that `poll` has not returned."""
        return len(self._done) + len(self._open)

    @property
    def room(self) -> int:
        """Episodes that `submit` takes now."""
        return self._service.room if self._service is not None else 1

    def submit(self, id: RequestId, sample: Sample, prompt: Prompt, text: str) -> None:
        """As a reward service's; `text`, of all turns, is not what is scored."""
        outcome = self._outcomes.pop(id)
        if outcome.error or self._service is None:
            result = RewardResult(score=outcome.score, details=outcome.details, error=outcome.error)
            self._done.append((id, result))
            return
        self._open[id] = outcome
        self._service.submit(id, sample, prompt, outcome.text)

    def poll(self, timeout_s: float) -> list[tuple[RequestId, RewardResult]]:
        """As a reward service's."""
        out = list(self._done)
        self._done.clear()
        if self._service is None:
            return out
        for id, result in self._service.poll(0.0 if out else timeout_s):
            outcome = self._open.pop(id)
            out.append(
                (
                    id,
                    structs.replace(
                        result,
                        score=result.score + outcome.score,
                        details=outcome.details | result.details,
                    ),
                )
            )
        return out

    def cancel(self, ids: Collection[RequestId]) -> None:
        """As a reward service's."""
        gone = set(ids)
        self._done = deque((id, result) for id, result in self._done if id not in gone)
        for id in gone:
            self._open.pop(id, None)
            self._outcomes.pop(id, None)
        if self._service is not None:
            self._service.cancel(gone)

    def learn(self, anchors: Mapping[str, float]) -> None:
        """As a reward service's."""
        if self._service is not None:
            self._service.learn(anchors)

    def close(self) -> None:
        """End the reward service."""
        if self._service is not None:
            self._service.close()
