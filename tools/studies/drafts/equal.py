"""Drafters at equal drafted tokens: each one's best settings, interpolated.

A setting gives a point (drafted per step, tokens per step). Any mix of two points can be had by
using the one setting for some requests and the other for the rest, so a drafter's front is the
upper hull of its points, up to the best of them. Nothing is extrapolated.
"""

import numpy as np

AT = (2.0, 4.0, 5.5, 8.0, 10.0, 12.0, 16.0, 20.0)

Front = list[tuple[float, float]]


def front(points: list[tuple[float, float]]) -> Front:
    """The corners of the upper hull: drafted rises, and tokens per step with it, ever less."""
    hull: Front = []
    for x, y in sorted(points, key=lambda p: (p[0], -p[1])):
        if hull and y <= hull[-1][1]:
            continue
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) > (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def at(line: Front, drafted: float) -> float | None:
    """Tokens per step of a front at `drafted`; None outside of it."""
    x, y = np.array(line).T
    if not x[0] <= drafted <= x[-1]:
        return None
    return float(np.interp(drafted, x, y))


def margin(ours: Front, theirs: Front) -> tuple[float, float] | None:
    """The least lead of ours over theirs, and the drafted tokens where it is; None: no common
    range. Both are piecewise linear: it is at a corner of one of them, or at an end."""
    low, high = max(ours[0][0], theirs[0][0]), min(ours[-1][0], theirs[-1][0])
    if low > high:
        return None
    corners = [low, high, *(x for x, _ in [*ours, *theirs] if low < x < high)]
    return min((at(ours, x) - at(theirs, x), x) for x in corners)
