"""Declare the range of a setting at its field: `steps: Annotated[int, at_least(0)] = 200`.

A field that a subclass redefines without a range keeps the range. `broken` checks all ranges.
"""

import difflib
import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

import msgspec


@dataclass(frozen=True)
class Range:
    """Range of allowed numbers for a setting, or for each element of a tuple."""

    low: float = -inf
    high: float = inf
    above_low: bool = False
    """Whether `low` itself is excluded."""
    below_high: bool = False
    """Whether `high` itself is excluded."""
    unbounded: bool = False
    """Whether inf is allowed."""
    off: float | None = None
    """Special value that is also allowed, such as 0 for `off`; None: no such value."""
    note: str = ""
    """Text appended to the error message: meaning of a special value, or reason for the range."""

    def allows(self, value: float) -> bool:
        """Return whether a number is allowed; nan never is."""
        if value == self.off:
            return True
        if abs(value) == inf and not self.unbounded:
            return False
        low = value > self.low if self.above_low else value >= self.low
        return low and (value < self.high if self.below_high else value <= self.high)

    def why(self, value: float) -> str:
        """Describe what is allowed, for an error about `value`."""
        if self.low == -inf or value == inf == self.high:
            return "must be a finite number"
        if self.high == inf:
            if self.above_low:
                words = f"above {self.low:g}"
            else:
                words = f"at least {self.low:g}" if self.low else "0 or more"
        elif self.above_low or self.below_high:
            low = "above" if self.above_low else "at least"
            high = "below" if self.below_high else "at most"
            words = f"{low} {self.low:g} and {high} {self.high:g}"
        else:
            words = f"from {self.low:g} to {self.high:g}"
        return f"must be {words}{self.note}"


def above(
    low: float,
    *,
    at_most: float = inf,
    below: float = inf,
    unbounded: bool = False,
    off: float | None = None,
    note: str = "",
) -> Range:
    """Return the range of numbers above `low`."""
    return Range(low, min(at_most, below), True, below < at_most, unbounded, off, note)


def at_least(
    low: float, *, at_most: float = inf, below: float = inf, unbounded: bool = False, note: str = ""
) -> Range:
    """Return the range of `low` and all numbers above `low`."""
    return Range(low, min(at_most, below), False, below < at_most, unbounded, None, note)


def finite() -> Range:
    """Return the range of all finite numbers."""
    return Range()


_ANY = Range(unbounded=True)


def broken(section: Any, key: str) -> list[str]:
    """Return an error message for every field of a dataclass that is out of range. `key`: name of
    the section, such as `train` or `reward.math`. A number without a range must not be nan."""
    known, out = _ranges(type(section)), []
    for f in fields(section):
        value = getattr(section, f.name)
        numbers = value if isinstance(value, tuple) else (value,)
        allowed = known.get(f.name, _ANY)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if not allowed.allows(number):
                each = "each " if isinstance(value, tuple) else ""
                shown = " ".join(map(show, numbers))
                out.append(f"--{key}.{f.name} {shown}: {each}{allowed.why(number)}")
                break
    return out


def mistyped(section: type, given: Mapping[str, Any], key: str) -> list[str]:
    """Return an error message for every value in `given` that no field of the dataclass `section`
    has, or whose type does not fit the field. The command line checks this when it parses."""
    known = typing.get_type_hints(section)
    hints = {f.name: known[f.name] for f in fields(section)}
    out = []
    for name, value in given.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f"did you mean --{key}.{near[0]}?" if near else f"keys are {', '.join(hints)}"
            out.append(f"--{key}.{name}: there is no such key; {hint}")
            continue
        try:
            msgspec.convert(value, hints[name])
        except msgspec.ValidationError:
            out.append(f"--{key}.{name} {value!r}: must be {wanted(hints[name])}")
    return out


_WANTED = {
    bool: "true or false",
    int: "a whole number (int)",
    float: "a number (float)",
    str: "a text",
    Path: "a path",
    types.NoneType: "None",
}


def wanted(kind: Any) -> str:
    """Describe the values of a type, for an error."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(wanted, args))
    if origin is tuple:
        return f"a tuple, each {wanted(args[0])}"
    return _WANTED.get(kind, f"a {kind}, which cannot be given on the command line")


def _ranges(section: type) -> dict[str, Range]:
    """Return the ranges of a dataclass's fields, by name, for the fields that have a range."""
    found: dict[str, Range] = {}
    for base in section.__mro__:
        for name, hint in inspect.get_annotations(base, eval_str=True).items():
            for about in typing.get_args(hint)[1:] if _is_annotated(hint) else ():
                if isinstance(about, Range):
                    found.setdefault(name, about)
    return found


def _is_annotated(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Annotated


def show(value: Any) -> str:
    """Format a value as a user would write it, such as 1 for 1.0."""
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
