"""A child process of a rank that runs what may hang, crash or loop: start it, talk to it, end it
with all that it started.

Used by rewards and environments. The parent's side is `Child`; in the child `tie_to` comes first.

Own code instead of `multiprocessing`: a child is ended together with all that it started.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rlcore.utils import guard
from rlcore.utils.log import log
from rlcore.utils.net import Frames

MARK = "RLCORE_CHILD"
"""Environment variable whose value is unique to a child: every process that it starts inherits it,
so that all of them are found when it ends, whatever group, session or parent they have moved to."""
ERROR_CHARS = 300
_READ_BYTES = 1 << 18
_TAIL_BYTES = 4096
_SHOWN_LINES, _SHOWN_CHARS = 12, 160
_KILL_S = 2.0
_ROOT = Path(__file__).parents[2]
_PYTHON = (sys.executable, "-P", "-X", "faulthandler", "-m")
_STACK_S = 0.2
_EXIT_S = 0.2
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Selector(Protocol):
    """What a child needs of `selectors.BaseSelector`."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any: ...

    def modify(self, fileobj: Any, events: int, data: Any = None) -> Any: ...

    def unregister(self, fileobj: Any) -> Any: ...

    def get_key(self, fileobj: Any) -> selectors.SelectorKey: ...


class Child:
    """A child and its pipes. Lives in one thread, with which it dies: no locks."""

    def __init__(
        self,
        selector: Selector,
        start: bytes,
        sink: Callable[[bytes], None],
        module: str,
    ) -> None:
        """`start` is the first frame, `sink` takes what the child prints, `module` is what it runs,
        with the number of its channel and our process id as arguments."""
        self.started = time.monotonic()
        self.frames = Frames()
        self.tail = b""
        self._out = bytearray()
        self._selector, self._sink = selector, sink
        self._mark = uuid.uuid4().hex
        ours, theirs = socket.socketpair()
        self._output, write_end = os.pipe()
        env = os.environ | {
            MARK: self._mark,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *_old_path()]),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",  # a rank may have many children
        }
        with theirs:
            self.process = subprocess.Popen(
                [*_PYTHON, module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=env,
            )
        os.close(write_end)
        self._channel = ours
        ours.setblocking(False)
        os.set_blocking(self._output, False)
        selector.register(ours, selectors.EVENT_READ, (self, "channel"))
        selector.register(self._output, selectors.EVENT_READ, (self, "output"))
        self._output_open = True
        self.send(start)

    def send(self, data: bytes) -> None:
        """Queue bytes for the child."""
        self._out += data
        self.flush()

    def flush(self) -> None:
        """Write what the child takes; the rest goes when it reads on."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._out:
                del self._out[: self._channel.send(self._out)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if self._selector.get_key(self._channel).events != events:
            self._selector.modify(self._channel, events, (self, "channel"))

    def read(self) -> bytes | None:
        """What the child has sent; None where there is nothing now, b"" where there will be no
        more."""
        try:
            return self._channel.recv(_READ_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return b""

    def read_output(self) -> None:
        """Take what the child has printed; one piece a call, so that a flood waits in its pipe."""
        if not self._output_open:
            return
        try:
            data = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._close_output()
            return
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        self._sink(data)

    def printed(self) -> str:
        """The end of what the child has printed."""
        return self.tail.decode("utf-8", "replace")

    def _close_output(self) -> None:
        if self._output_open:
            self._output_open = False
            self._selector.unregister(self._output)
            os.close(self._output)

    def rss(self) -> int:
        """Bytes of memory that the child holds; 0 once it is dead."""
        try:
            text = Path(f"/proc/{self.process.pid}/statm").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def print_stack(self) -> None:
        """Let the child print where it is, for the log of a time-out; it may be past that."""
        seen = self.tail
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        end = time.monotonic() + _STACK_S
        while self.tail == seen and self._output_open and time.monotonic() < end:
            time.sleep(0.005)
            self.read_output()

    def end(self, exiting: bool = False) -> int | None:
        """Kill the child and every process that it started; its exit status, None if it does not
        die. `exiting` gives it a moment to end by itself, so that the status is its own."""
        deadline = time.monotonic() + _EXIT_S
        while exiting and not is_dead(self.process) and time.monotonic() < deadline:
            time.sleep(0.001)
        self._selector.unregister(self._channel)
        self._channel.close()
        end_tree(self.process, self._mark)
        try:
            status = self.process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            log.error("child %d does not die of SIGKILL", self.process.pid)
            status = None
        self.read_output()  # a pipe holds no more than one piece
        self._close_output()
        return status


def tie_to(parent: int, name: str) -> None:
    """In the child: die when the parent's thread that started us dies; adopt the processes that our
    own children orphan; keep what runs here from killing the trainer. `name` is for sentences."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_PDEATHSIG, signal.SIGKILL), (_PR_SET_CHILD_SUBREAPER, 1)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {option}")
    signal.signal(signal.SIGTERM, lambda *_: None)  # Slurm sends it to all; the parent decides
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    if os.getppid() != parent:  # it died before we could ask to be told
        sys.exit(1)
    if why := guard.protect([1, *guard.ancestors(parent), os.getpgid(parent)]):
        print(f"{name}: nothing keeps it from killing the trainer ({why})", file=sys.stderr)


def last_lines(printed: str) -> str:
    """The end of what was printed, indented; each line cut to a readable length."""
    lines = printed.strip().splitlines()[-_SHOWN_LINES:]
    return "".join(f"\n    {line[:_SHOWN_CHARS]}" for line in lines) or " nothing"


def _old_path() -> list[str]:
    old = os.environ.get("PYTHONPATH", "")
    return [old] if old else []


def is_dead(process: subprocess.Popen) -> bool:
    """Whether it has ended; its number stays its own until `process.wait`."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def end_tree(process: subprocess.Popen, mark: str) -> None:
    """SIGKILL for `process`, its descendants, and every process that carries its mark. The process
    itself is stopped first and killed last: it adopts orphans, so that none gets out of sight."""
    if not is_dead(process):
        os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + _KILL_S
    while victims := _family(process.pid, mark) - {process.pid}:
        for pid in victims:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            log.error("processes %s do not die of SIGKILL", sorted(victims)[:5])
            break
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # not yet waited for: the number is still its own


def _family(root: int, mark: str) -> set[int]:
    """Living descendants of `root` and living processes with the mark in their environment."""
    needle = f"{MARK}={mark}".encode()
    parent_of: dict[int, int] = {}
    marked: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
            if stat[0] in (b"Z", b"X"):
                continue
            parent_of[pid] = int(stat[1])
            if needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                marked.add(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return {pid for pid in parent_of if pid in marked or _descends(pid, root, parent_of)}


def _descends(pid: int, root: int, parent_of: dict[int, int]) -> bool:
    while pid in parent_of:
        pid = parent_of[pid]
        if pid == root:
            return True
    return False


def exit_text(status: int | None) -> str:
    """How a process ended, from `Child.end`."""
    if status is None:
        return "does not die"
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def sentence(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero`: type and first line."""
    try:
        text = str(error)
    except Exception:  # an exception whose own __str__ fails
        text = ""
    first = text.strip().partition("\n")[0].encode("utf-8", "replace").decode()
    name = type(error).__name__
    return f"{name}: {first}"[:ERROR_CHARS] if first else name
