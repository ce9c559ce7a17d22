"""Durations as text: `1h 30m` is 5400 seconds."""

import re

UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}


def parse_duration(text: str) -> int:
    """Return the seconds of a text such as `1h 30m`. Raises ValueError for any other text."""
    words = text.split()
    parts = [re.fullmatch(r"(\d+)([dhms])", word) for word in words]
    if not words or None in parts:
        raise ValueError(f"{text!r} is not a duration; write it as 1d 2h 30m 5s")
    return sum(int(part[1]) * UNITS[part[2]] for part in parts)


def format_duration(seconds: int) -> str:
    """Return the text of a number of seconds, without the units that are 0."""
    days = seconds // 86_400
    hours = seconds % 86_400 // 3600
    minutes = seconds // 60
    counts = {"d": days, "h": hours, "m": minutes, "s": seconds % 60}
    return " ".join(f"{count}{unit}" for unit, count in counts.items() if count) or "0s"
