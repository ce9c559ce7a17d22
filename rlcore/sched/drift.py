"""Detection of drift: whether a job's phases and memory still match the profile with which it was
admitted.

RollMux has such a check; its thresholds are not published.
"""

from collections.abc import Sequence

WINDOW = 8
"""Number of recent phases of a kind that are checked."""
TOO_MANY = 3
"""Number of slow phases within the window that counts as drift; one slow phase does not."""
TOLERANCE = 1.1
"""Ratio to the profile above which a phase counts as slow."""


def drifted(seconds: Sequence[float], promised_s: float) -> float | None:
    """Return a new worst case for the profile if several recent phases took too long, else None.
    The new value is the longest recent phase.

    Args:
        seconds: durations of a job's phases of one kind, the most recent last.
        promised_s: worst case with which the job was admitted.
    """
    recent = seconds[-WINDOW:]
    if sum(s > TOLERANCE * promised_s for s in recent) < TOO_MANY:
        return None
    return max(recent)


def grown(gb: float, promised_gb: float) -> float | None:
    """Return a new profile value if a job uses more host memory than its profile, else None. The
    value adds a tenth, so that small growth does not exceed the profile again."""
    return TOLERANCE * gb if gb > promised_gb else None
