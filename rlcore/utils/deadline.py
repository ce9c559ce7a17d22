"""Every wait ends: `Deadline` for waits of our own, `Watchdog` for those inside somebody's library.

Both say who is missing: a wait that fails without a name costs an hour of reading logs.
"""

import faulthandler
import math
import threading
from collections.abc import Callable
from pathlib import Path

from rlcore.utils.clock import Clock, RealClock
from rlcore.utils.log import log


class Deadline:
    """A wait of at most `seconds`. `what` names who waits and in which phase, for example
    `rank 0, rollout of step 12`."""

    def __init__(self, seconds: float, what: str, clock: Clock | None = None):
        if not seconds > 0:
            raise ValueError(f"{what}: a deadline of {seconds:g} s; give a time above 0")
        self.seconds, self.what = seconds, what
        self._clock = clock or RealClock()
        self._end = self._clock.now() + seconds

    def restart(self) -> None:
        """Start counting again: something happened."""
        self._end = self._clock.now() + self.seconds

    def remaining(self, at_most: float = math.inf) -> float:
        """Seconds left, never below 0; `at_most` caps it for waits that want to look up between."""
        return min(at_most, max(0.0, self._end - self._clock.now()))

    @property
    def expired(self) -> bool:
        return self._clock.now() >= self._end

    def check(self, missing: str | Callable[[], str]) -> None:
        """TimeoutError once the time is over. `missing` says which rank or request did not come; a
        function is called only then."""
        if self.expired:
            missing = missing() if callable(missing) else missing
            raise TimeoutError(f"{self.what}: waited {self.seconds:g} s for {missing}")


class Watchdog:
    """A thread that speaks when a phase of this process stands still: it writes one sentence and
    the stacks of all threads to `path`, and logs the sentence or hands it to `on_overrun`.

    `beat(phase)` starts the time again, with "" nothing is watched; it fits `Spans(listener=...)`.
    `describe()` is called in the watchdog's thread and says what the process waits for.
    `on_overrun(verdict)` may end the process. Either happens once per beat.
    A phase that holds the interpreter lock cannot be described; its stacks are written all the
    same, by faulthandler's own timer, `grace_s` later.
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
            raise ValueError(f"watchdog {timeout_s:g} s: give a time above 0")
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
        """The process is alive and now in `phase`."""
        now = self._clock.now()
        # Both timers are threads: to wake one at every beat costs a turn of a busy machine.
        if not phase:
            faulthandler.cancel_dump_traceback_later()
            self._armed = -math.inf
        elif now - self._armed > self._grace_s / 10:
            faulthandler.dump_traceback_later(self._timeout_s + self._grace_s, file=self._file)
            self._armed = now
        with self._changed:
            sleeps = not self._phase or self._told  # it has no time to look at
            self._phase, self._since, self._told = phase, now, False
            if sleeps:
                self._changed.notify()

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
        faulthandler.cancel_dump_traceback_later()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._file.close()

    def _watch(self) -> None:
        while (phase := self._next_overrun()) is not None:
            self._speak(phase)

    def _next_overrun(self) -> str | None:
        """Wait until a phase overruns; None when closed."""
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
        except Exception as error:  # the process is in trouble already: say what can be said
            waiting_for = f"unknown ({type(error).__name__}: {error})"
        verdict = (
            f"phase {phase} has stood still for {self._timeout_s:g} s, waiting for {waiting_for}; "
            f"stacks of all threads: {self._path}"
        )
        if self._on_overrun is None:
            log.error(verdict)
        self._file.write(f"\n{verdict}\n")
        self._file.flush()
        faulthandler.dump_traceback(file=self._file, all_threads=True)
        if self._on_overrun is not None:
            self._on_overrun(verdict)
