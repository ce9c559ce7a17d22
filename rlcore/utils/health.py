"""Monitor the ranks of a run: heartbeats over torchrun's store, and an alarm that reaches all
ranks. On an alarm every rank writes its flight record (stacks, recent events), and one rank reports
which rank is stuck (`utils/verdict.py`).

A separate thread with a separate store connection does this, because the main thread may be stuck
in a collective, and the main store connection in a wait. The thread also ends this rank if the
store or another rank is silent for too long: rank 0 watches all ranks, and all ranks watch rank 0.

Own code instead of `torch.distributed.monitored_barrier`, which supports only gloo. This module
also covers NCCL, and waits outside of collectives.
"""

import json
import logging
import math
import os
import signal
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rlcore.utils import verdict
from rlcore.utils.flight_recorder import (
    FOLDER,
    FlightRecorder,
    Record,
    children_stacks,
    record_path,
)
from rlcore.utils.log import log
from rlcore.utils.sealed import ForgedValueError
from rlcore.utils.timed_store import TimedStore, lost_store, silent_store

BEAT_S = 2.0
STORE_S = 5.0
"""Time-out in seconds of one request to the store."""
GRACE_S = 6.0
"""Seconds that a rank waits for the flight records of the other ranks after an alarm."""
SILENT_S = 15.0
"""Seconds without a heartbeat after which a rank is assumed to be unable to finish its step. No
shorter silence of a rank or of the store ends a run."""
END_S = 60.0
"""Seconds after which a rank exits, even if it cannot finish its flight record, as on a stuck disk.
"""
AGAIN_S = 5.0
"""Seconds after which a second SIGTERM counts as a new request; launchers send SIGTERM twice."""
SPEAKERS = 3
"""Number of ranks that take turns to report an alarm: rank 0, or the next rank if rank 0 cannot. If
none of them can, the first rank that can reports it."""
VERDICT = "verdict.json"
"""File next to the flight records, with the report and the suspected ranks."""
EXIT_TERM = 128 + signal.SIGTERM
EXIT_REFUSED = 2


