"""Reward service: scores the samples of a rank during the rollout, by one reward or a weighted sum
of several.

The caller submits samples and polls for scores, so it never blocks on a score. Each reward has a
runner (kind.py) that does the work in other processes. A failure affects only its own sample: the
sample scores `on_error`, its result carries the error, and failures are counted by reason.
"""

import dataclasses
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from rlcore.config.schema import RewardConfig, RewardSum, reward_sections
from rlcore.records import Prompt, RequestId, RewardResult, Sample
from rlcore.rewards.kind import Runner, RunnerHost, to_result
from rlcore.rewards.pool import RewardPool
from rlcore.rewards.registry import RewardTerm, parts_of, resolve
from rlcore.rewards.wire import SampleInfo, ScoreJob
from rlcore.sched.reward_timeout import AdaptiveTimeout, key_of
from rlcore.utils.children import last_lines, sentence
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log
from rlcore.utils.scores import LARGEST, number

_FULL_ERRORS = 5


@dataclasses.dataclass(eq=False, slots=True)
class _Open:
    """Pending sample with its results so far, by the reward's position in the sum."""

    id: RequestId
    since: float
    ahead: int
    """Number of samples that were already pending when this sample was submitted."""
    results: dict[int, RewardResult]


class RewardService:
    """Reward service of one rank; see the module docstring. `submit`, `poll` and `cancel` are
    called from one thread. Only `poll` (up to `timeout_s`) and `close` may block."""

    def __init__(
        self,
        reward: str,
        *,
        config: RewardConfig | RewardSum,
        seed: int = 0,
        log_file: Path | None = None,
        deadlines: AdaptiveTimeout | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        """Start one runner per reward.

        `reward` is the value of `--reward`, `config` its section (`registry.config_class`). Output
        of the rewards goes to `log_file`. `deadlines`: time limits of rewards with
        adaptive_timeout; the caller saves them. Raises ValueError if a reward does not exist.
        """
        self._reward, self._deadlines = reward, deadlines
        self._parts = parts_of(reward)
        self._configs = list(reward_sections(config).values())
        self._adaptive = [c.adaptive_timeout and deadlines is not None for c in self._configs]
        self._max_pending = min(c.max_pending for c in self._configs)
        self._changed = threading.Condition()
        # fields shared with the runners' threads, guarded by the lock
        self._open: dict[int, _Open] = {}
        self._done: deque[tuple[RequestId, RewardResult]] = deque()
        self._failure = ""
        self._errors: Counter[str] = Counter()
        # fields used by the caller's thread only
        self._keys: dict[RequestId, int] = {}
        self._next_key = 0
        self._closed = False
        self._runners: list[Runner] = []
        try:
            for i, (part, section) in enumerate(zip(self._parts, self._configs, strict=True)):
                host = RunnerHost(
                    part.name,
                    partial(self._scored, i),
                    self._fail,
                    partial(self._limit_s, i),
                    seed,
                    log_file,
                )
                self._runners.append(_runner(part, section, host, start_timeout_s))
        except BaseException:
            self.close()
            raise

    # ---- the caller's thread

    @property
    def num_pending(self) -> int:
        """Number of samples that were submitted and not yet returned by `poll`."""
        return len(self._keys)

    @property
    def room(self) -> int:
        """Number of samples that `submit` accepts now."""
        return self._max_pending - len(self._keys)

    def submit(self, id: RequestId, sample: Sample, prompt: Prompt, text: str) -> None:
        """Queue a sample; `text` is its decoded response. Raises ValueError if the id is already
        pending or the row cannot be sent, RuntimeError if the service is closed or full."""
        if self._closed:
            raise RuntimeError(f"reward {self._reward}: the service is closed")
        if id in self._keys:
            raise ValueError(f"reward: sample {id} is already pending")
        if self.room <= 0:
            raise RuntimeError(f"reward: {self._max_pending} samples are pending; poll first")
        info = SampleInfo(
            id=id,
            num_tokens=len(sample.tokens),
            num_prompt_tokens=len(sample.prompt),
            finish=sample.finish,
        )
        text = text.encode("utf-8", "replace").decode()  # msgpack rejects lone Unicode surrogates
        key = self._next_key
        self._next_key += 1
        with self._changed:
            self._open[key] = _Open(id, time.monotonic(), len(self._keys), {})
        self._keys[id] = key
        job = ScoreJob(key, info, prompt, text)
        try:
            for i, runner in enumerate(self._runners):
                limited = msgspec.structs.replace(info, timeout_s=self._limit_s(i, job))
                runner.submit(ScoreJob(key, limited, prompt, text))
        except (TypeError, ValueError, OverflowError) as error:
            self.cancel([id])
            raise ConfigError(
                f"row {prompt.index} of {prompt.dataset} cannot be sent to the reward: {error}"
            ) from error

    def poll(self, timeout_s: float) -> list[tuple[RequestId, RewardResult]]:
        """Return the scores since the last call, in any order. Wait up to `timeout_s` for the first
        score. Raises RuntimeError if a reward cannot run at all."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._failure, timeout_s)
            done = list(self._done)
            self._done.clear()
            if not done and self._failure:
                raise RuntimeError(self._failure)
        for id, _ in done:
            self._keys.pop(id, None)
        return done

    def cancel(self, ids: Collection[RequestId]) -> None:
        """Cancel samples: waiting samples are not scored, and the scores of samples in progress are
        discarded. Unknown ids are ignored."""
        gone = {id for id in ids if id in self._keys}
        with self._changed:
            for id in gone:
                self._open.pop(self._keys.pop(id), None)
            self._done = deque((id, result) for id, result in self._done if id not in gone)
        if gone:
            for runner in self._runners:
                runner.cancel(gone)

    def learn(self, reference_latency: Mapping[str, float]) -> None:
        """Add reference latencies from other ranks: how many seconds the scoring of a right answer
        took, by the prompt's key (`sched.reward_timeout.key_of`)."""
        if self._deadlines is not None:
            with self._changed:
                self._deadlines.learn(reference_latency)

    def close(self) -> None:
        """Stop all runners. Pending samples are dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for runner in self._runners:
            runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- callbacks of the runners, from any thread

    def _limit_s(self, part: int, job: ScoreJob) -> float:
        if self._adaptive[part]:
            assert self._deadlines is not None
            return self._deadlines.timeout_s(key_of(job.prompt))
        return self._configs[part].timeout_s

    def _fail(self, sentence: str) -> None:
        with self._changed:
            self._failure = self._failure or sentence
            self._changed.notify_all()

    def _scored(self, part: int, job: ScoreJob, result: RewardResult, printed: str) -> None:
        """Record the result of one reward for one sample."""
        if not result.error:
            try:
                checked = to_result(result)
                latency_s = result.latency_s
                result = msgspec.structs.replace(checked, latency_s=latency_s)
            except (TypeError, ValueError) as error:
                result = msgspec.structs.replace(result, error=sentence(error))
        if result.error:
            result = RewardResult(
                score=self._configs[part].on_error, error=result.error, latency_s=result.latency_s
            )
        told, count = False, 0
        with self._changed:
            if self._adaptive[part]:
                result = self._measured(part, job, result)
            found = self._open.get(job.key)  # `found` is None if the sample was cancelled
            if found is not None and part not in found.results:
                found.results[part] = result
                told = bool(result.error)
                if len(found.results) == len(self._parts):
                    del self._open[job.key]
                    self._done.append((found.id, self._sum(found)))
                    self._changed.notify_all()
            if told:
                # The first word: a time limit, which may differ by sample, is no kind of its own.
                kind = f"{part}: {result.error.replace(':', ' ').partition(' ')[0]}"
                self._errors[kind] += 1
                count = self._errors[kind]
        if told:
            self._tell(part, job.sample.id, result, printed, count)

    def _measured(self, part: int, job: ScoreJob, result: RewardResult) -> RewardResult:
        """Add the time limit to the result. A right answer's latency influences later limits."""
        assert self._deadlines is not None
        prompt = key_of(job.prompt)
        limit = self._deadlines.timeout_s(prompt)
        is_right = not result.error and result.score >= self._configs[part].correct_score
        self._deadlines.scored(prompt, result.latency_s, is_right)
        reference_latency_s = result.latency_s if is_right else 0.0
        return msgspec.structs.replace(
            result, timeout_s=limit, reference_latency_s=reference_latency_s
        )

    def _sum(self, found: _Open) -> RewardResult:
        """Combine the results of all rewards into a weighted sum. If there are several rewards, the
        score and details of each reward become details of the sum."""
        results = [found.results[i] for i in range(len(self._parts))]
        latency = max(r.latency_s for r in results)
        queued = max(0.0, time.monotonic() - found.since - latency)
        if len(results) == 1 and self._parts[0].weight == 1.0:
            return msgspec.structs.replace(results[0], queued_s=queued, num_ahead=found.ahead)
        details: dict[str, float] = {}
        for part, r in zip(self._parts, results, strict=True):
            details[part.label] = r.score
            details |= {f"{part.label}/{name}": value for name, value in r.details.items()}
        errors = [
            f"{r.error} ({part.label})"
            for part, r in zip(self._parts, results, strict=True)
            if r.error
        ]
        total = sum(p.weight * r.score for p, r in zip(self._parts, results, strict=True))
        try:
            score = number("the weighted sum", total)
        except ValueError as error:
            failed = zip(self._parts, self._configs, strict=True)
            score = sum(p.weight * c.on_error for p, c in failed)
            score = min(max(score, -LARGEST), LARGEST)
            errors.append(sentence(error))
        return RewardResult(
            score=score,
            details=details,
            terms=tuple(r.score for r in results),
            error="; ".join(errors),
            answer=next((r.answer for r in results if r.answer), ""),
            latency_s=latency,
            timeout_s=max(r.timeout_s for r in results),
            reference_latency_s=max(r.reference_latency_s for r in results),
            queued_s=queued,
            num_ahead=found.ahead,
        )

    def _tell(self, part: int, id: str, result: RewardResult, printed: str, count: int) -> None:
        """Log a failed sample. After `_FULL_ERRORS` errors of one kind, log only if their number is
        a power of two."""
        if count > _FULL_ERRORS and count & (count - 1):
            return
        nth = f" ({count} samples so far)" if count > _FULL_ERRORS else ""
        lines = "\n  it printed last:" + last_lines(printed) if count == 1 and printed else ""
        name = self._parts[part].name
        sentence = "reward %s: sample %s scores %g: %s%s%s"
        log.warning(sentence, name, id, result.score, result.error, nth, lines)


def _runner(
    part: RewardTerm, section: RewardConfig, host: RunnerHost, start_timeout_s: float
) -> Runner:
    kind = resolve(part.name)
    if kind.serve is not None:
        return kind.serve(section, host)
    return RewardPool(section, host, start_timeout_s)
