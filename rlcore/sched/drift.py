"""Detect drift: check whether a job's phases and memory still match the profile with which the job
was admitted.

RollMux has such a check, but its thresholds are not published.
"""

from collections.abc import Sequence

WINDOW = 8
"""Number of most recent phases of each kind that are checked."""
TOO_MANY = 3
"""Minimum number of slow phases in the window that counts as drift."""
TOLERANCE = 1.1
"""Ratio of a phase's duration to the profile above which the phase counts as slow."""


def drifted(seconds: Sequence[float], promised_s: float) -> float | None:
    """Return the duration of the longest recent phase, the new worst case for the profile. If fewer
    than `TOO_MANY` recent phases were slow, return None.

    Args:
        seconds: durations of a job's phases of one kind, the most recent last.
        promised_s: worst case in the profile with which the job was admitted.
    """
    recent = seconds[-WINDOW:]
    if sum(s > TOLERANCE * promised_s for s in recent) < TOO_MANY:
        return None
    return max(recent)


def grown(gb: float, promised_gb: float) -> float | None:
    """If a job uses more host memory than its profile says, return a new profile value, else None.
    The new value is 10 % above the use, so that small growth does not exceed the new value."""
    return TOLERANCE * gb if gb > promised_gb else None
