"""What a kind of reward is: its section, and where it runs.

A module of `rewards/` has one `KIND`, and `registry.REWARDS` names the module. It runs in one of
two ways:

`score`: in the pool's child processes, `--reward.workers` of them a rank, one sample at a time each
    (pool.py). What it makes from the section has `score(sample, prompt, text) -> float |
    RewardResult`. Deadlines, crashes and left-over processes are the pool's business. It may have
    `processes`, the ids of processes of its own that outlive a sample: others are ended after it.
`serve`: by a `Runner` that lives in the rank's process and does the work elsewhere: slots of its
    own, one process of its own, another machine. Deadlines are its own business.
"""

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlcore.config.schema import RewardConfig
from rlcore.records import RequestId, RewardResult
from rlcore.rewards.wire import Job
from rlcore.utils.children import ERROR_CHARS

_MOST_DETAILS, _NAME_CHARS = 32, 60


class Host(NamedTuple):
    """What the service offers a runner. Its functions may be called from any thread."""

    name: str
    """Of the reward, for sentences."""
    done: Callable[[Job, RewardResult, str], None]
    """Once for every job that was not cancelled. A result with `error` scores `on_error`; its first
    word, up to a colon or a blank, is counted as the reason, such as timeout, crash, memory. The
    text is what was printed, for the log."""
    fail: Callable[[str], None]
    """The reward cannot run at all, and why: the run ends with this sentence."""
    timeout_s: Callable[[Job], float]
    """How long the job may take, as far as is known now: with adaptive deadlines another's answer
    may shorten it while it runs."""
    seed: int
    log_file: Path | None
    """For what the work prints; None: nowhere."""


class Runner(Protocol):
    """Scores the jobs of one kind. No call blocks; `close` may, for seconds."""

    def submit(self, job: Job) -> None:
        """Queue a job: `Host.done` is called with it, some time. ValueError for a job that cannot
        be sent."""

    def cancel(self, ids: Collection[RequestId]) -> None:
        """Scores of these samples are of no use any more: what waits need not be scored. `done`
        may come nevertheless."""

    def close(self) -> None:
        """End, with everything that it started. Pending jobs are dropped."""


class Kind(NamedTuple):
    """One of `score` and `serve`, see the module."""

    config: type[RewardConfig]
    score: Callable[[Any], Any] | None = None
    """From the section to the object that scores. Called in each child process."""
    serve: Callable[[Any, Host], Runner] | None = None
    """From the section to a running runner. Called in the rank's process, which is not kept
    waiting: what takes long to start starts in the background."""


def to_result(value: Any) -> RewardResult:
    """What a reward returned, checked. TypeError or ValueError for what is no score."""
    if not isinstance(value, RewardResult):
        return RewardResult(score=number("score", value))
    if len(value.details) > _MOST_DETAILS:
        raise ValueError(f"{len(value.details)} details; return at most {_MOST_DETAILS}")
    details = {
        str(k).replace("/", "_")[:_NAME_CHARS]: number(f"details[{k!r}]", v)
        for k, v in value.details.items()
    }
    score = number("score", value.score)
    return RewardResult(score=score, details=details, error=str(value.error)[:ERROR_CHARS])


def number(what: str, value: Any) -> float:
    """`value` as a finite number. TypeError or ValueError for what is none."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"{what} is a {type(value).__name__}; return a number or a RewardResult")
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{what} is {found}; return a finite number")
    return found
