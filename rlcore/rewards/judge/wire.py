"""Messages between a rank and its judge process: frames of msgpack, as in `rewards/wire.py`."""

from typing import Any

from msgspec import Struct

from rlcore.records import RewardResult


class LoadJudge(Struct, frozen=True, tag=True):
    """First message to the judge process: the judge's settings and its device."""

    config: dict[str, Any]
    """Values of the judge's config section, by key."""
    device: str
    sys_path: tuple[str, ...]


class GradeRequest(Struct, frozen=True, tag=True):
    """Request to grade a response."""

    key: int
    prompt: str
    answer: str
    text: str
    fields: dict[str, Any]
    alone: bool = False
    """Whether to score the request in a batch of its own, because an earlier batch with this
    request crashed the judge."""


class CancelRequests(Struct, frozen=True, tag=True):
    """Message that cancels the requests with these keys."""

    keys: tuple[int, ...]


class JudgeReady(Struct, frozen=True, tag=True):
    """Reply to `LoadJudge`: the judge is loaded, or `error` says why loading failed."""

    error: str = ""
    growth_bytes: int = 0
    """Bytes of host memory by which the judge may grow after its start, for layers and batches."""


class BatchStarted(Struct, frozen=True, tag=True):
    """Message that a batch has started. Its arrival restarts the parent's time-out."""

    keys: tuple[int, ...]


class BatchDone(Struct, frozen=True, tag=True):
    """Results of a batch, in the order of the batch's keys."""

    results: tuple[RewardResult, ...]


ToJudge = GradeRequest | CancelRequests
FromJudge = JudgeReady | BatchStarted | BatchDone
