"""Record a rank's most recent events, what the rank waits for, and the stacks of its threads.

`FlightRecorder` collects events in memory during the run. On an alarm (`utils/health.py`), the
record is written to `<run>/flight/rank<r>.json`. `utils/verdict.py` reads the records of all ranks.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from rlcore.records import (
    Aborted,
    AnyCommand,
    AnyEvent,
    Down,
    EndRound,
    Finished,
    Hold,
    LengthReport,
    Moved,
    Released,
    Rewarded,
    Stats,
    Submit,
    group_of,
)
from rlcore.utils.log import log

FOLDER = "flight"
KEPT_EVENTS = 200
KEPT_COLLECTIVES = 20
MOST_REQUESTS = 500
PY_SPY_S = 10.0

Record = dict[str, Any]


def has_agent() -> bool:
    """Whether torchrun's agent hosts the run's store; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class FlightRecorder:
    """Flight recorder of one rank. `phase` can be a listener of `Spans`, `see` an observer of
    `RolloutWorker`. Only the main thread calls these two; any thread may call the other methods."""

    def __init__(self, rank: int, world_size: int, folder: Path | None):
        """`folder`: the run's folder; None: write no records."""
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self._step: Callable[[], int] = lambda: 0
        self.host, self.pid, self.machine = socket.gethostname(), os.getpid(), machine()
        self.agent = os.getppid() if has_agent() else 0
        """Process id of torchrun's agent, whose first one hosts the run's store; 0 without it."""
        self._changed: Callable[[], None] = lambda: None
        self._phase, self._since = "start", time.time()
        self._events: deque[tuple[float, str]] = deque(maxlen=KEPT_EVENTS)
        self._open: dict[str, tuple[str, float]] = {}

    @property
    def at(self) -> dict[str, Any]:
        """Current state of the rank: the contents of a heartbeat."""
        return {
            "rank": self.rank,
            "host": self.host,
            "machine": self.machine,
            "pid": self.pid,
            "agent": self.agent,
            "time": time.time(),
            "phase": self._phase,
            "since": self._since,
            "step": self._step(),
        }

    def watch_step(self, step: Callable[[], int]) -> None:
        """Use the function `step` from now on to get the number of the current step."""
        self._step = step

    def on_phase(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever the phase changes."""
        self._changed = changed

    def phase(self, name: str) -> None:
        """Enter a phase of the run ("": no phase). Repeating the current phase changes nothing."""
        if name != self._phase:
            self._phase, self._since = name, time.time()
            self.note(f"phase {name or 'none'}")
            self._changed()

    def note(self, text: str) -> None:
        """Add an event to the record."""
        self._events.append((time.time(), text))

    def see(self, what: AnyCommand | AnyEvent) -> None:
        """Record a command that the worker executes or an event that the worker sends."""
        now = time.time()
        if isinstance(what, Submit):
            self._open |= dict.fromkeys((r.id for r in what.requests), ("decoding", now))
            self.note(f"{len(what.requests)} requests submitted, first {what.requests[0].id}")
        elif isinstance(what, Finished):
            if what.id in self._open:  # false if a `Hold` has removed the group
                self._open[what.id] = ("reward", now)
        elif isinstance(what, Moved):
            for id in what.partials:
                self._open.pop(id, None)
        elif isinstance(what, Hold):
            gone = set(what.forget)
            self._open = {i: at for i, at in self._open.items() if group_of(i) not in gone}
            self.note("Hold")
        elif isinstance(what, Aborted | Rewarded):
            self._open.pop(what.id, None)
        elif isinstance(what, Released | EndRound):
            self._open.clear()
            self.note(type(what).__name__)
        elif isinstance(what, Down):
            self._open.clear()
            self.note(f"engine failed: {what.reason}")
        elif not isinstance(what, LengthReport | Stats):
            self.note(type(what).__name__)

    def record(self, reason: str) -> Record:
        """Return a record of everything known about this rank. `reason`: cause of the record."""
        frames, threads = sys._current_frames(), {}
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            if frame is not None:
                threads[thread.name] = "".join(traceback.format_stack(frame))
        main = frames.get(threading.main_thread().ident or 0)
        opened = list(self._open.items())[:MOST_REQUESTS]
        return self.at | {
            "world_size": self.world_size,
            "reason": reason,
            "where": _where(main),
            "waits": _waits(main),
            "open": [[i, what, since] for i, (what, since) in opened],
            "num_open": len(self._open),
            "events": list(self._events),
            "collectives": collectives(),
            "stacks": threads,
            "memory_gb": psutil.Process().memory_info().rss / 1e9,
        }

    def write(self, reason: str, found: Record | None = None) -> Path | None:
        """Write the record `found`, or a new record. Return its path; None without a folder, and
        if the record cannot be written. The log then has the reason and why it cannot."""
        if self.folder is None:
            return None
        path = record_path(self.folder, self.rank)
        part = path.with_suffix(".part")
        text = json.dumps(found or self.record(reason), default=str)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text)
            os.replace(part, path)
        except OSError as error:
            log.error("%s; cannot write the flight record %s (%s)", reason, path, error.strerror)
            return None
        return path


def machine() -> str:
    """Return boot id and pid namespace, which identify the machine or container in which process
    ids are unique. Containers on several machines may share a host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # If the machine is unknown, treat this process as alone on its machine.
        return uuid.uuid4().hex


def record_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's flight record. `folder`: the run's folder."""
    return folder / FOLDER / f"rank{rank}.json"


def children_stacks() -> dict[str, str]:
    """Return the stacks of this rank's child processes (engine, rewards) by description of the
    child. If py-spy is not installed, return a note instead of each stack."""
    py_spy = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    found, end = {}, time.monotonic() + PY_SPY_S
    for child in psutil.Process().children():
        try:
            name = f"{child.pid} {' '.join(child.cmdline())[-60:]} ({child.status()})"
        except psutil.NoSuchProcess:
            continue
        if not Path(py_spy).exists():
            found[name] = "no stack: py-spy is not installed, run bash tools/setup.sh --test"
            continue
        try:
            done = subprocess.run(
                [py_spy, "dump", "--nonblocking", "--pid", str(child.pid)],
                capture_output=True,
                text=True,
                timeout=max(0.1, end - time.monotonic()),
            )
            found[name] = done.stdout or done.stderr
        except subprocess.TimeoutExpired:
            found[name] = f"no stack: py-spy took longer than {PY_SPY_S:g} s"
    return found


def collectives() -> dict[str, Any]:
    """Read torch's own flight recorder: the number of collectives that this rank has entered in
    each process group, and the most recent collectives. Empty if TORCH_FR_BUFFER_SIZE is 0."""
    c10d = sys.modules.get("torch._C._distributed_c10d") or _c10d()
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            entries += json.loads(dump(True, False) or "{}").get("entries", [])
    groups: dict[str, dict[str, Any]] = {}
    for e in entries:
        group = ":".join(map(str, e.get("process_group", ["?"])))
        entered = groups.setdefault(group, {"entered": 0})
        entered["entered"] = max(entered["entered"], int(e.get("collective_seq_id", 0)))
    last = [
        f"#{e.get('collective_seq_id')} {e.get('profiling_name')} {e.get('input_sizes')} "
        f"in group {':'.join(map(str, e.get('process_group', [])))}"
        for e in entries[-KEPT_COLLECTIVES:]
    ]
    return {"groups": groups, "last": last}


def _c10d() -> Any:
    torch = sys.modules.get("torch")  # Before torch is imported, there are no collectives.
    return getattr(getattr(torch, "_C", None), "_distributed_c10d", None)


def _where(frame: FrameType | None) -> str:
    """Return the innermost line of the stack of `frame` that is not in a library."""
    innermost = frame
    while frame is not None:
        name = frame.f_code.co_filename
        library = name.startswith(("<frozen", os.path.dirname(os.__file__)))
        if not (library or "site-packages" in name or os.path.basename(name) in OURS):
            break
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return ""
    file = "/".join(Path(found.f_code.co_filename).parts[-3:])
    return f"{file}:{found.f_lineno} in {found.f_code.co_name}"


WAITS = {
    "distributed_c10d.py": "a collective",
    "collective.py": "a collective",
    "transport.py": "a message from another rank",
    "child.py": "its engine process",
    "rendezvous.py": "the start of the other ranks",
    "peers.py": "a message from another rank",
    "timed_store.py": "the run's store",
    "_store_based_barrier": "the start of the other ranks",
}


OURS = ("flight_recorder.py", "health.py", "timed_store.py")
"""Files whose frames do not show what the rank was doing: they make the record, or only wait."""


def _waits(frame: FrameType | None) -> str:
    """Return what the main thread waits for, according to its innermost four frames; "" if none of
    them is a known wait."""
    for _ in range(4):
        if frame is None:
            break
        file = os.path.basename(frame.f_code.co_filename)
        if file in WAITS:
            return WAITS[file]
        frame = frame.f_back
    return ""
