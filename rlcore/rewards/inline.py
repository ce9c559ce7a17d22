"""Reward of `rlcore.train(reward=function)`: any callable, in a thread of the rank's process.

It needs no importable name, so that a notebook can define it, and it may use what the process has
loaded. It cannot be killed: where it takes longer than `--reward.timeout_s` the run ends. A reward
with a dotted path runs in child processes, and a sample that takes too long costs only its score.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import structs

from rlcore.config.schema import RewardConfig
from rlcore.records import RequestId, RewardResult
from rlcore.rewards import registry
from rlcore.rewards.kind import RewardKind, RunnerHost, to_result
from rlcore.rewards.wire import ScoreJob
from rlcore.utils.children import sentence

NAME = "inline"
_LOOK_S = 0.2


class InlineReward:
    """`kind.Runner` that calls a function in its own thread."""

    def __init__(self, function: Callable[..., Any], host: RunnerHost) -> None:
        self._function, self._host = function, host
        self._jobs: queue.SimpleQueue[ScoreJob | None] = queue.SimpleQueue()
        self._cancelled: set[RequestId] = set()
        self._since: tuple[ScoreJob, float] | None = None
        """The running job, and when it began."""
        self._closed = threading.Event()
        for work in (self._score, self._watch):
            threading.Thread(target=work, name=f"reward {host.name}", daemon=True).start()

    def submit(self, job: ScoreJob) -> None:
        """Queue a job (`Runner.submit`)."""
        self._cancelled.discard(job.sample.id)
        self._jobs.put(job)

    def cancel(self, ids: Collection[RequestId]) -> None:
        """Score none of these samples, unless one is being scored (`Runner.cancel`)."""
        self._cancelled.update(ids)

    def close(self) -> None:
        """Stop after the job that is being scored (`Runner.close`)."""
        self._closed.set()
        self._jobs.put(None)

    def _score(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed.is_set():
            if job.sample.id in self._cancelled:
                self._cancelled.discard(job.sample.id)
                continue
            began = time.monotonic()
            self._since = job, began
            try:
                result = to_result(self._function(job.sample, job.prompt, job.text))
            except Exception as error:
                result = RewardResult(score=0.0, error=f"exception: {sentence(error)}")
            self._since = None
            seconds = time.monotonic() - began
            self._cancelled.discard(job.sample.id)
            self._host.done(job, structs.replace(result, latency_s=seconds), "")

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if (since := self._since) is None:
                continue
            job, began = since
            if time.monotonic() - began > (limit := self._host.timeout_s(job)):
                self._host.fail(
                    f"--reward {NAME}: sample {job.sample.id} is not scored after {limit:g} s "
                    "(--reward.timeout_s), and a function of this process cannot be stopped; raise "
                    "the limit, or give the reward as a dotted path"
                )
                return


@contextmanager
def named(function: Callable[..., Any]) -> Iterator[str]:
    """Make a function known as a reward, and return the name for `--reward`. Raise ConfigError if
    it does not take (sample, prompt, text)."""
    registry.check_signature(NAME, function, (None, None, None))
    kind = RewardKind(RewardConfig, serve=lambda _, host: InlineReward(function, host))
    registry.INLINE[NAME] = kind
    try:
        yield NAME
    finally:
        del registry.INLINE[NAME]
