"""Whether a job still is what it was admitted as: its phases and its memory against its profile.

RollMux has this; how much is too much is not published.
"""

from collections.abc import Sequence

WINDOW = 8
"""Phases of a kind that are looked at."""
TOO_MANY = 3
"""Of them, that may not take too long: one slow phase is no drift."""
TOLERANCE = 1.1
"""Of the profile."""


def drifted(seconds: Sequence[float], promised_s: float) -> float | None:
    """What the profile should say: the longest of the last phases, if several of them took too
    long; else None.

    Args:
        seconds: of a job's phases of one kind, the last one last.
        promised_s: the worst case that it was admitted with.
    """
    recent = seconds[-WINDOW:]
    if sum(s > TOLERANCE * promised_s for s in recent) < TOO_MANY:
        return None
    return max(recent)


def grown(gb: float, promised_gb: float) -> float | None:
    """What the profile should say where a job has more in host memory than it promised: that and a
    tenth, or it would be asked again for every page; else None."""
    return TOLERANCE * gb if gb > promised_gb else None
