"""Measure time by phase: `with spans.phase("gen"):` adds the seconds of the block to `gen`.

Own code instead of OpenTelemetry: only sums by phase are needed, so this saves the dependency.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlcore.utils.clock import Clock, RealClock


class Spans:
    """Seconds by phase since the most recent `take`. Phases may nest; the seconds of an inner phase
    then also count for the outer phase. Only one thread may use a `Spans`.

    Listeners, such as the screen and the watchdog, are called at every change of the innermost open
    phase, with its name, or with "" if no phase is open.
    """

    def __init__(self, clock: Clock | None = None, listener: Callable[[str], None] | None = None):
        self._clock = clock or RealClock()
        self._listeners = [listener] if listener is not None else []
        self._on_end: list[Callable[[str, float, float], None]] = []
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}

    @property
    def current(self) -> str:
        """Innermost open phase; "" if there is none."""
        return self._open[-1] if self._open else ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's time to `name`, also if the block raises."""
        self._open.append(name)
        self._tell()
        start = self._clock.now()
        try:
            yield
        finally:
            end = self._clock.now()
            self.add(name, end - start)
            self._open.pop()
            self._tell()
            for hear in self._on_end:
                hear(name, start, end)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the innermost open phase whenever that phase changes."""
        self._listeners.append(listener)

    def listen_to_ends(self, hear: Callable[[str, float, float], None]) -> None:
        """Call `hear` after every phase with the phase's name, start and end (seconds by clock)."""
        self._on_end.append(hear)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere to the phase `name`."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by phase in order of first use, and reset all sums. An open phase
        counts with its whole time in a later `take`, after it has ended."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def alive(self) -> None:
        """Call the listeners with the open phase again, to report progress inside it."""
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener(self.current)