class Health:
    """Monitor that exchanges heartbeats and alarms with the other ranks. `store`: a store
    connection for this object only; None for a single rank, and until all ranks have started.
    `silence_s`: seconds of silence after which a rank or the store counts as failed."""

    def __init__(
        self,
        flight: FlightRecorder,
        store: Any | None,
        beat_s: float = BEAT_S,
        silence_s: float = math.inf,
    ):
        self.flight, self._beat_s = flight, beat_s
        self._store: TimedStore | None = None
        self._silence_s = max(silence_s, SILENT_S)
        self._forged = 0
        self._is_lost = False
        """Whether torchrun's agent has exited with the store, which never comes back."""
        self._looked_at = self._answered_at = self._look_at = time.monotonic()
        """Times at which this thread last looked for silence and the store last answered, and from
        which it next looks for silent ranks."""
        if store is not None:
            self.enter(store)
        self._alarm: dict[str, Any] | None = None
        self._answered = threading.Event()
        """Event set when the alarm has been handled: a rank wrote the verdict, or no rank could."""
        self._lock = threading.Lock()
        self._told = -math.inf
        """Time when this rank last handled an alarm."""
        self._last: dict[str, Any] | None = None
        """Most recent alarm of another rank in the store."""
        self.known: dict[int, dict[str, Any]] = {}
        """State of each rank at the start, used when the store does not answer."""
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._closed = False
        self._old_term: Any = None
        self._grace_s = 0.0
        """Seconds for a run to finish its step and save after a SIGTERM; 0: exit at once."""
        self._is_done = False
        """Whether this rank has finished and saved everything, so that the other ranks may exit."""
        self._ended_at: float | None = None
        self._alarms = 0
        self._seen: dict[int, tuple[Any, float]] = {}
        """Most recent heartbeat of each other rank, and the time when this rank first saw it."""
        flight.on_phase(self._poke)
        self._thread = threading.Thread(target=self._live, name="health", daemon=True)

    def enter(self, store: Any) -> None:
        """Begin to exchange heartbeats and alarms over the store."""
        store.set_timeout(timedelta(seconds=STORE_S))
        self._answered_at = time.monotonic()
        self._store = TimedStore(store, STORE_S)

    def start(self, signals: bool = True) -> "Health":
        """Start the health thread. `signals`: write the flight record on SIGTERM, even if the main
        thread is stuck; requires that `start` is called in the main thread."""
        if signals:
            # Block SIGTERM in forks: before `_forget`, a child would handle SIGTERM like the rank.
            os.register_at_fork(
                before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM]),
                after_in_parent=partial(
                    signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM]
                ),
                after_in_child=partial(_forget, weakref.ref(self)),
            )
            self._old_term = signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def met(self, known: dict[int, dict[str, Any]]) -> None:
        """Store the start-up states of all ranks, which `meet` returns."""
        self.known = known

    def allow_grace(self, seconds: float) -> None:
        """Allow the run `seconds` after a SIGTERM to finish its step and save."""
        self._grace_s = seconds

    def done(self) -> None:
        """Report that this rank has finished and saved everything: the other ranks may exit."""
        self._is_done = True

    def alarm(self, reason: str, *, ends: bool = False) -> None:
        """Raise an alarm: all ranks write their records, and one rank reports which rank is stuck.
        Return when that is done, within a few seconds; with `ends` this rank then exits. During
        another alarm, wait until that one has been handled."""
        if ends:
            _exit_later(1)
        first = False
        with self._lock:
            if self._alarm is None:
                self._alarm, first = self._new_alarm(reason), True
                self._answered.clear()
        if first:
            self._call(self._alarm)
            self._answer(self._alarm)
        else:
            self._answered.wait(3 * GRACE_S)
        if ends:
            logging.shutdown()
            os._exit(1)

    def refuse(self) -> None:
        """Tell the other ranks that this rank has said why it refuses the run's settings. Where
        torchrun then ends them, they make no report."""
        if self._store is None:
            return
        try:
            self._store.set("refused", "1")
        except Exception as error:  # The store raises errors of several types.
            self._note(error)

    def wait_for_alarm(self) -> None:
        """Wait until another rank's alarm has been handled, at most `2 * GRACE_S`."""
        self._poke()
        self._answered.wait(2 * GRACE_S)

    @property
    def ends(self) -> bool:
        """Whether a SIGTERM has arrived, so that the current step is the last one."""
        return self._ended_at is not None

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._poke()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * STORE_S)
        if self._old_term is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._old_term)
        self._wake.close()
        self._woken.close()
        self._store = None  # On rank 0, this also releases the store's server.

    # ---- the thread

    def _live(self) -> None:
        while not self._closed:
            try:
                self._beat()
                if why := self._cannot_finish():
                    self._terminate(why)
                if why := self._silence():
                    self.alarm(why, ends=True)
            except Exception:  # SIGTERM and stuck ranks must still be noticed after an error.
                log.exception("health thread of rank %d continues after an error", self.flight.rank)
            self._woken.settimeout(self._beat_s)
            try:
                heard = self._woken.recv(64)
            except TimeoutError:
                continue
            except OSError:  # The socket was closed by `close`.
                return
            if signal.SIGTERM in heard:
                self._handle_sigterm()

    def _beat(self) -> None:
        """Send this rank's heartbeat and look for an alarm."""
        if self._store is None or self._alarm is not None:
            return
        try:
            self._store.set(f"beat/{self.flight.rank}", json.dumps(self.flight.at))
            is_alarmed = self._store.check(["alarm"])
            self._answered_at = time.monotonic()
            if not is_alarmed:
                return
            alarm = _alarm_of(self._store.get("alarm"), self.flight.world_size)
        except ValueError as error:
            self._drop_forged(error)
            return
        except Exception as error:  # If the store fails, each rank reports by itself.
            self._note(error)
            return
        with self._lock:
            if self._alarm is not None or alarm == self._last:
                return
            self._last = alarm
            # An alarm of another rank at about the same time has the same cause.
            if time.monotonic() < self._told + 2 * GRACE_S or alarm["from"] == self.flight.rank:
                return
            self._alarm = alarm
            self._answered.clear()
        self._answer(alarm)

    def _note(self, error: Exception) -> None:
        """Log that a call of the store failed. If rank 0 hosts the store, it has said why it ended;
        if torchrun's agent does, it may have been killed."""
        log.debug("the run's store does not answer: %s", error)
        if isinstance(error, ConnectionError) and self.flight.agent:
            self._is_lost = True

    def _drop_forged(self, error: ValueError) -> None:
        self._forged += 1
        if self._forged == 1:  # Warn once: the value stays in the store for every heartbeat.
            log.warning("ignored an invalid alarm in the run's store: %s", error)

    def _handle_sigterm(self) -> None:
        """Handle a SIGTERM from the user, from the scheduler, or from torchrun after another rank
        has exited. With a grace period, the training loop reads the property `ends`, and the rank
        exits after saving."""
        if self._heard_refusal():
            logging.shutdown()
            os._exit(EXIT_REFUSED)
        now = time.monotonic()
        if not self._grace_s or (self._ended_at is not None and now > self._ended_at + AGAIN_S):
            self._terminate("ended by SIGTERM")
        if self._ended_at is None:
            self._ended_at, self._alarms = now, 0
            if self.flight.rank == 0:
                log.warning(
                    "SIGTERM: the run saves and exits after this step, within %g s "
                    "(--checkpoint.grace_s)",
                    self._grace_s,
                )

    def _heard_refusal(self) -> bool:
        """Return whether a rank refuses the run's settings, as far as the store says."""
        if self._store is None or self._is_mute:
            return False
        try:
            return self._store.check(["refused"])
        except Exception as error:  # The store raises errors of several types.
            self._note(error)
            return False

    def _cannot_finish(self) -> str:
        """Return why the run cannot finish its step after a SIGTERM; "" if it still can."""
        if self._ended_at is None:
            return ""
        if time.monotonic() > self._ended_at + self._grace_s:
            return (
                "ended by SIGTERM: the step took longer than --checkpoint.grace_s "
                f"{self._grace_s:g}"
            )
        if self._is_done:
            return ""
        if self._alarms:
            return "ended by SIGTERM: a rank raised an alarm"
        gone = self._failed_ranks()
        return f"ended by SIGTERM: rank {gone[0]} has exited or does not respond" if gone else ""

    def _failed_ranks(self) -> list[int]:
        """Return the other ranks that have exited, are stopped, or send no heartbeats."""
        if self._store is None:
            return []
        beats = self._last_beats()
        silent = self._silent_ranks(beats, SILENT_S)
        return [r for r in beats if r in silent or _state(beats[r], self.flight.machine)]

    def _silent_ranks(self, beats: Mapping[int, Mapping[str, Any]], seconds: float) -> list[int]:
        """Return the other ranks whose heartbeats have not changed for some seconds."""
        now = time.monotonic()
        for r, beat in beats.items():
            if self._seen.get(r, (None, 0.0))[0] != beat:
                self._seen[r] = beat, now
        return [r for r in beats if r != self.flight.rank and now > self._seen[r][1] + seconds]

    def _silence(self) -> str:
        """Return that the store or another rank has been silent for too long; "" if none has."""
        now, limit_s = time.monotonic(), self._silence_s
        was_stopped = now > self._looked_at + limit_s / 2
        self._looked_at = now
        if self._store is None or self._is_done:
            return ""
        if self._is_lost:
            return lost_store()
        if was_stopped:  # This process itself was, so the others may have been stopped with it.
            self._answered_at = self._look_at = now
            self._seen.clear()
        if self._mute_s() > limit_s:
            return silent_store(limit_s)
        if self._is_mute:  # Heartbeats do not arrive either.
            self._seen.clear()
        if self._is_mute or now < self._look_at:
            return ""
        self._look_at = now + limit_s / 10
        watched = range(self.flight.world_size) if self.flight.rank == 0 else (0,)
        silent = self._silent_ranks(self._last_beats(watched), limit_s)
        if not silent:
            return ""
        ranks = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
        return f"rank {ranks} has sent no heartbeat for {limit_s:g} s"

    def _mute_s(self) -> float:
        """Return for how many seconds the store has not answered."""
        return 0.0 if self._store is None else time.monotonic() - self._answered_at

    @property
    def _is_mute(self) -> bool:
        """Whether the store did not answer the last request."""
        return self._is_lost or self._mute_s() > 2 * self._beat_s + STORE_S

    def _mute_store(self) -> str:
        """Return which process hosts the store, if the store does not answer; else ""."""
        seconds, first = self._mute_s(), self.known.get(0)
        if first is None or not self._is_mute:
            return ""
        agent = first["agent"]
        process = first | {"pid": agent or first["pid"]}
        what = "torchrun's agent" if agent else "rank 0"
        how = {"dead": "has exited", "stopped": "is stopped by a signal"}.get(
            _state(process, self.flight.machine), "does not answer"
        )
        return (
            f"{what}, process {process['pid']} on {first['host']}, which hosts the run's store, "
            f"{how}; last answer of the store {seconds:.0f} s ago"
        )

    def _terminate(self, why: str) -> None:
        """Write the flight record and end this process."""
        _exit_later(EXIT_TERM)
        with self._lock:
            known = self._alarm
            if known is None:
                alarm = self._alarm = self._new_alarm(why)
                self._answered.clear()
        if known is not None:
            self._answered.wait(2 * GRACE_S)
        else:
            self._answer(alarm)
        logging.shutdown()
        os._exit(EXIT_TERM)

    # ---- an alarm

    def _new_alarm(self, reason: str) -> dict[str, Any]:
        return {"number": time.time(), "from": self.flight.rank, "reason": reason}

    def _call(self, alarm: Mapping[str, Any]) -> None:
        if self._store is None:
            return
        try:
            self._store.set("alarm", json.dumps(dict(alarm)))
        except Exception as error:  # The store raises errors of several types.
            self._note(error)

    def _answer(self, alarm: Mapping[str, Any]) -> None:
        """Write the flight record and wait for the other ranks' records. If no lower rank can
        report, report which rank is stuck."""
        try:
            self._answer_now(alarm)
        except Exception:  # A second error must not hide the reason of the alarm.
            log.exception("cannot make the flight record")
        finally:
            self._told = time.monotonic()
            self._alarms += 1
            self._answered.set()
            with self._lock:
                self._alarm = None

    def _answer_now(self, alarm: Mapping[str, Any]) -> None:
        # Clocks differ between nodes, and the files' times are later than this node's clock now.
        flight, begin = self.flight, min(alarm["number"], time.time())
        mine = alarm["from"] == flight.rank
        why = str(alarm["reason"]) if mine else f"alarm from rank {alarm['from']}"
        record = flight.record(why)
        if flight.write(why, record) is None:
            return
        log.debug("flight record written: %s", why)
        if flight.world_size == 1 and why.startswith("failed"):
            return  # A single rank cannot wait for another rank.
        assert flight.folder is not None  # A written record implies a folder.
        told = flight.folder / FOLDER / VERDICT
        # Rank 0 reports. If no report appears, rank 1 reports, then rank 2, then any other rank.
        if flight.rank == 0 or not _appears(told, begin, min(flight.rank, SPEAKERS) * GRACE_S):
            records, beats, states = self._gather(begin)
            if min(records, default=flight.rank) == flight.rank:
                self._speak(alarm, record, records, beats, states)
        flight.write(why, record | {"children": children_stacks()})

    def _speak(
        self,
        alarm: Mapping[str, Any],
        mine: Record,
        records: Mapping[int, Record],
        beats: Mapping[int, Mapping[str, Any]],
        states: Mapping[int, str],
    ) -> None:
        """Log which rank is stuck, and write the report next to the flight records."""
        flight = self.flight
        assert flight.folder is not None
        found = verdict.suspects(records, beats, flight.world_size, states)
        reason = f"rank {alarm['from']}: {alarm['reason']}"
        mute = self._mute_store()
        if mute and len(records) == flight.world_size:
            found = []  # All ranks run, and wait for the store.
        lines = verdict.table(records, beats, flight.world_size, found, reason, mute)
        lines.append(f"  stacks and last events: python -m rlcore doctor {flight.folder}")
        facts = {"time": alarm["number"], "lines": lines, "suspects": [s.rank for s in found]}
        (flight.folder / FOLDER / VERDICT).write_text(json.dumps(facts))
        if _is_plain(alarm, states, records, flight.world_size):
            at = mine["phase"] or "none", mine["step"]
            log.error("%s, in phase %s of step %d", alarm["reason"], *at)
        else:
            log.error("%s", "\n".join(lines))

    def _gather(
        self, begin: float
    ) -> tuple[dict[int, Record], dict[int, dict[str, Any]], dict[int, str]]:
        """Return the records of this alarm, the most recent heartbeats, and the state (`dead` or
        `stopped`) of ranks that wrote no record."""
        flight = self.flight
        assert flight.folder is not None
        end = time.monotonic() + GRACE_S
        beats, states = self._last_beats(), {}
        while True:
            fresh = [
                r
                for r in range(flight.world_size)
                if (path := record_path(flight.folder, r)).exists()
                and path.stat().st_mtime >= begin - 2 * self._beat_s
            ]
            missing = [r for r in range(flight.world_size) if r not in fresh]
            states = {r: s for r in missing if (s := _state(beats.get(r), flight.machine))}
            if len(states) == len(missing) or time.monotonic() > end:
                break
            time.sleep(0.1)
        found = verdict.read(flight.folder)
        return {r: found[r] for r in fresh if r in found}, beats, states

    def _last_beats(self, ranks: Iterable[int] | None = None) -> dict[int, dict[str, Any]]:
        """Return the most recent heartbeats of some ranks (default: all), as far as known."""
        ranks = range(self.flight.world_size) if ranks is None else ranks
        beats = {r: self.known[r] for r in ranks if r in self.known}
        beats[self.flight.rank] = self.flight.at
        if self._store is None:
            return beats
        for r in ranks:
            try:
                if self._store.check([f"beat/{r}"]):
                    beats[r] = json.loads(self._store.get(f"beat/{r}"))
            except ForgedValueError as error:
                log.debug("ignored the heartbeat of rank %d: %s", r, error)
            except Exception as error:  # The store raises errors of several types.
                self._note(error)
                break
        return beats

    def _poke(self) -> None:
        try:
            self._wake.send(b"\0")
        except OSError:  # If the socket is full or closed, the thread wakes anyway.
            return


