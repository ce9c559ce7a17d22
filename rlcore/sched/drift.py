"""Detect drift: check whether a job's phases and memory still match the profile with which the job
was admitted.

RollMux has such a check, but its thresholds are not published.
"""

from collections.abc import Sequence

WINDOW = 8
"""Number of most recent phases of each kind that are checked."""
TOO_MANY = 3
"""Number of slow phases within the window that is drift; a single slow phase is not."""
TOLERANCE = 1.1
"""Ratio to the profile above which a phase counts as slow."""


def drifted(seconds: Sequence[float], promised_s: float) -> float | None:
    """Return a new worst case for the profile if several recent phases took too long, else None.
    The new worst case is the duration of the longest recent phase.

    Args:
        seconds: durations of a job's phases of one kind, the most recent last.
        promised_s: worst case in the profile with which the job was admitted.
    """
    recent = seconds[-WINDOW:]
    if sum(s > TOLERANCE * promised_s for s in recent) < TOO_MANY:
        return None
    return max(recent)


def grown(gb: float, promised_gb: float) -> float | None:
    """Return a new profile value if a job uses more host memory than its profile says, else None.
    The new value is a tenth above the use, so that small growth does not exceed it again."""
    return TOLERANCE * gb if gb > promised_gb else None
