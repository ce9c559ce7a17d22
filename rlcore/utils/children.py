"""Start child processes of rlcore, exchange frames with them, detect their exit, and end them.

Every child has one `Channel` to its parent: a socket pair with the frames of `utils/net.py`. In the
parent, `Child` represents a child that runs rlcore's own code (an engine). `GuardedChild` runs
users' code, which may hang, crash or loop: rewards, judges, environments. The child process first
calls `open_channel` or `open_guarded_channel`, which tie it to its parent: no child outlives its
parent, even if the child hangs or is stopped by a signal.

Some processes do not use this module. SGLang starts its schedulers itself, and ties them likewise.
Programs in the sandbox need their stdin and stdout (`sandbox/isolation.py`). CUDA MPS is NVIDIA's
daemon, and outlives the rank that started it, since other ranks use it. Redis and the arbiter of
`rlcore mux` serve several jobs and end with `mux down`.

Own code instead of `multiprocessing`: a child is ended together with all processes it started.
"""

import contextlib
import ctypes
import faulthandler
import os
import queue
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from rlcore.utils import guard
from rlcore.utils.log import log
from rlcore.utils.net import LARGEST_FRAME, Frames
from rlcore.utils.process_tree import MARK, end_tree, has_exited

ERROR_CHARS = 300
_READ_BYTES, _MOST_READS = 1 << 18, 64
_STUCK_S = 24 * 3600.0
_TAIL_BYTES = 4096
_LOG_BYTES = 4 << 20
_SHOWN_LINES, _SHOWN_CHARS = 12, 160
_KILL_S = 2.0
_ROOT = Path(__file__).parents[2]
_PYTHON = (sys.executable, "-P", "-X", "faulthandler", "-m")
_STACK_S = 0.2
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
_LAUNCHER_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Channel:
    """One end of the stream of frames between a process and its child. One thread may send while
    another thread receives."""

    def __init__(self, end: socket.socket, largest: int = LARGEST_FRAME) -> None:
        """`largest`: maximum size of a received frame, in bytes."""
        end.setblocking(False)
        self._end, self._frames, self._queue = end, Frames(largest), bytearray()

    def fileno(self) -> int:
        """Return the socket's file descriptor, for selectors."""
        return self._end.fileno()

    def send(self, frame: bytes | bytearray, timeout_s: float = _STUCK_S) -> None:
        """Write a whole frame (`net.frame`). Raise TimeoutError if the other side does not read the
        frame in time, OSError if the other side is closed."""
        end, rest = time.monotonic() + timeout_s, memoryview(frame)
        while rest:
            try:
                rest = rest[self._end.send(rest) :]
            except BlockingIOError:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError("the other process did not read the frame in time") from None
                self._wait(select.POLLOUT, left)

    def queue(self, frames: bytes | bytearray) -> None:
        """Append frames to the queue that `flush` writes."""
        self._queue += frames

    def flush(self) -> bool:
        """Write as much of the queue as fits without waiting; return whether any bytes are left."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._queue:
                del self._queue[: self._end.send(self._queue)]
        return bool(self._queue)

    def receive(self, timeout_s: float | None = 0.0) -> Iterator[bytes]:
        """Yield the bodies of the frames that have arrived. If no frame has arrived, wait up to
        `timeout_s` for more bytes (None: no limit). Raise EOFError at the end of the stream,
        ValueError for an invalid frame. Bodies that the caller does not consume are yielded by the
        next call."""
        for body in self._frames.feed(b""):
            timeout_s = 0.0
            yield body
        waits = timeout_s is None or timeout_s > 0
        if waits and not self._wait(select.POLLIN, timeout_s):
            return
        for _ in range(_MOST_READS):  # Endless incoming data must not block the caller.
            try:
                data = self._end.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            yield from self._frames.feed(data)

    def first(self) -> bytes:
        """Wait for the first frame and return its body. Raise EOFError at the end of the stream."""
        while (body := next(self.receive(None), None)) is None:
            pass
        return body

    def close(self) -> None:
        """Close this end, so that the other side reads the end of the stream. Idempotent."""
        self._end.close()

    def _wait(self, event: int, timeout_s: float | None) -> bool:
        # select() would fail above descriptor 1024, and CUDA and NCCL open hundreds.
        poll = select.poll()
        poll.register(self._end, event)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


class _Starter:
    """Starts the children of this process in a thread that never exits: the kernel kills a tied
    child when the *thread* that started it exits, and a child may serve several threads."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock, self._started = threading.Lock(), False
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], Any]]] = queue.SimpleQueue()

    def run(self, start: Callable[[], subprocess.Popen]) -> subprocess.Popen:
        """Return `start()`, or raise what it raises."""
        with self._lock:
            if not self._started:
                threading.Thread(target=self._serve, name="children", daemon=True).start()
                self._started = True
        found: Future[subprocess.Popen] = Future()
        self._calls.put((found, start))
        return found.result()

    def _serve(self) -> None:
        while True:
            found, start = self._calls.get()
            try:
                found.set_result(start())
            except BaseException as error:
                found.set_exception(error)
            del found, start  # The next call may be hours away.


