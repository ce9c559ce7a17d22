"""Encoding of plain values as JSON lines between a program and its judge (judge.py): no code, no
classes, no shared objects.

This module runs inside the sandbox and imports only the standard library. The judge builds the
values to compare from JSON, so a program can answer only with numbers, texts and containers.
"""

import json
import operator
from collections import deque
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from io import BufferedRWPair
from typing import Any, BinaryIO

Stream = BinaryIO | BufferedRWPair
"""Stream of lines: a binary file, or a pair of reader and writer of a socket."""
LARGEST = 16 << 20
"""Maximum length of a line in bytes."""


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """Convert `value` to JSON data. Subclasses become their base type. If a value is not plain, the
    number from `refer` is sent as a reference to it."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return ["i", format(int(value), "x")]
    if isinstance(value, float):
        return float(value)
    for kind, tag in _SEQUENCES.items():
        if isinstance(value, kind):
            return [tag, [encode(v, refer) for v in value]]
    if isinstance(value, dict):
        return ["d", [[encode(k, refer), encode(v, refer)] for k, v in value.items()]]
    if isinstance(value, bytes | bytearray):
        return ["b" if isinstance(value, bytes) else "B", bytes(value).hex()]
    if isinstance(value, complex):
        return ["c", [value.real, value.imag]]
    if isinstance(value, Decimal | Fraction):
        return ["D" if isinstance(value, Decimal) else "F", str(value)]
    if isinstance(value, range):
        return ["range", [value.start, value.stop, value.step]]
    if isinstance(value, type) and value in _TYPES.values():
        return ["type", value.__name__]
    if hasattr(type(value), "__index__"):  # an integer type of another library
        return ["i", format(operator.index(value), "x")]
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:  # a numpy scalar
        return encode(value.item(), refer)
    return ["ref", refer(value)]


_SEQUENCES: dict[type[list | tuple | set | frozenset | deque], str] = {
    list: "l",
    tuple: "t",
    set: "s",
    frozenset: "f",
    deque: "q",
}
_TYPES: dict[str, type] = {
    t.__name__: t
    for t in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset, type(None))
}


def _fraction(text: str) -> Fraction:
    """Return the fraction of a text "n" or "n/d", as `str` writes it: an exponent, which Fraction
    reads too, could take all memory."""
    numerator, _, denominator = text.partition("/")
    if denominator == "0":
        raise ValueError("a fraction over 0")
    return Fraction(int(numerator), int(denominator or 1))


_MAKE: dict[str, Callable[[Any], Any]] = {
    "i": lambda text: int(text, 16),
    "b": bytes.fromhex,
    "B": bytearray.fromhex,
    "c": lambda pair: complex(*pair),
    "D": Decimal,
    "F": _fraction,
    "type": _TYPES.__getitem__,
    "range": lambda three: range(*three),
}


_FILL: dict[str, Callable[[Any, Any], None]] = {
    "l": list.extend,
    "q": deque.extend,
    "s": set.update,
    "d": dict.update,
    "B": bytearray.extend,
}


def changed(sent: Sequence[Any], given: Sequence[Any], refer: Callable[[Any], int]) -> list[Any]:
    """Return the place and the new data of each container that has changed since `decode` made it
    from the data `sent`."""
    mutable = [i for i, data in enumerate(sent) if isinstance(data, list) and data[0] in _FILL]
    again = [[i, encode(given[i], refer)] for i in mutable]
    return [[i, data] for i, data in again if data != sent[i]]


def refill(container: Any, sent: Any, data: Any, follow: Callable[[int], Any]) -> None:
    """Give a container, which was encoded as `sent`, the contents in `data`. Raises ValueError if
    they are of another type."""
    if data[0] != sent[0] or sent[0] not in _FILL:
        raise ValueError(f"contents of another type: {data[0]!r:.20}")
    contents = decode(data, follow)
    container.clear()
    _FILL[sent[0]](container, contents)


def decode(data: Any, follow: Callable[[int], Any]) -> Any:
    """Convert JSON data to a value; `follow` returns the object of a reference. Raises ValueError,
    TypeError or KeyError for data that `encode` does not produce."""
    if not isinstance(data, list):
        return data
    tag, body = data
    if tag == "ref":
        return follow(int(body))
    if tag == "d":
        return {decode(k, follow): decode(v, follow) for k, v in body}
    for kind, own in _SEQUENCES.items():
        if tag == own:
            return kind(decode(v, follow) for v in body)
    return _MAKE[tag](body)


def send(stream: Stream, message: Any) -> None:
    """Send a message as one line of JSON. Raises ValueError if the line is too long."""
    line = json.dumps(message, separators=(",", ":")).encode()
    if len(line) >= LARGEST:
        raise ValueError(f"a value of {len(line)} bytes as JSON; at most {LARGEST} are allowed")
    stream.write(line + b"\n")
    stream.flush()


def receive(stream: Stream) -> Any:
    """Receive the next message, one line of JSON. Raises EOFError at the end of the stream,
    ValueError if the line is not JSON."""
    line = stream.readline(LARGEST + 1)
    if not line.endswith(b"\n"):
        raise EOFError("the other process has exited or sent too long a line")
    return json.loads(line)
