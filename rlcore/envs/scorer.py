"""Scorer of episodes: the sum of the environment's rewards, plus the score of `--reward` if the
environment kind uses a reward."""

from collections import deque
from collections.abc import Collection, Mapping
from typing import Protocol

from msgspec import structs

from rlcore.envs.engine import EpisodeOutcome
from rlcore.protocols import Scorer
from rlcore.records import Prompt, RequestId, RewardResult, Sample
from rlcore.utils.children import sentence
from rlcore.utils.scores import number


class Service(Scorer, Protocol):
    """Interface of the reward service that the scorer wraps and closes."""

    def close(self) -> None: ...


class EnvScorer:
    """Reward service of a run with environments. A failed episode scores 0, with an error."""

    def __init__(self, outcomes: dict[RequestId, EpisodeOutcome], service: Service | None) -> None:
        """Wrap a reward service. The engine adds episodes to `outcomes`; the scorer removes them.
        `service` scores the text of the last turn; None: only the environments score."""
        self._outcomes, self._service = outcomes, service
        self._done: deque[tuple[RequestId, RewardResult]] = deque()
        self._open: dict[RequestId, EpisodeOutcome] = {}

    @property
    def num_pending(self) -> int:
        """Number of episodes that were submitted and not yet returned by `poll`."""
        return len(self._done) + len(self._open)

    @property
    def room(self) -> int:
        """Number of episodes that `submit` accepts now."""
        return self._service.room if self._service is not None else 1

    def submit(self, id: RequestId, sample: Sample, prompt: Prompt, text: str) -> None:
        """Queue an episode (`RewardService.submit`). `text` has all turns and is ignored: only the
        text of the last turn is scored, with the finish of that turn."""
        outcome = self._outcomes.pop(id)
        if outcome.error or self._service is None:
            result = RewardResult(score=0.0, error=outcome.error)
            self._done.append((id, _added(result, outcome)))
            return
        self._open[id] = outcome
        scored = structs.replace(sample, finish=outcome.finish)
        self._service.submit(id, scored, prompt, outcome.text)

    def poll(self, timeout_s: float) -> list[tuple[RequestId, RewardResult]]:
        """Return the scores since the last call (`RewardService.poll`)."""
        out = list(self._done)
        self._done.clear()
        if self._service is None:
            return out
        for id, result in self._service.poll(0.0 if out else timeout_s):
            out.append((id, _added(result, self._open.pop(id))))
        return out

    def cancel(self, ids: Collection[RequestId]) -> None:
        """Cancel episodes (`RewardService.cancel`)."""
        gone = set(ids)
        self._done = deque((id, result) for id, result in self._done if id not in gone)
        for id in gone:
            self._open.pop(id, None)
            self._outcomes.pop(id, None)
        if self._service is not None:
            self._service.cancel(gone)

    def learn(self, reference_latency: Mapping[str, float]) -> None:
        """Add reference latencies from other ranks (`RewardService.learn`)."""
        if self._service is not None:
            self._service.learn(reference_latency)

    def close(self) -> None:
        """Close the reward service."""
        if self._service is not None:
            self._service.close()


def _added(result: RewardResult, outcome: EpisodeOutcome) -> RewardResult:
    """Add an episode's own score and details to a result. If the sum is too large, the result
    scores 0, with an error."""
    details = outcome.details | result.details
    try:
        score = number("the episode's score", result.score + outcome.score)
    except ValueError as error:
        return structs.replace(result, score=0.0, details=details, error=sentence(error))
    return structs.replace(result, score=score, details=details)
