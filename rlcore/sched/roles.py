"""Protocols and state of the controller's policies. Policies decide only from the controller's
events, without torch, I/O or clock.

Implementations: next prompts (`PromptSource`) in `prompt_source.py` and `tail_batching.py`; routing
of requests (`Router`) in `router.py`; end of a round (`Stop`) in `stop.py`; completion order in
`completion_order.py`; role changes from decoding to training (`Elastic`) in `stream.py`. There is
no admission policy: every request is admitted."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from rlcore.records import GroupId, Partial, RequestId, RewardResult, Sampling, Work

Kind = Literal["all", "short", "long"]
"""Kind of a round: `short` and `long` rounds alternate under tail batching; `all` otherwise."""


@dataclass(slots=True)
class RequestState:
    """State of one request, as known to the controller."""

    id: RequestId
    order: int = 0
    """Position of the request in the submission order of its round."""
    rank: int = -1
    """Leader rank of the engine that has the request; -1 while the request waits."""
    num_tokens: int = 0
    finish: str = ""
    """Reason why the response ended; empty while it runs; `abort` once an abort has begun."""
    num_observed: int = 0
    """Number of response tokens that an environment, not the model, produced."""
    result: RewardResult | None = None
    resume: Partial | None = None
    """Tokens generated on a previous engine, from which the request continues."""

    def assign(self, rank: int) -> None:
        """Assign the request to the engine with leader rank `rank`."""
        self.rank = rank

    def progress(self, num_tokens: int) -> None:
        """Update the current length of the response."""
        self.num_tokens = num_tokens

    def requeue(self, partial: Partial | None) -> None:
        """Return the request to the queue; `partial` has the tokens generated so far."""
        self.rank, self.resume = -1, partial
        self.num_tokens = len(partial.tokens) if partial else 0

    def end(self, finish: str, num_tokens: int, num_observed: int) -> None:
        """Record the reason why the response ended, and its length."""
        self.num_tokens, self.finish = num_tokens, finish
        self.num_observed = num_observed

    def abort(self) -> None:
        """Mark the response as aborted, because it is no longer needed."""
        self.finish = "abort"

    def reward(self, result: RewardResult) -> None:
        """Set the reward of the response."""
        self.result = result


@dataclass(slots=True)
class GroupState:
    """State of the group of responses to one prompt, as known to the controller."""

    work: Work
    requests: dict[RequestId, RequestState] = field(default_factory=dict)
    counted: list[RequestState] = field(default_factory=list)
    """Finished and rewarded responses in completion order; unchanged once the group is closed."""
    is_closed: bool = False
    """Whether further responses of the group are ignored: the group is complete or too late."""

    def close(self) -> None:
        """Close the group, so that further responses are ignored."""
        self.is_closed = True

    @property
    def wanted(self) -> int:
        """Number of responses that complete the group."""
        return self.work.wanted or self.work.num_samples

    @property
    def is_complete(self) -> bool:
        return len(self.counted) == self.wanted

    @property
    def has_equal_scores(self) -> bool:
        """Whether all responses have the same score, so that the group gives no learning signal.
        Failed episodes are ignored, since they are not trained on."""
        trained = (r for r in self.counted if r.finish != "failed")
        return len({r.result.score for r in trained if r.result is not None}) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Decision of a `Stop` policy after a group has become complete."""

    kept: Sequence[GroupId] | None = None
    """Groups to train on if the round ends; None if the round continues."""
    closed: Sequence[GroupId] = ()
    """Groups that are too late for this round; their further responses are ignored."""
    dropped: Mapping[GroupId, str] = field(default_factory=dict)
    """Reasons why complete groups do not count, by group."""
    more: Sequence[Work] = ()
    """Additional prompts to start, as work for the engines."""
    is_short: bool = False
    """Whether the round ends with too few groups."""


