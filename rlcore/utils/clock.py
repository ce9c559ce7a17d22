"""Clocks. Code that waits or measures time takes a clock, so that tests and the simulator can pass
one that they move themselves."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds from an arbitrary zero."""

    def now(self) -> float:
        """Return the seconds since some fixed moment."""

    def sleep(self, seconds: float) -> None:
        """Wait, or move the clock."""


class RealClock:
    """The machine's monotonic clock, with the same zero in all processes of one machine."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


class VirtualClock:
    """A clock that stands still until it is moved; sleeping moves it."""

    def __init__(self, start: float = 0.0):
        self._now = start

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`; ValueError if that is negative."""
        if seconds < 0:
            raise ValueError(f"advance {seconds:g}: must be 0 or more")
        self._now += seconds

    def advance_to(self, time_s: float) -> None:
        """Move forward to `time_s`; ValueError if that is in the past."""
        if time_s < self._now:
            raise ValueError(f"advance_to {time_s:g}: must be at least {self._now:g}, the time now")
        self._now = time_s