_starter = _Starter()


class Child:
    """A child process and its channel. The child shares its parent's stdout and stderr. Only one
    thread at a time may use this object."""

    exit_s = 5.0
    """Seconds to wait for the child's exit."""

    def __init__(
        self,
        module: str,
        *,
        threads: int = 1,
        env: Mapping[str, str] | None = None,
        largest: int = LARGEST_FRAME,
        **options: Any,
    ) -> None:
        """Start `python -m module DESCRIPTOR PARENT`.

        Args:
            threads: OMP_NUM_THREADS of the child; a rank may have many children.
            env: the child's other environment variables; None: those of this process.
            largest: maximum size of a frame from the child, in bytes.
            options: further arguments of `subprocess.Popen`.
        """
        self.started = time.monotonic()
        env = dict(os.environ if env is None else env)
        paths = [str(_ROOT), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        env |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
        ours, theirs = socket.socketpair()
        with theirs:
            command = [*_PYTHON, module, str(theirs.fileno()), str(os.getpid())]
            options |= {"stdin": subprocess.DEVNULL, "pass_fds": (theirs.fileno(),), "env": env}
            self.process = _starter.run(lambda: self._popen(command, **options))
        self.channel = Channel(ours, largest)

    def _popen(self, command: list[str], **options: Any) -> subprocess.Popen:
        return subprocess.Popen(command, **options)

    def end(self, exiting: bool = False) -> int | None:
        """Close the channel and kill the child. Return the exit status; None if the child still
        runs. With `exiting`, first wait `exit_s` for the child to exit with its own status."""
        self.channel.close()
        status = self._wait(self.exit_s) if exiting else None
        if status is None:
            self.process.kill()
            status = self._wait(self.exit_s)
        return status

    def _wait(self, timeout_s: float) -> int | None:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


class Selector(Protocol):
    """Methods of `selectors.BaseSelector` that a guarded child needs."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any: ...

    def modify(self, fileobj: Any, events: int, data: Any = None) -> Any: ...

    def unregister(self, fileobj: Any) -> Any: ...

    def get_key(self, fileobj: Any) -> selectors.SelectorKey: ...


class GuardedChild(Child):
    """A child that runs users' code. The parent reads the child's output from a pipe. The child is
    killed together with every process that it started."""

    exit_s = 0.2

    def __init__(
        self,
        selector: Selector,
        start: bytes | bytearray,
        sink: Callable[[bytes], None],
        module: str,
    ) -> None:
        """`start`: first frame for the child. `sink`: function called with the child's output.
        `selector`: watches channel and output, with data (child, "channel" or "output")."""
        self.tail = b""
        self._selector, self._sink = selector, sink
        self._mark = uuid.uuid4().hex
        self._output, write_end = os.pipe()
        try:
            super().__init__(
                module,
                env=os.environ | {MARK: self._mark},
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        os.set_blocking(self._output, False)
        selector.register(self.channel, selectors.EVENT_READ, (self, "channel"))
        selector.register(self._output, selectors.EVENT_READ, (self, "output"))
        self._output_open = True
        self.send(start)

    def send(self, frames: bytes | bytearray) -> None:
        """Queue frames for the child; never waits."""
        self.channel.queue(frames)
        self.flush()

    def flush(self) -> None:
        """Write queued frames without waiting; the selector reports when more can be written."""
        more = self.channel.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
        if self._selector.get_key(self.channel).events != events:
            self._selector.modify(self.channel, events, (self, "channel"))

    def read_output(self) -> None:
        """Read one chunk of output. A child that prints faster than the parent reads is blocked."""
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
        """Return the last part of the child's output."""
        return self.tail.decode("utf-8", "replace")

    def _close_output(self) -> None:
        if self._output_open:
            self._output_open = False
            self._selector.unregister(self._output)
            os.close(self._output)

    def rss(self) -> int:
        """Return the child's resident memory in bytes; 0 if it has exited."""
        try:
            text = Path(f"/proc/{self.process.pid}/statm").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def print_stack(self) -> None:
        """Make the child print its current stack, for the log of a time-out. The child may have
        moved on since the time-out."""
        seen = self.tail
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        end = time.monotonic() + _STACK_S
        while self.tail == seen and self._output_open and time.monotonic() < end:
            time.sleep(0.005)
            self.read_output()

    def end(self, exiting: bool = False) -> int | None:
        """End the child as `Child.end` does, and kill every process that it started."""
        deadline = time.monotonic() + self.exit_s
        while exiting and not has_exited(self.process) and time.monotonic() < deadline:
            time.sleep(0.001)
        self._selector.unregister(self.channel)
        self.channel.close()
        end_tree(self.process, self._mark)
        status = self._wait(_KILL_S)
        if status is None:
            log.error("child process %d is still running after SIGKILL", self.process.pid)
        self.read_output()  # One read is enough to empty a pipe.
        self._close_output()
        return status


class CappedLog:
    """A log file for the output of children, at most 4 MiB."""

    def __init__(self, file: Path | None, name: str) -> None:
        """`file`: log file; None discards the output. `name`: for the warning if writing fails."""
        self._file, self._name = file, name
        self._room = _LOG_BYTES if file is not None else 0
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)

    def write(self, data: bytes) -> None:
        """Append as much of `data` as fits."""
        if self._file is None or self._room <= 0:
            return
        data = data[: self._room]
        self._room -= len(data)
        if not self._room:
            data += f"\n(cut after {_LOG_BYTES} bytes)\n".encode()
        try:
            with self._file.open("ab") as file:
                file.write(data)
        except OSError as error:  # A full disk must not stop the children.
            self._room = 0
            log.warning("%s: cannot write %s: %s", self._name, self._file, error)


