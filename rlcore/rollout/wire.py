"""What travels between a rank and its engine process: frames of msgpack (`utils/net.py`)."""

from typing import Any

from msgspec import Struct

from rlcore.records import AnyEvent, Bucket, History, Request, RequestId

LARGEST_FRAME = 1 << 31
"""Bytes: `remember` sends whole histories. The weights of a run go through shared memory."""


class Call(Struct):
    """Parent to child. `args` is packed by itself, as its type depends on the method."""

    number: int
    method: str
    args: bytes


class Reply(Struct, tag=True):
    number: int
    error: str = ""
    """Name of the exception's class; empty when all went well."""
    message: str = ""


class Events(Struct, tag=True):
    events: tuple[AnyEvent, ...]


class Fatal(Struct, tag=True):
    """The engine is gone; the process ends."""

    reason: str
    refused: str = ""
    """The message of a ConfigError at the start: settings that cannot work."""


FromEngine = Reply | Events | Fatal

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
    "relayout": tuple[int],
    "remember": tuple[tuple[History, ...]],
    "build": tuple[str, dict[str, Any]],
}
