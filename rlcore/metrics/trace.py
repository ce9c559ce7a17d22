"""Write traces of runs and simulations for ui.perfetto.dev and chrome://tracing.

A trace is a list of Chrome trace events. A process of the trace is a rank, or a variant of a
simulation. A process has rows of bars, bundles of overlapping intervals (responses in flight,
rewards), and counters. Each rank of a run writes `<run>/trace/rank<r>.jsonl`, on rank 0's clock;
`merge` joins the files.

Own code instead of Perfetto's SDK: the standard library's JSON serves runs and simulations.
"""

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlcore.metrics.jsonl import dumps, read_lines, write_atomic
from rlcore.records import (
    Abort,
    Aborted,
    AnyCommand,
    AnyEvent,
    Down,
    EndRound,
    Finished,
    Hold,
    Moved,
    Preempted,
    Released,
    Rewarded,
    Stats,
    Submit,
    Trained,
    group_of,
)
from rlcore.utils.errors import ConfigError
from rlcore.utils.writes import LogWrites

FOLDER = "trace"
Event = dict[str, Any]
PHASES_ROW = 0
MARKS_ROW = 1


def process(pid: int, name: str) -> Event:
    """Make the trace event that names a process."""
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def row(pid: int, tid: int, name: str) -> Event:
    """Make the trace event that names a row of bars."""
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def bar(pid: int, tid: int, name: str, start: float, seconds: float, **facts: object) -> Event:
    """Make the event of a bar; `start` is in seconds from the start of the trace. Bars may nest."""
    at, took = _us(start), _us(seconds)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": at, "dur": took, "args": facts}


def mark(pid: int, tid: int, name: str, at: float, **facts: object) -> Event:
    """Make the event of a mark at the time `at`, in seconds from the start of the trace."""
    return {
        "ph": "i",
        "s": "t",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": _us(at),
        "args": facts,
    }


def overlapping(
    pid: int, name: str, number: int, start: float, end: float, **facts: object
) -> list[Event]:
    """Make the events of an interval that may overlap other intervals. Intervals of one name are
    shown in one bundle. `number`: unique id of the interval."""
    both = {"cat": name, "name": name, "id": number, "pid": pid, "tid": 0}
    first = {"ph": "b", "ts": _us(start), "args": facts}
    return [both | first, both | {"ph": "e", "ts": _us(end)}]


def counter(pid: int, name: str, at: float, **values: float) -> Event:
    """Make the event that sets a counter's values from `at` on; the values are shown stacked."""
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(at), "args": values}


def save(path: Path, events: Iterable[Event]) -> None:
    """Write a trace file."""
    body = {"traceEvents": list(events), "displayTimeUnit": "ms"}
    write_atomic(path, json.dumps(body, allow_nan=False) + "\n")


def merge(run_dir: Path, out: Path | None = None) -> tuple[Path, int]:
    """Merge the ranks' files into `<run_dir>/trace.json`, or `out`, on one time axis from 0. Return
    the path and the number of ranks. Raise ConfigError if there is no trace."""
    files = sorted((run_dir / FOLDER).glob("rank*.jsonl"))
    events: list[Event] = [event for file in files for event in read_lines(file)]
    start = min((e["ts"] for e in events if "ts" in e), default=None)
    if start is None:
        raise ConfigError(
            f"{run_dir}: no trace in this folder; set --log.trace_steps 3 to trace three steps, -1 "
            "for all"
        )
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - start, 1)
    path = out or run_dir / "trace.json"
    save(path, events)
    return path, len(files)


class RunTrace:
    """Trace file of one rank of a run. The main thread calls `phase` and `see`. Nothing is written
    outside of the traced steps."""

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        host: str,
        offset_s: float,
        steps: int,
        writes: LogWrites | None = None,
    ):
        """`offset_s`: seconds by which this machine's clock is behind rank 0's. `steps`: number of
        steps to trace from the start of this process; -1: all steps. `writes`: what to do if a
        write fails; None: raise."""
        self._path = run_dir / FOLDER / f"rank{rank}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a")
        self._writes = writes or LogWrites()
        self._rank, self._left = rank, steps
        self._wall = time.time() - time.monotonic() + offset_s
        self._submitted: dict[str, float] = {}
        self._finished: dict[str, float] = {}
        self._number = 0
        self._write(
            process(rank, f"rank {rank} ({host})"),
            row(rank, PHASES_ROW, "phases"),
            row(rank, MARKS_ROW, "engine"),
        )

    def phase(self, name: str, start: float, end: float, step: int) -> None:
        """Write a finished phase; `start` and `end` are times of the monotonic clock."""
        if self._left:
            self._write(
                bar(self._rank, PHASES_ROW, name, self._wall + start, end - start, step=step)
            )
        if name == "step":
            self._left -= self._left > 0
            with self._writes.to(self._path):
                self._file.flush()

    def see(self, what: AnyCommand | AnyEvent) -> None:
        """Write a command that the rank's worker received, or an event that the worker sent."""
        now = time.monotonic()
        if not self._left:
            return
        if isinstance(what, Submit):
            self._submitted |= dict.fromkeys((r.id for r in what.requests), now)
        elif isinstance(what, Finished | Aborted):
            start = self._submitted.pop(what.id, None)
            finish = what.finish if isinstance(what, Finished) else "abort"
            facts = {"id": what.id, "tokens": what.num_tokens, "finish": finish}
            self._bundle("response", now if start is None else start, now, **facts)
            if isinstance(what, Finished) and start is not None:  # None: a `Hold` has removed it
                self._finished[what.id] = now
        elif isinstance(what, Rewarded):
            start = self._finished.pop(what.id, now)
            score = {"score": what.result.score, "error": what.result.error}
            self._bundle("reward", start, now, id=what.id, **score)
        elif isinstance(what, Stats):
            at = self._wall + now
            load = counter(self._rank, "requests", at, running=what.running, waiting=what.waiting)
            self._write(load, counter(self._rank, "cache", at, used=what.cache_used))
        elif isinstance(what, Released):
            for i in what.partials:
                self._submitted.pop(i, None)
            self._mark("released", now, requests=len(what.partials))
        elif isinstance(what, Moved):
            for i in what.partials:
                self._submitted.pop(i, None)
            self._mark("moved", now, requests=len(what.partials))
        elif isinstance(what, EndRound | Hold):  # requests that ended unseen or are not needed
            gone = set(what.forget) if isinstance(what, Hold) else None
            for times in (self._submitted, self._finished):
                for i in [i for i in times if gone is None or group_of(i) in gone]:
                    del times[i]
        elif isinstance(what, Down):
            self._mark("engine failed", now, reason=what.reason)
        elif isinstance(what, Preempted):
            self._mark("preempted", now, id=what.id)
        elif isinstance(what, Abort):
            self._mark("abort", now, requests=len(what.ids))
        elif isinstance(what, Trained):
            self._mark("trained", now, seconds=what.seconds)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with suppress(OSError):  # Its last write has failed already.
            self._file.close()

    def _bundle(self, name: str, start: float, end: float, **facts: object) -> None:
        self._number += 1
        begin, over = self._wall + start, self._wall + end
        self._write(*overlapping(self._rank, name, self._number, begin, over, **facts))

    def _mark(self, name: str, at: float, **facts: object) -> None:
        self._write(mark(self._rank, MARKS_ROW, name, self._wall + at, **facts))

    def _write(self, *events: Mapping[str, Any]) -> None:
        with self._writes.to(self._path):
            self._file.write("".join(dumps(event) + "\n" for event in events))


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
