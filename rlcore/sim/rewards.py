"""Simulated reward scorers: the score of a response, and the time that scoring takes."""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rlcore.records import Request
from rlcore.sched.reward_timeout import AdaptiveTimeout
from rlcore.sim import published
from rlcore.utils.seed import derive

UNLIMITED = 1 << 30


class SimScorer(Protocol):
    """A scorer that handles one response at a time on each of its workers."""

    workers: int

    def seconds(self, request: Request, length: int) -> float:
        """Return the seconds that a worker needs to score the response, starting now."""

    def is_right(self, request: Request, length: int) -> bool:
        """Return whether the response is right."""

    def record(self, request: Request, seconds: float, is_right: bool) -> None:
        """Record that a response has been scored."""


@dataclass(slots=True)
class FixedScorer:
    """Scorer that takes the same time for every response."""

    each_s: float = 0.0
    workers: int = UNLIMITED

    def seconds(self, request: Request, length: int) -> float:
        return self.each_s

    def is_right(self, request: Request, length: int) -> bool:
        return bool(length % 2)

    def record(self, request: Request, seconds: float, is_right: bool) -> None:
        """Do nothing: the scoring time is constant."""


@dataclass(slots=True)
class JudgeScorer:
    """Scorer by a judge model, whose time depends on the number of prompt and response tokens."""

    of_tokens: Callable[[int], float]
    workers: int

    def seconds(self, request: Request, length: int) -> float:
        return self.of_tokens(len(request.prompt) + length)

    def is_right(self, request: Request, length: int) -> bool:
        return bool(length % 2)

    def record(self, request: Request, seconds: float, is_right: bool) -> None:
        """Do nothing: the time of a judge does not adapt."""


@dataclass(slots=True)
class SandboxScorer:
    """Scorer that runs the program in a response. A share `looping` of the programs loops until the
    timeout. Every other program takes its prompt's time; a share `right` of these is right."""

    quantiles: Sequence[tuple[float, float]]
    """Quantiles of program times: (share of prompts, maximum seconds of their programs)."""
    looping: float
    """Share of the responses whose program loops."""
    workers: int
    seed: int
    prompt_of: Callable[[Request], str]
    timeout: AdaptiveTimeout | None = None
    """Timeout that adapts to the prompt; None: the timeout is always `most_s`."""
    most_s: float = published.SANDBOX_TIMEOUT_S
    right: float = 0.5
    timed_out_s: float = 0.0
    """Worker seconds spent on programs that timed out."""

    def seconds(self, request: Request, length: int) -> float:
        prompt = self.prompt_of(request)
        limit = self.timeout.timeout_s(prompt) if self.timeout else self.most_s
        needed = math.inf if self._dice(request)[0] < self.looping else self._own(prompt)
        if needed > limit:
            self.timed_out_s += limit
        return min(needed, limit)

    def is_right(self, request: Request, length: int) -> bool:
        loops, right = self._dice(request)
        return loops >= self.looping and right < self.right

    def record(self, request: Request, seconds: float, is_right: bool) -> None:
        if self.timeout:
            self.timeout.scored(self.prompt_of(request), seconds, is_right)

    def _dice(self, request: Request) -> tuple[float, float]:
        """Return two random numbers in [0, 1) that depend only on the request and the seed."""
        bits = derive(self.seed, "program", request.id)
        return (bits >> 32) / 2**31, (bits & 0xFFFFFFFF) / 2**32

    def _own(self, prompt: str) -> float:
        """Return the seconds of a prompt's program: log-scale interpolation between quantiles."""
        at = derive(self.seed, "prompt's program", prompt) / 2**63
        shares = [share for share, _ in self.quantiles]
        logs = [math.log(seconds) for _, seconds in self.quantiles]
        return math.exp(float(np.interp(at, shares, logs)))


@dataclass(slots=True)
class ScorerPool:
    """Workers of one scorer, which serve responses in order of arrival."""

    scorer: SimScorer
    _free: list[float] = field(default_factory=list)

    def done_at(self, now: float, request: Request, length: int) -> tuple[float, float]:
        """Return when the score is ready, and how many worker seconds the scoring takes."""
        if self.scorer.workers >= UNLIMITED:
            took = self.scorer.seconds(request, length)
            return now + took, took
        start = now
        if len(self._free) >= self.scorer.workers:
            start = max(now, heapq.heappop(self._free))
        took = self.scorer.seconds(request, length)
        heapq.heappush(self._free, start + took)
        return start + took, took

    def clear(self) -> None:
        """Begin a rollout round, with all workers free."""
        self._free.clear()


class Rewards:
    """Reward scorers by domain. With `after`, all responses are scored after the rollout, as in
    trainers that run phases one by one. Otherwise each response is scored as soon as it ends."""

    def __init__(
        self,
        scorers: Mapping[str, SimScorer] | None = None,
        domain_of: Callable[[Request], str] = lambda request: "",
        *,
        after: bool = False,
    ) -> None:
        self._pools = {name: ScorerPool(s) for name, s in (scorers or {"": FixedScorer()}).items()}
        self._domain_of = domain_of
        self.after = after

    def fixed_timeouts(self, *, after: bool = False) -> "Rewards":
        """Return a copy whose timeouts do not adapt; with `after`, it scores after the rollout."""
        scorers = {name: pool.scorer for name, pool in self._pools.items()}
        fixed = {
            name: replace(scorer, timeout=None)
            for name, scorer in scorers.items()
            if isinstance(scorer, SandboxScorer)
        }
        return Rewards(scorers | fixed, self._domain_of, after=after)

    def done_at(self, now: float, request: Request, length: int) -> tuple[float, float]:
        """Return when the score is ready, and how many worker seconds the scoring takes."""
        if self.after:
            return now, 0.0
        return self._pools[self._domain_of(request)].done_at(now, request, length)

    def score(self, request: Request, length: int, seconds: float) -> float:
        """Record the scoring, and return the score: 1 if the response is right, else 0."""
        scorer = self._pools[self._domain_of(request)].scorer
        is_right = scorer.is_right(request, length)
        if not self.after:
            scorer.record(request, seconds, is_right)
        return float(is_right)

    def all_at_once(self, responses: Sequence[tuple[Request, int]]) -> float:
        """Return the seconds to score all `responses`: pairs (request, length) in scoring order."""
        ends = [0.0]
        for request, length in responses:
            pool = self._pools[self._domain_of(request)]
            end, took = pool.done_at(0.0, request, length)
            pool.scorer.record(request, took, pool.scorer.is_right(request, length))
            ends.append(end)
        self.clear()
        return max(ends)

    def clear(self) -> None:
        """Begin a rollout round, with all workers free."""
        for pool in self._pools.values():
            pool.clear()