class Router(Protocol):
    def choose(self, request: RequestId, load: Mapping[int, int]) -> int | None:
        """Return the leader rank of the engine for this request, or None to keep the request
        waiting. `load`: number of unfinished requests of each decoding engine, by leader rank."""

    def forget(self, group: GroupId) -> None:
        """Forget the engine of a group that has no more requests. Called only with --mode async."""

    def clear(self) -> None:
        """Reset the routing after all engines have restarted with no requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Set of ranks that change role (decode, train) together. It consists of whole engines and
    whole model-parallel groups of the learner."""

    ranks: tuple[int, ...]
    leaders: tuple[int, ...]
    """Leader rank of each engine in the cell."""
    dp_ranks: tuple[int, ...]
    """Data-parallel ranks of the learner in the cell; empty if a released cell does not train."""


class Live(NamedTuple):
    """Lengths of an unfinished request, in tokens."""

    prompt: int
    length: int
    """Current length of the response."""
    limit: int
    """Maximum length of the response."""


class Elastic(Protocol):
    """Policy for role changes within a round, and for the groups on which released cells (`Cell`)
    train. One object is used for the whole run."""

    def start(self) -> None:
        """Begin a round, in which all engines decode."""

    def finished(self, num_tokens: int) -> None:
        """Record the length in tokens of a response that ended without an abort."""

    def release(
        self, done: int, wanted: int, live: Callable[[], Iterable[Live]], up: Collection[int]
    ) -> Sequence[Cell]:
        """Return the cells that stop decoding now, usually none; a policy releases cells at most
        once per round. `done` of the `wanted` responses have a score; dropped groups are not
        counted. `live` returns all unfinished requests. `up` has the leader ranks of the decoding
        engines."""

    def take(self, ready: Sequence[GroupState], cell: Cell) -> int:
        """Return the number of `ready` groups, from the first on, that form the cell's next
        batch."""

    def left(self, rank: int) -> None:
        """Record that an engine (leader rank `rank`) of a released cell that does not train has no
        more unfinished requests."""


class Stop(Protocol):
    """Policy that decides when a round ends. Each round has its own object with its own state."""

    def judge(self, groups: Mapping[GroupId, GroupState], group: GroupState) -> Verdict:
        """Decide whether the round ends, now that `group`, one of `groups`, has become complete."""

    def num_wanted(self, groups: Mapping[GroupId, GroupState]) -> int:
        """Return the number of responses needed to end the round."""


@dataclass(slots=True, kw_only=True)
class Round:
    """Work for the engines in one round, and its stop policy."""

    work: Sequence[Work]
    stop: Stop
    kind: Kind = "all"


class PromptSource(Protocol):
    """Policy that chooses the next prompts. One object is used for the whole run."""

    def next_round(self, sampling: Sampling) -> Round:
        """Return the work of the next round and its stop policy."""

    def next_kind(self) -> Kind:
        """Return the kind of the next round. Call it between rounds."""

    def settle(self, kept: Iterable[GroupId], dropped: Mapping[GroupId, str]) -> None:
        """Record the end of the round. `kept` groups are trained on. `dropped` has the reason for
        each complete group that is not trained on. All other groups were late."""

    def metrics(self) -> dict[str, float]:
        """Return the `sched/*` metrics after the most recent `settle`."""

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain JSON. Call it between rounds."""

    def restore(self, state: Mapping[str, Any], num_rows: int | None) -> None:
        """Load a saved `state`. If the state names rows that are not in the data, raise ValueError
        and change nothing. `num_rows`: number of rows of the data; None if unlimited."""


class EngineSizePolicy(Protocol):
    """Policy for the tensor-parallel size of the rollout engines. One object is used for the whole
    run."""

    def size(self, kind: Kind) -> int:
        """Return the tensor-parallel size for the next round, which is of this kind."""

    def after(self, kind: Kind, preemptions: int, cache_used: float) -> object:
        """Record the end of a round. `preemptions`: sum over all engines. `cache_used`: peak share
        of the KV cache in use, maximum over engines."""

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a saved `state`. If this run cannot use one of its sizes, raise ValueError."""