def _alarm_of(text: bytes, world_size: int) -> dict[str, Any]:
    """Parse an alarm. Raise ValueError if its format is invalid, as from another rlcore version."""
    alarm = json.loads(text)
    match alarm:
        case {"number": float(n), "from": int(rank), "reason": str()} if (
            0 <= rank < world_size and math.isfinite(n)
        ):
            return alarm
    raise ValueError(f"the alarm is {str(alarm)[:80]}; expected number, rank and reason")


def _exit_later(code: int) -> None:
    """End this process after `END_S`, whatever its other threads wait for."""

    def wait_and_exit() -> None:
        time.sleep(END_S)
        os._exit(code)

    threading.Thread(target=wait_and_exit, name="exit", daemon=True).start()


def _appears(file: Path, begin: float, seconds: float) -> bool:
    """Wait up to `seconds` for a file newer than `begin`; return whether the file appeared."""
    end = time.monotonic() + seconds
    while not (file.exists() and file.stat().st_mtime >= begin - BEAT_S):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _forget(health: "weakref.ref[Health]") -> None:
    """Reset the signal handling of a forked child, such as a checkpoint writer, so that signals to
    the child do not count as signals to the rank."""
    found = health()
    if found is not None and not found._closed:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _is_plain(
    alarm: Mapping[str, Any], states: Mapping[int, str], records: Mapping[int, Record], size: int
) -> bool:
    """Return whether a SIGTERM is the alarm's only cause: all ranks wrote records, none failed."""
    return "SIGTERM" in alarm["reason"] and not states and len(records) == size


