"""Messages between the reward service and its children: length-prefixed msgpack, no pickle."""

from typing import Any

from msgspec import Struct

from rlcore.records import Finish, GroupId, Prompt, RequestId, RewardResult, group_of

READY = -1
"""Key of the reply that reports whether the child could build the reward."""


class SampleInfo(Struct, frozen=True, kw_only=True):
    """Metadata of a sample for a reward. The sample's tokens are not sent."""

    id: RequestId
    num_tokens: int
    num_prompt_tokens: int
    finish: Finish
    timeout_s: float = 0.0
    """Time limit for scoring in seconds; 0 if unknown. With adaptive deadlines, the score of
    another sample may shorten this limit."""

    @property
    def group(self) -> GroupId:
        return group_of(self.id)


class RewardStart(Struct, frozen=True, kw_only=True):
    """First message to a child: the reward to build."""

    reward: str
    config: dict[str, Any]
    sys_path: tuple[str, ...]
    seed: int


class ScoreJob(Struct, frozen=True, array_like=True):
    key: int
    sample: SampleInfo
    prompt: Prompt
    text: str


class ScoreReply(Struct, frozen=True, array_like=True):
    key: int
    result: RewardResult
    retire: bool = False
    """Whether the child is in a bad state (out of memory) and must be replaced."""
