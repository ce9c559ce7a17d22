"""Messages between a rank and its judge process: frames of msgpack, as in `rewards/wire.py`."""

from typing import Any

from msgspec import Struct

from rlcore.records import RewardResult


class LoadJudge(Struct, frozen=True, tag=True):
    """First message: the settings to load, and the device."""

    config: dict[str, Any]
    """Values of the config section."""
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
    """Whether to score the request in its own batch, because an earlier batch with it crashed the
    judge."""


class CancelRequests(Struct, frozen=True, tag=True):
    """Cancellation of requests."""

    keys: tuple[int, ...]


class JudgeReady(Struct, frozen=True, tag=True):
    """Reply that the judge is loaded, or the error if loading failed."""

    error: str = ""
    growth_bytes: int = 0
    """Bytes of host memory by which layers and batches may make the judge grow."""


class BatchStarted(Struct, frozen=True, tag=True):
    """Start of a batch, from which the batch's deadline is measured."""

    keys: tuple[int, ...]


class BatchDone(Struct, frozen=True, tag=True):
    """Results of a batch, in the order of the batch's keys."""

    results: tuple[RewardResult, ...]


ToJudge = GradeRequest | CancelRequests
FromJudge = JudgeReady | BatchStarted | BatchDone