def _state(at: Mapping[str, Any] | None, machine: str) -> str:
    """Return `dead` or `stopped` if the rank's process is on this machine (`flight.machine`) and
    does not run; "" if it runs or is unknown."""
    if at is None or at["machine"] != machine:
        return ""
    try:
        status = psutil.Process(at["pid"]).status()
    except psutil.NoSuchProcess:
        return "dead"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "dead"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else ""


def meet(
    store: Any, at: Mapping[str, Any], size: int, timeout_s: float, clock: Callable[[], float]
) -> tuple[dict[int, dict[str, Any]], str]:
    """Wait until every rank has started. Return the state of each rank (as `FlightRecorder.at`) and
    a name for this start, unique in the store. `store`: has the methods of torch's store; `at`: the
    state of this rank.

    torchrun restarts ranks one by one, and its store keeps the entries of failed ranks. Rank 0
    therefore publishes the list of ranks after every change, until all listed ranks have answered.

    Raise TimeoutError with the ranks that have not started. Raise RuntimeError if another version
    of rlcore wrote a rank's entry.
    """
    rank, mine = at["rank"], json.dumps(dict(at) | {"process": uuid.uuid4().hex})
    keys = [f"here/{r}" for r in range(size)]
    store.set(keys[rank], mine)
    here: list[str] = []
    end, name = clock() + timeout_s, ""
    while True:
        if rank == 0 and store.check(keys):
            now = [text.decode(errors="replace") for text in store.multi_get(keys)]
            if now != here:
                name, here = uuid.uuid4().hex, now
                store.set("roll", json.dumps([name, here]))
        elif rank and store.check(["roll"]):
            name, here = _roll_of(store.get("roll"), size)
        if here and here[rank] == mine:
            store.set(f"yes/{name}/{rank}", "")
            if rank == 0 and store.check(_answers(name, size)):
                store.set(f"go/{name}", "")
            if store.check([f"go/{name}"]):
                return {r: _place_of(text, r, at) for r, text in enumerate(here)}, name
        if clock() > end:
            called = name if here and here[rank] == mine else ""
            raise TimeoutError(_not_there(store, size, called, timeout_s))
        time.sleep(0.02)


