"""Limit every wait: `Deadline` for waits in rlcore's code, `Watchdog` for waits inside a library.

Errors name the missing rank or request, which would take an hour to find in the logs.
"""

import faulthandler
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rlcore.utils.clock import Clock, RealClock
from rlcore.utils.log import log

_CLOSE_S = 60.0
"""Seconds for which `Watchdog.close` waits for a report that is being made."""


class Deadline:
    """Deadline `seconds` from now. `what` names the waiting rank and its phase, for example `rank
    0, rollout of step 12`."""

    def __init__(self, seconds: float, what: str, clock: Clock | None = None):
        if not seconds > 0:
            raise ValueError(f"{what}: deadline of {seconds:g} s; must be above 0")
        self.seconds, self.what = seconds, what
        self._clock = clock or RealClock()
        self._end = self._clock.now() + seconds

    def restart(self) -> None:
        """Restart the deadline, after progress."""
        self._end = self._clock.now() + self.seconds

    def remaining(self, at_most: float = math.inf) -> float:
        """Return the seconds left, from 0 to `at_most`, as the time-out of one poll."""
        return min(at_most, max(0.0, self._end - self._clock.now()))

    @property
    def expired(self) -> bool:
        return self._clock.now() >= self._end

    def check(self, missing: str | Callable[[], str]) -> None:
        """Raise TimeoutError if the deadline has passed. `missing` is the name of the rank or
        request that did not answer, or a function that returns the name."""
        if self.expired:
            missing = missing() if callable(missing) else missing
            raise TimeoutError(f"{self.what}: waited {self.seconds:g} s for {missing}")


class Watchdog:
    """Thread that reports a phase of this process that makes no progress. It writes a message and
    the stacks of all threads to `path`, and logs the message or passes it to `on_overrun`.

    `beat(phase)` restarts the time limit; an empty phase stops watching. `beat` can be a listener
    of `Spans`. `describe()` runs in the watchdog's thread and returns what the process waits for.
    `on_overrun(message)` may end the process. `describe` and `on_overrun` are each called at most
    once per beat. If a phase holds the interpreter lock, `describe` cannot run; `grace_s` after the
    time limit, faulthandler's own timer then writes the stacks.
    """

    def __init__(
        self,
        timeout_s: float,
        path: Path,
        describe: Callable[[], str],
        on_overrun: Callable[[str], None] | None = None,
        grace_s: float = 10.0,
    ):
        if not timeout_s > 0:
            raise ValueError(f"watchdog {timeout_s:g} s: must be above 0")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._timeout_s, self._grace_s, self._path = timeout_s, grace_s, path
        self._describe, self._on_overrun = describe, on_overrun
        self._file = path.open("a")
        self._clock = RealClock()
        self._changed = threading.Condition()
        self._phase, self._since, self._told, self._closed = "", 0.0, False, False
        self._armed = -math.inf
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self, phase: str) -> None:
        """Report that the process makes progress and is in `phase`."""
        now = self._clock.now()
        # Wake the threads of watchdog and faulthandler only if needed, to save time on busy nodes.
        if not phase:
            faulthandler.cancel_dump_traceback_later()
            self._armed = -math.inf
        elif now - self._armed > self._grace_s / 10:
            faulthandler.dump_traceback_later(self._timeout_s + self._grace_s, file=self._file)
            self._armed = now
        with self._changed:
            sleeps = not self._phase or self._told  # The watchdog thread waits without a time-out.
            self._phase, self._since, self._told = phase, now, False
            if sleeps:
                self._changed.notify()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
        faulthandler.cancel_dump_traceback_later()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)  # longer: the alarm waits for a stuck disk
        if not self._thread.is_alive():
            with suppress(OSError):
                self._file.close()

    def _watch(self) -> None:
        while (phase := self._next_overrun()) is not None:
            self._speak(phase)

    def _next_overrun(self) -> str | None:
        """Wait until a phase exceeds its time; return the phase's name, or None when closed."""
        with self._changed:
            while not self._closed:
                left = self._since + self._timeout_s - self._clock.now()
                if not self._phase or self._told:
                    self._changed.wait()
                elif left > 0:
                    self._changed.wait(left)
                else:
                    self._told = True
                    return self._phase
        return None

    def _speak(self, phase: str) -> None:
        try:
            waiting_for = self._describe()
        except Exception as error:  # A failing `describe` must not hide the overrun.
            waiting_for = f"unknown ({type(error).__name__}: {error})"
        verdict = (
            f"phase {phase} has made no progress for {self._timeout_s:g} s, waiting for "
            f"{waiting_for}; stacks of all threads: {self._path}"
        )
        if self._on_overrun is None:
            log.error(verdict)
        with suppress(OSError):  # The verdict matters more than a file on a full disk.
            self._file.write(f"\n{verdict}\n")
            self._file.flush()
            faulthandler.dump_traceback(file=self._file, all_threads=True)
        if self._on_overrun is not None:
            self._on_overrun(verdict)