def without_launcher() -> dict[str, str]:
    """Return the environment without torchrun's variables, for a child that is not a rank."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER and not name.startswith(_LAUNCHER_PREFIXES)
    }


def open_channel(largest: int = LARGEST_FRAME) -> Channel:
    """Tie this child to its parent (`tie`), and open its channel. The child's own children do not
    inherit the channel."""
    tie(parent_pid())
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    os.register_at_fork(after_in_child=end.close)
    return Channel(end, largest)


def parent_pid() -> int:
    """Return the process id of the parent of this child."""
    return int(sys.argv[2])


def open_guarded_channel(name: str, *, all_threads: bool = True) -> Channel:
    """In a guarded child: tie the child to its parent, and open the channel. Adopt orphans of the
    child's own children, and keep users' code from killing the trainer.

    Args:
        name: name of the child in warnings.
        all_threads: whether a time-out prints the stacks of all threads, or of the current one.
    """
    channel, parent = open_channel(), parent_pid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: None)  # Ignore the SIGTERM that Slurm sends children.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    if why := guard.protect([1, *guard.ancestors(parent), os.getpgid(parent)]):
        print(f"{name}: cannot be prevented from killing the trainer ({why})", file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, all_threads=all_threads)
    return channel


def tie(parent: int) -> None:
    """Make the kernel kill this process when the thread of `parent` that started it exits (a child
    of this module: with `parent`). SIGKILL also ends a process that hangs or is stopped by a
    signal. If `parent` has already exited, exit.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # The parent exited before prctl took effect.
        sys.exit(1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def last_lines(printed: str) -> str:
    """Return the last lines of printed text, indented and cut to a readable length."""
    lines = printed.strip().splitlines()[-_SHOWN_LINES:]
    return "".join(f"\n    {line[:_SHOWN_CHARS]}" for line in lines) or " nothing"


def exit_text(status: int | None) -> str:
    """Describe how a process ended, from the status of `Child.end`."""
    if status is None:
        return "still running after SIGKILL"
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def sentence(error: BaseException) -> str:
    """Return type and first line of an error, such as `ZeroDivisionError: division by zero`."""
    try:
        text = str(error)
    except Exception:  # The exception's own __str__ may fail.
        text = ""
    first = text.strip().partition("\n")[0].encode("utf-8", "replace").decode()
    name = type(error).__name__
    return f"{name}: {first}"[:ERROR_CHARS] if first else name
