"""The roles that policies play in the controller. Each is a decision, made from what the controller
has seen; no torch, no I/O, no clock of its own.

`source` (which prompts next) lives in `source.py`, `place` in `place.py`, `stop` in `stop.py`;
`admit`, `elastic` and `consume` have no policy of their own yet: everything is admitted, nobody
changes role, and the learner takes a round as a whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlcore.records import GroupId, Partial, RequestId, RewardResult, Work


@dataclass(slots=True)
class RequestState:
    """What the controller knows of one request."""

    id: RequestId
    rank: int = -1
    """The replica that has it, -1 while it waits."""
    num_tokens: int = 0
    finish: str = ""
    result: RewardResult | None = None
    resume: Partial | None = None
    """What it had produced when its engine died."""


@dataclass(slots=True)
class GroupState:
    """What the controller knows of one prompt's responses."""

    work: Work
    requests: dict[RequestId, RequestState] = field(default_factory=dict)
    num_rewarded: int = 0

    @property
    def is_complete(self) -> bool:
        return self.num_rewarded == len(self.requests)


class Place(Protocol):
    def choose(self, group: GroupId, load: Mapping[int, int]) -> int | None:
        """The rank that takes the next request of `group`; None makes it wait. `load` counts the
        live requests of every replica that is up."""


class Stop(Protocol):
    def kept(self, groups: Mapping[GroupId, GroupState]) -> Sequence[GroupId] | None:
        """The groups that the round ends with, or None while it goes on. Asked when a group has
        become complete."""
