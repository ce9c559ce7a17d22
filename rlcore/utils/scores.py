"""Check the numbers that rewards and environments return, and their names."""

import math
import re
from typing import Any

LARGEST = 1e30
"""Largest absolute value of a score. It is far below the maximum of float32 (3.4e38), so that
differences, weighted sums and returns of scores stay finite."""


def number(what: str, value: Any, form: str = "a number") -> float:
    """Convert `value` to a float from -LARGEST to LARGEST. `what` names the value in errors, `form`
    is what the user's code may return. Raises TypeError or ValueError for other values."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"{what} is a {type(value).__name__}; return {form}")
    try:
        found = float(value)
    except OverflowError:  # an integer beyond float64
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{what} is {found}; return a finite number")
    if abs(found) > LARGEST:
        raise ValueError(f"{what} is {found:g}; return a number from {-LARGEST:g} to {LARGEST:g}")
    return found


def plain_name(name: Any, max_chars: int) -> str:
    """Make the last part of a metric's name: at most `max_chars` ASCII letters, digits and `_.:-`;
    other characters become `_`."""
    return re.sub(r"[^\w.:-]", "_", str(name)[:max_chars], flags=re.ASCII) or "_"
