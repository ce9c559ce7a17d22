"""Messages between a rank and its engine process, sent as msgpack frames (`utils/net.py`)."""

from typing import Any

from msgspec import Struct

from rlcore.records import AnyEvent, Bucket, History, Request, RequestId

LARGEST_FRAME = 1 << 31
"""Size limit of a frame in bytes. The limit is large because `remember` sends whole histories.
Weights go through shared memory instead."""


class EngineCall(Struct):
    """Call from parent to child. `args` is packed separately: its type depends on the method."""

    number: int
    method: str
    args: bytes


class EngineReply(Struct, tag=True):
    number: int
    error: str = ""
    """Class name of the exception; empty if the call succeeded."""
    message: str = ""


class Events(Struct, tag=True):
    events: tuple[AnyEvent, ...]


class Fatal(Struct, tag=True):
    """Last message of a child whose engine has failed. The child then exits."""

    reason: str
    refused: str = ""
    """Message of the ConfigError if the engine rejected its settings at the start; else empty."""


FromEngine = EngineReply | Events | Fatal

ARGS: dict[str, Any] = {
    "submit": tuple[tuple[Request, ...]],
    "abort": tuple[tuple[RequestId, ...]],
    "pause": tuple[str],
    "resume": tuple[()],
    "begin_load": tuple[int],
    "load_bucket": tuple[Bucket, tuple[bytes, ...]],
    "end_load": tuple[()],
    "sleep": tuple[tuple[str, ...]],
    "wake": tuple[tuple[str, ...]],
    "resize": tuple[int],
    "remember": tuple[tuple[History, ...]],
    "build": tuple[str, dict[str, Any]],
}
