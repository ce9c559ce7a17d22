"""Serialize records with msgpack and a typed decoder, never with pickle.

Arrays are an msgpack extension type: (dtype, shape, raw bytes in C order). The receiver gets a
writable copy, in a typed field or deep inside a `dict[str, Any]`.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import cache
from typing import Any

import msgspec
import numpy as np

LENGTH_BYTES = 4
LARGEST_FRAME = 1 << 28
_ARRAY = 1  # msgpack extension code of an array
_KINDS = "biuf"  # numpy kinds: bool, signed, unsigned, float; others would need pickle


class _Header(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]


def _out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _KINDS:
            raise ValueError(
                f"array of dtype {value.dtype}: only numeric arrays can be sent; convert it first"
            )
        head = _packer.encode(_Header(value.dtype.str, value.shape))
        body = np.ascontiguousarray(value).tobytes()
        return msgspec.msgpack.Ext(_ARRAY, len(head).to_bytes(2, "little") + head + body)
    if isinstance(value, np.generic):
        return value.item()
    # msgpack sends these types, but not their subclasses, such as those of pandas
    if isinstance(value, datetime):
        return datetime.combine(value.date(), value.timetz())
    if isinstance(value, timedelta):
        return timedelta(value.days, value.seconds, value.microseconds)
    raise ValueError(
        f"a {type(value).__name__} cannot be sent; send numbers, strings, arrays or records"
    )


def _ext(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"extension {code}: unknown; only {_ARRAY} (array) is supported")
    split = 2 + int.from_bytes(data[:2], "little")
    header = _headers.decode(data[2:split])
    dtype = np.dtype(header.dtype)
    if dtype.kind not in _KINDS:
        raise ValueError(f"array of dtype {dtype}: only numeric arrays can be received")
    return np.frombuffer(data[split:], dtype).reshape(header.shape).copy()


_packer = msgspec.msgpack.Encoder()
_headers = msgspec.msgpack.Decoder(_Header)
_encoder = msgspec.msgpack.Encoder(enc_hook=_out)


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(kind, ext_hook=_ext)


def encode(record: Any) -> bytes:
    """Encode a record, or a list, dict or tuple of records. Raise ValueError for a value that
    cannot be sent."""
    return _encoder.encode(record)


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """Decode a record that `encode` wrote; `kind` is a type or a union such as `AnyEvent`. Raise
    `msgspec.DecodeError` (a ValueError), naming the field, if the record has another type."""
    return _decoder(kind).decode(data)


def frame(message: Any) -> bytearray:
    """Encode the length of a message and then the message, for a stream. Raise ValueError,
    TypeError or OverflowError for a value that cannot be sent."""
    data = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, data, LENGTH_BYTES)
    data[:LENGTH_BYTES] = (len(data) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return data


class Frames:
    """Split a stream of bytes into the bodies of its frames."""

    def __init__(self, largest: int = LARGEST_FRAME) -> None:
        self._buffer = bytearray()
        self._largest = largest

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies that `data` completes. Bodies that the caller does not consume are
        yielded by the next call. Raise ValueError if a frame is longer than allowed."""
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            size = int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
            if size > self._largest:
                raise ValueError(f"frame of {size} bytes: must be at most {self._largest} bytes")
            end = LENGTH_BYTES + size
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[LENGTH_BYTES:end])
            del self._buffer[:end]
            yield body
