"""Phase timer: `with spans.phase("gen"):` adds the seconds of the block to `gen`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlcore.utils.clock import Clock, RealClock


class Spans:
    """Seconds by phase since the last `take`. Phases may nest: each counts in full, so an inner
    phase's seconds are part of the outer one's. Calls come from one thread.

    Listeners are called with the name of the innermost open phase whenever that changes, "" for
    none: the screen shows it, the watchdog watches it.
    """

    def __init__(self, clock: Clock | None = None, listener: Callable[[str], None] | None = None):
        self._clock = clock or RealClock()
        self._listeners = [listener] if listener is not None else []
        self._on_end: list[Callable[[str, float, float], None]] = []
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}

    @property
    def current(self) -> str:
        """Innermost open phase, "" for none."""
        return self._open[-1] if self._open else ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under `name`; what it raises passes through and is timed too."""
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
        """Add a listener."""
        self._listeners.append(listener)

    def listen_to_ends(self, hear: Callable[[str, float, float], None]) -> None:
        """Call `hear` after every phase with its name, its start and its end by the clock."""
        self._on_end.append(hear)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Seconds by phase in order of first use; starts again at zero. A phase still open is
        counted in the next take, with its whole time."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def alive(self) -> None:
        """Tell the listener the open phase again: something in it has been done."""
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener(self.current)
