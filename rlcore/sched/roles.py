"""Protocols and state of the controller's policies. Each policy decides from what the controller
has seen: no torch, no I/O, no clock of its own.

`source` (which prompts come next) is in `prompt_source.py` and `tail_batching.py`, `place` (routing
of requests) in `router.py`, and `stop` (when a round is over) in `stop.py`. The completion order is
in `completion_order.py`. `elastic` (which engines stop decoding and train) and `consume` (what they
train next) are in `stream.py`. `admit` has no policy yet: every request is admitted.
"""

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
    """Leader rank of the engine that has the request; -1 while it waits."""
    num_tokens: int = 0
    finish: str = ""
    """Reason why the response ended; also `abort` while an abort is still in progress."""
    num_observed: int = 0
    """Number of response tokens that come from an environment rather than the model."""
    result: RewardResult | None = None
    resume: Partial | None = None
    """Partial response kept from an engine that failed."""

    def assign(self, rank: int) -> None:
        """Assign the request to the engine of this rank."""
        self.rank = rank

    def progress(self, num_tokens: int) -> None:
        """Update the current length of the response."""
        self.num_tokens = num_tokens

    def requeue(self, partial: Partial | None) -> None:
        """Put the request back in the queue, with the partial response known so far."""
        self.rank, self.resume = -1, partial
        self.num_tokens = len(partial.tokens) if partial else 0

    def end(self, finish: str, num_tokens: int, num_observed: int) -> None:
        """Record why the response ended and how long it is."""
        self.num_tokens, self.finish = num_tokens, finish
        self.num_observed = num_observed

    def abort(self) -> None:
        """Mark the response as aborted: it is no longer needed."""
        self.finish = "abort"

    def reward(self, result: RewardResult) -> None:
        """Set the reward of the response."""
        self.result = result


@dataclass(slots=True)
class GroupState:
    """State of one prompt's responses, as known to the controller."""

    work: Work
    requests: dict[RequestId, RequestState] = field(default_factory=dict)
    counted: list[RequestState] = field(default_factory=list)
    """Finished and rewarded responses, in the order in which they count; unchanged after the group
    closes."""
    is_closed: bool = False
    """Whether further responses of the group are ignored: it is complete, or was too late."""

    def close(self) -> None:
        """Close the group, so that no further response counts."""
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
        Failed episodes are left out, since they are not trained."""
        trained = (r for r in self.counted if r.finish != "failed")
        return len({r.result.score for r in trained if r.result is not None}) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Consequence of a complete group for the round."""

    kept: Sequence[GroupId] | None = None
    """Groups to train if the round is over; None while it continues."""
    closed: Sequence[GroupId] = ()
    """Groups that are too late for this round, whatever their later results."""
    dropped: Mapping[GroupId, str] = field(default_factory=dict)
    """Complete groups that do not count, each with its reason."""
    more: Sequence[Work] = ()
    """Additional work to start."""
    is_short: bool = False
    """Whether the round ends with fewer groups than were wanted."""


class Router(Protocol):
    def choose(self, request: RequestId, load: Mapping[int, int]) -> int | None:
        """Return the rank of the engine for this request, or None to keep it waiting. `load` has
        the number of live requests of every engine that is up."""

    def forget(self, group: GroupId) -> None:
        """Forget a group that has no more requests; called only if rounds do not end."""

    def clear(self) -> None:
        """Reset the routing after all engines have restarted with no requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Ranks that change role together: whole engines and whole model-parallel groups of the
    learner."""

    ranks: tuple[int, ...]
    leaders: tuple[int, ...]
    """Leader rank of each engine in the cell."""
    dp_ranks: tuple[int, ...]
    """Data-parallel ranks of the learner in the cell; empty if the cell is released and trains
    nothing."""


class Live(NamedTuple):
    """A request that is still to be decoded; all fields are in tokens."""

    prompt: int
    length: int
    """Current length of the response."""
    limit: int
    """Maximum length of the response."""


class Elastic(Protocol):
    """Policy for role changes within a round and for what released cells train next. One object
    serves the whole run."""

    def start(self) -> None:
        """Begin a round, in which all engines decode."""

    def finished(self, num_tokens: int) -> None:
        """Record the length of a response that ended by itself."""

    def release(
        self, done: int, wanted: int, live: Callable[[], Iterable[Live]], up: Collection[int]
    ) -> Sequence[Cell]:
        """Return the cells that stop decoding now; usually none, and non-empty at most once per
        round. `done` of the `wanted` responses have their score; dropped groups do not count.
        `live` returns all requests that are still to be decoded; `up` has the engines that
        decode."""

    def take(self, ready: Sequence[GroupState], cell: Cell) -> int:
        """Return how many of the `ready` groups, from the first, the cell takes as its next
        batch."""

    def left(self, rank: int) -> None:
        """Record that an engine whose cell trains nothing (no `dp_ranks`) has no requests left."""


class Stop(Protocol):
    """Policy that ends a round; one object per round, which may keep state."""

    def judge(self, groups: Mapping[GroupId, GroupState], group: GroupState) -> Verdict:
        """Judge `group`, one of `groups`, which has just become complete."""

    def num_wanted(self, groups: Mapping[GroupId, GroupState]) -> int:
        """Return the number of responses that the round is to end with."""


@dataclass(slots=True, kw_only=True)
class Round:
    """Work for the engines in one round, and its stop policy."""

    work: Sequence[Work]
    stop: Stop
    kind: Kind = "all"


class PromptSource(Protocol):
    """Policy for which prompts come next; one object serves the whole run."""

    def next_round(self, sampling: Sampling) -> Round:
        """Return the work of the next round and its stop policy."""

    def next_kind(self) -> Kind:
        """Return the kind of the next round. Call it between rounds."""

    def settle(self, kept: Iterable[GroupId], dropped: Mapping[GroupId, str]) -> None:
        """Settle the finished round: `kept` groups are trained, `dropped` groups are not (with a
        reason), and all other groups were late."""

    def metrics(self) -> dict[str, float]:
        """Return the `sched/*` metrics of the step that was just settled."""

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain JSON. Call it between rounds."""

    def restore(self, state: Mapping[str, Any], num_rows: int | None) -> None:
        """Continue from `state`. If the data do not have the rows that it names, raise ValueError
        and change nothing. `num_rows` is None for endless data."""


class EngineSizePolicy(Protocol):
    """Policy for the tensor-parallel size of the rollout engines; one object serves the whole
    run."""

    def size(self, kind: Kind) -> int:
        """Return the size for the next round, which is of this kind."""

    def after(self, kind: Kind, preemptions: int, cache_used: float) -> object:
        """Record the end of a round. `preemptions` is the sum over all engines; `cache_used` is the
        largest share of its KV cache that any engine had in use."""

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. If a size does not fit this machine, raise ValueError."""
