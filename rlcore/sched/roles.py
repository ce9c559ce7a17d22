"""The roles that policies play in the controller. Each is a decision, made from what the controller
has seen; no torch, no I/O, no clock of its own.

`source` (which prompts next) lives in `source.py` and `tail_batching.py`, `place` in `place.py`,
`stop` (when a round is over) in `stop.py`, who came first in `race.py`, `elastic` (which replicas
stop decoding and train) and `consume` (what they train next) in `stream.py`; `admit` has no policy
of its own yet: everything is admitted.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from rlcore.records import GroupId, Partial, RequestId, RewardResult, Sampling, Work

Kind = Literal["all", "short", "long"]
"""Of a round: `short` and `long` alternate, `all` are alike."""


@dataclass(slots=True)
class RequestState:
    """What the controller knows of one request."""

    id: RequestId
    order: int = 0
    """Its place among the requests of the round."""
    rank: int = -1
    """The replica that has it, -1 while it waits."""
    num_tokens: int = 0
    finish: str = ""
    """Why it ended; `abort` also while an abort is on its way."""
    num_observed: int = 0
    """Of its tokens, those that an environment gave."""
    result: RewardResult | None = None
    resume: Partial | None = None
    """What it had produced when its engine died."""

    def assign(self, rank: int) -> None:
        """Start it on the replica of this rank."""
        self.rank = rank

    def progress(self, num_tokens: int) -> None:
        """Note how long its response is by now."""
        self.num_tokens = num_tokens

    def requeue(self, partial: Partial | None) -> None:
        """Make it wait for a replica again, with what is known of its response."""
        self.rank, self.resume = -1, partial
        self.num_tokens = len(partial.tokens) if partial else 0

    def end(self, finish: str, num_tokens: int, num_observed: int) -> None:
        """Note why its response ended, and how long it is."""
        self.num_tokens, self.finish = num_tokens, finish
        self.num_observed = num_observed

    def abort(self) -> None:
        """Note that its response is of no use any more."""
        self.finish = "abort"

    def reward(self, result: RewardResult) -> None:
        """Give it its score."""
        self.result = result


@dataclass(slots=True)
class GroupState:
    """What the controller knows of one prompt's responses."""

    work: Work
    requests: dict[RequestId, RequestState] = field(default_factory=dict)
    counted: list[RequestState] = field(default_factory=list)
    """Finished and rewarded, in the order of their rewards; none after the group is closed."""
    is_closed: bool = False
    """Nothing more of it counts: it is complete, or came too late."""

    def close(self) -> None:
        """Count nothing more of it."""
        self.is_closed = True

    @property
    def wanted(self) -> int:
        """Responses that make it complete."""
        return self.work.wanted or self.work.num_samples

    @property
    def is_complete(self) -> bool:
        return len(self.counted) == self.wanted

    @property
    def has_equal_scores(self) -> bool:
        """Nothing is learned from it: all responses have the same advantage, but for episodes that
        failed and are not trained."""
        trained = (r for r in self.counted if r.finish != "failed")
        return len({r.result.score for r in trained if r.result is not None}) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a complete group means for the round."""

    kept: Sequence[GroupId] | None = None
    """The round is over, with these groups."""
    closed: Sequence[GroupId] = ()
    """These groups are too late, whatever comes of them."""
    dropped: Mapping[GroupId, str] = field(default_factory=dict)
    """These complete groups do not count, and why."""
    more: Sequence[Work] = ()
    """To be started besides."""
    is_short: bool = False
    """The round ends with fewer groups than were wanted."""


class Place(Protocol):
    def choose(self, request: RequestId, load: Mapping[int, int]) -> int | None:
        """The rank that takes this request; None makes it wait. `load` counts the live requests of
        every replica that is up."""

    def forget(self, group: GroupId) -> None:
        """It has no more requests; called where rounds do not end."""

    def clear(self) -> None:
        """All replicas start again, and have nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Ranks that change role together: whole engines and whole model replicas."""

    ranks: tuple[int, ...]
    leaders: tuple[int, ...]
    """The ranks that speak for an engine."""
    dp_ranks: tuple[int, ...]
    """The data-parallel ranks of the learner that its model replicas are; none where they leave
    and train nothing."""


class Live(NamedTuple):
    """A request that is still to be decoded, in tokens."""

    prompt: int
    length: int
    """Of the response so far."""
    limit: int
    """The longest that it may get."""


class Elastic(Protocol):
    """Who changes role in a round, and what those that have trained train next. Lives as long as
    the run."""

    def start(self) -> None:
        """A round begins; everybody decodes."""

    def finished(self, num_tokens: int) -> None:
        """A response ended by itself."""

    def release(
        self, done: int, wanted: int, live: Callable[[], Iterable[Live]], up: Collection[int]
    ) -> Sequence[Cell]:
        """The cells that stop decoding now, mostly none; once in a round. `done` of the `wanted`
        responses have their score, those of dropped groups left out; `live` gives all that are
        still to be decoded, `up` are the replicas that decode."""

    def take(self, ready: Sequence[GroupState], cell: Cell) -> int:
        """How many of the groups that wait to be trained a cell takes at a time, from the first."""

    def left(self, rank: int) -> None:
        """A replica whose cell trains nothing (no `dp_ranks`) has nothing any more."""


class Stop(Protocol):
    """Of one round: it may keep what it was told."""

    def judge(self, groups: Mapping[GroupId, GroupState], group: GroupState) -> Verdict:
        """`group`, one of `groups`, has just become complete."""

    def num_wanted(self, groups: Mapping[GroupId, GroupState]) -> int:
        """Responses that the round is to end with."""


@dataclass(slots=True, kw_only=True)
class Round:
    """What a source has the engines do."""

    work: Sequence[Work]
    stop: Stop
    kind: Kind = "all"


class Source(Protocol):
    """Which prompts come next; lives as long as the run."""

    def next_round(self, sampling: Sampling) -> Round:
        """The work of the next round, and when it is over."""

    def next_kind(self) -> Kind:
        """Of the round that `next_round` gives next. Between rounds."""

    def settle(self, kept: Iterable[GroupId], dropped: Mapping[GroupId, str]) -> None:
        """The round is over: `kept` is trained, `dropped` is not, for a reason; the rest was
        late."""

    def metrics(self) -> dict[str, float]:
        """`sched/*` of the step that was just settled."""

    def state(self) -> dict[str, Any]:
        """What `restore` needs; plain JSON. Between rounds."""

    def restore(self, state: Mapping[str, Any], num_rows: int | None) -> None:
        """Go on from `state`. ValueError, and nothing is changed, where the data (`num_rows`; None
        is endless) have not what it names."""


class Sizes(Protocol):
    """The tensor-parallel size of the rollout engines; lives as long as the run."""

    def size(self, kind: Kind) -> int:
        """Of the next round, which is of this kind."""

    def after(self, kind: Kind, preemptions: int, cache_used: float) -> object:
        """A round is over. `preemptions`: of all engines; `cache_used`: the largest share of its
        cache that an engine had in use."""

    def state(self) -> dict[str, Any]:
        """What `restore` needs; plain JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. ValueError where a size does not fit this machine."""
