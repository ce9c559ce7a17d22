"""What travels between a rank and its judge process: frames of msgpack, as in `rewards/wire.py`."""

from typing import Any

from msgspec import Struct

from rlcore.records import RewardResult


class Load(Struct, frozen=True, tag=True):
    """The first frame: what to load, and where."""

    config: dict[str, Any]
    """Of the section."""
    device: str
    sys_path: tuple[str, ...]


class Ask(Struct, frozen=True, tag=True):
    """A request: a response to grade."""

    key: int
    prompt: str
    answer: str
    text: str
    fields: dict[str, Any]
    alone: bool = False
    """In a batch of its own: an earlier batch with it ended the judge."""


class Drop(Struct, frozen=True, tag=True):
    """These verdicts are of no use any more."""

    keys: tuple[int, ...]


class Ready(Struct, frozen=True, tag=True):
    """The judge is loaded, or cannot be."""

    error: str = ""
    growth_bytes: int = 0
    """Of host memory, which its layers and batches may come to take."""


class Began(Struct, frozen=True, tag=True):
    """A batch begins: the deadline is counted from here."""

    keys: tuple[int, ...]


class Done(Struct, frozen=True, tag=True):
    """The batch's results, in the order of its keys."""

    results: tuple[RewardResult, ...]


ToJudge = Ask | Drop
FromJudge = Ready | Began | Done
