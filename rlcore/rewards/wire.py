"""What travels between the reward service and its children: length-prefixed msgpack, no pickle."""

from typing import Any

from msgspec import Struct

from rlcore.records import Finish, GroupId, Prompt, RequestId, RewardResult, group_of

READY = -1
"""Key of the reply that says whether the child could build the reward."""


class SampleInfo(Struct, frozen=True, kw_only=True):
    """What a reward sees of a sample besides its text: the tokens themselves stay at the
    replica."""

    id: RequestId
    num_tokens: int
    num_prompt_tokens: int
    finish: Finish
    timeout_s: float = 0.0
    """What its score may take; 0 where that is not known. With adaptive deadlines another answer
    may shorten it."""

    @property
    def group(self) -> GroupId:
        return group_of(self.id)


class Start(Struct, frozen=True, kw_only=True):
    """The first frame to a child: what to build."""

    reward: str
    config: dict[str, Any]
    sys_path: tuple[str, ...]
    seed: int


class Job(Struct, frozen=True, array_like=True):
    key: int
    sample: SampleInfo
    prompt: Prompt
    text: str


class Reply(Struct, frozen=True, array_like=True):
    key: int
    result: RewardResult
    retire: bool = False
    """The child is in a bad state (out of memory) and wants to be replaced."""
