"""Interface of a reward kind: its config section, and where the reward runs.

Each reward module in `rewards/` defines one `KIND`; `registry.REWARDS` lists the modules. A kind
has one of two functions:

`score`: the reward runs in the child processes of pool.py. Each rank has `--reward.workers` of
    them, and each child scores one sample at a time. `score` maps the config section to an object
    with the method `score(sample, prompt, text) -> float | RewardResult`. The pool handles
    deadlines and crashes. It kills the processes that a sample leaves behind, except those listed
    in the object's optional attribute `processes`. With the optional method `answer(text) -> str`,
    evaluations report the majority vote over the final answers of a prompt's responses.
`serve`: a `Runner` in the rank's process starts the work elsewhere: in sandboxes, in a separate
    process, or on another machine. The runner enforces deadlines.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlcore.config.schema import RewardConfig
from rlcore.records import Prompt, RequestId, RewardResult
from rlcore.rewards.wire import ScoreJob
from rlcore.utils.children import ERROR_CHARS
from rlcore.utils.scores import number, plain_name

_MOST_DETAILS, _NAME_CHARS = 32, 60
_ANSWER_CHARS = 200


class RunnerHost(NamedTuple):
    """Callbacks and settings of the service for a runner. Any thread may call the callbacks."""

    name: str
    """Name of the reward, used in error messages."""
    done: Callable[[ScoreJob, RewardResult, str], None]
    """Callback, called once for every job that was not cancelled: `done(job, result, printed)`. A
    result with `error` scores `on_error`. The first word of `error`, up to a colon or a space, is
    the reason that is counted, such as timeout, crash or memory. `printed` is the reward's
    output."""
    fail: Callable[[str], None]
    """Callback that reports that the reward cannot run, given a message. The run then ends."""
    timeout_s: Callable[[ScoreJob], float]
    """Callback that returns the current time limit of a job in seconds. With adaptive deadlines,
    the score of another sample may shorten this limit while the job runs."""
    seed: int
    log_file: Path | None
    """File for the output of the reward; None: the output is discarded."""


class Runner(Protocol):
    """Interface of a runner, which scores the jobs of one reward. No call blocks, except that
    `close` may block for seconds."""

    def submit(self, job: ScoreJob) -> None:
        """Queue a job; the runner later calls `RunnerHost.done` with the result. Raises ValueError
        if the job cannot be sent."""

    def cancel(self, ids: Collection[RequestId]) -> None:
        """Cancel these samples. Samples that still wait are not scored. The runner may still call
        `done` for a cancelled sample."""

    def close(self) -> None:
        """Stop the runner and everything that it started. Pending jobs are dropped."""


def _answer_of(config: RewardConfig, prompt: Prompt) -> str:
    return prompt.answer


class RewardKind(NamedTuple):
    """Reward kind: a config section with either `score` or `serve`; see the module docstring."""

    config: type[RewardConfig]
    score: Callable[[Any], Any] | None = None
    """Function that makes the scoring object from the config section, in each child process."""
    serve: Callable[[Any, RunnerHost], Runner] | None = None
    """Function that starts a runner from the config section and the host. Called in the rank's
    process and must return quickly: slow start-up work runs in the background."""
    reference: Callable[[Any, Prompt], str] = _answer_of
    """Function that writes a correct response from the config section and a data row, for `rlcore
    preflight`; by default the row's answer. It returns "" if it knows none."""


def to_result(value: Any) -> RewardResult:
    """Check the return value of a reward and convert it. Raises TypeError or ValueError if the
    value is not a valid score."""
    if not isinstance(value, RewardResult):
        return RewardResult(score=number("score", value, "a number or a RewardResult"))
    if len(value.details) > _MOST_DETAILS:
        raise ValueError(f"{len(value.details)} details: too many; return at most {_MOST_DETAILS}")
    details = {
        plain_name(k, _NAME_CHARS): number(f"details[{k!r}]", v) for k, v in value.details.items()
    }
    score = number("score", value.score)
    return RewardResult(
        score=score,
        details=details,
        error=str(value.error)[:ERROR_CHARS],
        answer=str(value.answer)[:_ANSWER_CHARS],
    )