def _place_of(text: str, rank: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the state that a rank has published. `like`: this rank's state, with the same types."""
    try:
        place = json.loads(text)
    except ValueError:
        place = None
    if not isinstance(place, dict) or any(type(place.get(k)) is not type(like[k]) for k in like):
        raise RuntimeError(_unknown(rank))
    return place


def _roll_of(text: bytes, size: int) -> tuple[str, list[str]]:
    """Parse the list of ranks that rank 0 has published."""
    try:
        roll = json.loads(text)
    except ValueError:
        roll = None
    match roll:
        case [str(name), [*here]] if len(here) == size and all(isinstance(h, str) for h in here):
            return name, here
    raise RuntimeError(_unknown(0))


def _unknown(rank: int) -> str:
    return (
        f"start-up: rank {rank} sent an unknown message; use one version of rlcore on all nodes, "
        "and keep other programs off the run's store"
    )


def _answers(name: str, size: int) -> list[str]:
    return [f"yes/{name}/{r}" for r in range(size)]


def _not_there(store: Any, size: int, name: str, timeout_s: float) -> str:
    keys = _answers(name, size) if name else [f"here/{r}" for r in range(size)]
    # If every rank has answered, only rank 0's permission to start is missing, so name rank 0.
    missing = [r for r in range(size) if not store.check([keys[r]])] or [0]
    names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"start-up: rank {names} of {size} has not joined within --cluster.timeout_s "
        f"{timeout_s:g}; read the log of its node, and start all nodes with the same command"
    )
