"""Provide clocks. Code that waits or measures time takes a clock as an argument, so that tests and
the simulator can pass a clock that they control."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic clock in seconds, from an arbitrary start."""

    def now(self) -> float:
        """Return the seconds since a fixed start."""

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`; a virtual clock advances by `seconds` instead."""


class RealClock:
    """The machine's monotonic clock, with the same start in all processes of one machine."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


class VirtualClock:
    """Clock for tests and simulations, which changes only when code sleeps or advances it."""

    def __init__(self, start: float = 0.0):
        self._now = start

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))

    def advance(self, seconds: float) -> None:
        """Advance by `seconds`; raise ValueError if `seconds` is negative."""
        if seconds < 0:
            raise ValueError(f"advance {seconds:g}: must be 0 or more")
        self._now += seconds

    def advance_to(self, time_s: float) -> None:
        """Advance to `time_s`; raise ValueError if `time_s` is in the past."""
        if time_s < self._now:
            raise ValueError(f"advance_to {time_s:g}: must be at least {self._now:g}, the time now")
        self._now = time_s
