"""An engine in a process of its own: it decodes without waiting for `poll`, and its death is an
event instead of the end of the run.

The parent holds one end of a socket pair and the child the other; messages are msgpack
(`utils/net.py`), each behind its length. The child serves calls between two decode steps, pushes
events as they come, and ends when its parent does. It imports the engine and what the engine needs,
nothing of the program that started it.

An error in a call is the answer to it, but for three that end the child and leave a `Down`: an
`EngineGoneError`, an engine that does not start, and whatever `poll` raises.
"""

import importlib
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np

import rlcore
from rlcore.records import (
    Aborted,
    AnyEvent,
    Bucket,
    Down,
    Finished,
    History,
    Partial,
    Progress,
    Request,
    RequestId,
)
from rlcore.rollout.gone import EngineGoneError
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log
from rlcore.utils.net import decode, encode

if TYPE_CHECKING:  # it imports torch, which only some engines need
    from rlcore.protocols import Engine, PauseMode, Tag

_POLL_S = 0.02  # of the child's engine: a call waits at most this long when nothing is decoded
_STEP_S = 0.001  # a busy engine runs a step at least this long before calls are looked at
_PARENT_S = 1.0  # how often the child looks for its parent
_STUCK_S = 24 * 3600.0  # a parent that reads nothing for this long is as good as gone
_EXIT_S = 5.0  # a closing child gets this long before it is killed
_CLOSE_S = 3.0  # a closing engine gets this long in the child
_GRACE_S = 10.0  # an engine with a deadline of its own names what was late, if it may
_LENGTH = struct.Struct("<Q")
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
_LAUNCHER_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_")


class _Call(msgspec.Struct):
    """Parent to child. `args` is packed by itself, as its type depends on the method."""

    number: int
    method: str
    args: bytes


class _Reply(msgspec.Struct, tag=True):
    number: int
    error: str = ""
    """Name of the exception's class; empty when all went well."""
    message: str = ""


class _Events(msgspec.Struct, tag=True):
    events: tuple[AnyEvent, ...]


class _Fatal(msgspec.Struct, tag=True):
    """The engine is gone; the process ends."""

    reason: str
    refused: str = ""
    """The message of a ConfigError at the start: settings that cannot work."""


_FromChild = _Reply | _Events | _Fatal

_ARGS: dict[str, Any] = {
    "submit": tuple[tuple[Request, ...]],
    "abort": tuple[tuple[RequestId, ...]],
    "pause": tuple[str],
    "resume": tuple[()],
    "begin_load": tuple[int],
    "load_bucket": tuple[Bucket, tuple[bytes, ...]],
    "end_load": tuple[()],
    "sleep": tuple[tuple[str, ...]],
    "wake": tuple[tuple[str, ...]],
    "relayout": tuple[int],
    "remember": tuple[tuple[History, ...]],
    "build": tuple[str, dict[str, Any]],
}
_ERRORS = {kind.__name__: kind for kind in (ConfigError, ValueError, RuntimeError, TimeoutError)}


class _Frames:
    """One end of the socket pair: whole messages, with deadlines."""

    def __init__(self, end: socket.socket):
        self._end = end
        self._buffer = bytearray()
        end.setblocking(False)

    def send(self, message: bytes, deadline: float) -> None:
        """TimeoutError after `deadline` (monotonic); OSError when the other side is gone."""
        for piece in (memoryview(_LENGTH.pack(len(message))), memoryview(message)):
            while piece:
                try:
                    piece = piece[self._end.send(piece) :]
                except BlockingIOError:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TimeoutError("the other side does not read") from None
                    self._ready(select.POLLOUT, left)

    def receive(self, timeout_s: float) -> Iterator[bytes]:
        """Messages that are there, waiting up to `timeout_s` for more bytes; EOFError at the end
        of the stream."""
        yield from self._complete()
        if not self._ready(select.POLLIN, max(0.0, timeout_s)):
            return
        while True:
            try:
                data = self._end.recv(1 << 20)
            except BlockingIOError:
                break
            except ConnectionError as error:
                raise EOFError from error
            if not data:
                yield from self._complete()
                raise EOFError
            self._buffer += data
            yield from self._complete()

    def _ready(self, event: int, timeout_s: float) -> bool:
        # Not select(): it ends at descriptor 1024, and CUDA and NCCL open hundreds.
        poll = select.poll()
        poll.register(self._end, event)
        return bool(poll.poll(timeout_s * 1000))

    def _complete(self) -> Iterator[bytes]:
        head = _LENGTH.size
        while len(self._buffer) >= head:
            end = head + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = bytes(memoryview(self._buffer)[head:end])
            del self._buffer[:end]
            yield message

    def close(self) -> None:
        self._end.close()


class ChildEngine:
    """`Engine` whose work is done by another one in a child process.

    `factory` is "module:function", called there with `settings` (plain data) as keywords; it
    returns the engine. Settings that differ from start to start, such as an address, come from a
    function. The child is started at once and awaited at the first call, `start_s` at most. Every
    call has a deadline and raises what the engine raised. When the child dies, `poll` returns one
    `Down` with the requests that were lost and the tokens of theirs that progress events had
    brought; `restart` brings a new one up, without weights. A call that finds the engine dead
    raises EngineGoneError, and `failure` says why by then. Settings that the engine refuses are a
    ConfigError of every call.

    The deadline of a call is `deadline_s`. An engine that has one itself gets it in its settings,
    as `deadline_s`; then a call here takes that and a little longer.

    `resize(tp)` has the settings be those of another tensor-parallel size. With it `relayout` gives
    the engine another child, of that size; without it the engine itself is asked.
    """

    def __init__(
        self,
        factory: str,
        settings: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        threads: int = 1,
        rank: int = 0,
        deadline_s: float = 120.0,
        start_s: float = 0.0,
        resize: Callable[[int], None] | None = None,
    ):
        self._resize = resize
        self._factory = factory
        self._settings = settings
        self._threads = threads
        self._rank = rank
        self._deadline_s = deadline_s
        self._start_s = start_s or deadline_s
        self._live: dict[RequestId, list[Partial]] = {}
        """What each request has produced so far, in pieces."""
        self._events: list[AnyEvent] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._down = ""
        self._closed = False
        self._start()

    @property
    def pid(self) -> int:
        """Of the child, 0 when there is none."""
        return self._process.pid if self._process is not None and not self._down else 0

    @property
    def failure(self) -> str:
        """Why the child has failed; empty while it works. Settings that it has refused are no
        failure once a call has raised them: another start would not help."""
        if not self._down and not self._closed:
            self._pump(0.0)
        return f"{self._name} {self._down}" if self._down and not self._told else ""

    def fail(self, reason: str) -> None:
        """Kill the child, as something that it cannot work without is gone: `poll` returns its
        `Down`."""
        if not self._down and not self._closed:
            self._die(f"was ended: {reason}")

    def restart(self) -> None:
        """End the child if it lives and start another: no requests, no weights. Requests that the
        old one held and that no `Down` has named yet are named by the next `poll`."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if not self._down:
            self._die("was restarted")
        self._start()

    def is_starting(self, timeout_s: float) -> bool:
        """The child neither takes calls nor is dead yet, after a wait of up to `timeout_s`."""
        end = time.monotonic() + timeout_s
        while not (self._built or self._down or self._replies) and time.monotonic() < end:
            self._pump(end - time.monotonic())
        return not (self._built or self._down or self._replies)

    def submit(self, requests: Sequence[Request]) -> None:
        """As the engine's; when the child is found dead, the requests are in its `Down`."""
        new = [request.id for request in requests if request.id not in self._live]
        dead = bool(self._down)
        self._live.update((i, []) for i in new)  # its events may come before its answer
        try:
            self._call("submit", tuple(requests))
        except EngineGoneError:
            if dead:
                self._live.clear()
                self._lose(new)
        except BaseException:
            for i in new:
                self._live.pop(i, None)
            raise

    def abort(self, ids: Collection[RequestId]) -> None:
        """As the engine's; what a dead child held is in its `Down`."""
        try:
            self._call("abort", tuple(ids))
        except EngineGoneError:
            return

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        """Events that the child has pushed; waits up to `timeout_s` for the first one."""
        end = time.monotonic() + timeout_s
        while not self._down:
            self._pump(0.0 if self._events else end - time.monotonic())
            if self._events or time.monotonic() >= end:
                break
        events, self._events = self._events, []
        return events

    def pause(self, mode: "PauseMode") -> None:
        """As the engine's."""
        self._call("pause", mode)

    def resume(self) -> None:
        """As the engine's."""
        self._call("resume")

    def begin_load(self, version: int) -> None:
        """As the engine's."""
        self._call("begin_load", version)

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes]) -> None:
        """As the engine's; with transport `shm` the files may be removed when it returns."""
        self._call("load_bucket", bucket, tuple(payloads))

    def end_load(self) -> None:
        """As the engine's."""
        self._call("end_load")

    def sleep(self, tags: "Collection[Tag]") -> None:
        """As the engine's."""
        self._call("sleep", tuple(tags))

    def wake(self, tags: "Collection[Tag]") -> None:
        """As the engine's."""
        self._call("wake", tuple(tags))

    def relayout(self, tp: int) -> None:
        """As the engine's, or another child takes its place, without weights: see the class. Then
        RuntimeError while requests run."""
        if self._resize is None:
            self._call("relayout", tp)
            return
        if self._closed:
            raise RuntimeError("relayout: the engine is closed")
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests are running; abort them first")
        if not self._down:
            self._dismiss()
        self._events = []
        self._resize(tp)
        self._start()

    def remember(self, histories: Sequence[History]) -> None:
        """As the engine's."""
        self._call("remember", tuple(histories))

    def close(self) -> None:
        """End the child: asked first, killed after a few seconds."""
        if self._closed:
            return
        self._closed = True
        if self._down or self._process is None:
            return
        self._dismiss()
        self._down = "is closed"

    # ---- the child

    def _dismiss(self) -> None:
        """Ask the child to end; kill it after a few seconds."""
        assert self._process is not None
        self._frames.close()  # the child ends when its stream does
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_EXIT_S)

    def _start(self) -> None:
        settings = dict(self._settings() if callable(self._settings) else self._settings)
        if "deadline_s" in settings:
            self._deadline_s = settings["deadline_s"] + _GRACE_S
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlcore.rollout.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment(self._threads),
                stdin=subprocess.DEVNULL,
            )
        self._frames = _Frames(ours)
        self._down = ""
        self._refused, self._told = "", False
        self._replies: dict[int, _Reply] = {}
        self._number = 0
        self._built = False
        self._ask("build", (self._factory, settings))

    def _ask(self, method: str, args: tuple[Any, ...]) -> int:
        self._number += 1
        call = _Call(self._number, method, encode(args))
        try:
            self._frames.send(encode(call), time.monotonic() + self._deadline_s)
        except TimeoutError as error:
            raise TimeoutError(f"{self._name} does not read its calls: {method}") from error
        except OSError:
            self._pump(0.0)
            if not self._down:
                self._die("closed its stream")
        return self._number

    def _call(self, method: str, *args: Any) -> None:
        if self._closed:
            raise RuntimeError(f"{method}: the engine is closed")
        if not self._built:
            self._await(1, "start", self._start_s)
            self._built = True
        self._check(method)
        self._await(self._ask(method, args), method, self._deadline_s)

    def _await(self, number: int, method: str, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while number not in self._replies:
            self._check(method)
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{method}: {self._name} has not answered for {deadline_s:g} s")
            self._pump(left)
        reply = self._replies.pop(number)
        if reply.error:
            kind = _ERRORS.get(reply.error)
            if kind is None:
                raise RuntimeError(f"{reply.error}: {reply.message}")
            raise kind(reply.message)

    def _check(self, method: str) -> None:
        if self._refused:
            self._told = True
            raise ConfigError(self._refused)
        if self._down:
            raise EngineGoneError(f"{method}: {self._name} {self._down}; restart() it")

    @property
    def _name(self) -> str:
        pid = self._process.pid if self._process is not None else 0
        return f"engine process {pid} of rank {self._rank}"

    def _pump(self, timeout_s: float) -> None:
        """Take in what the child has sent."""
        try:
            for message in self._frames.receive(timeout_s):
                item = decode(message, _FromChild)
                if isinstance(item, _Reply):
                    self._replies[item.number] = item
                elif isinstance(item, _Fatal):
                    reason, _, trace = item.reason.partition("\n")
                    log.debug("%s: where it was raised\n%s", self._name, trace)
                    self._refused = item.refused
                    self._die(f"failed: {reason}")
                    return
                else:
                    self._events += [self._note(event) for event in item.events]
        except EOFError:
            self._die("")

    def _note(self, event: AnyEvent) -> AnyEvent:
        """Keep the tokens that an event brings of a live request, forget what has ended."""
        if isinstance(event, Finished | Aborted):
            self._live.pop(event.id, None)
        elif isinstance(event, Progress) and event.tails:
            for i, tail in zip(event.ids, event.tails, strict=True):
                if i in self._live:
                    self._live[i].append(tail)
            event = msgspec.structs.replace(event, tails=())
        return event

    def _die(self, reason: str) -> None:
        """The child is gone or must go: reap it and leave a `Down` for `poll`."""
        process = self._process
        assert process is not None
        self._frames.close()
        if reason:
            process.kill()
        try:
            code = process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait(_EXIT_S)
        if not reason:
            reason = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._down = reason
        live, self._live = self._live, {}
        self._events.append(
            Down(
                rank=self._rank,
                time=time.monotonic(),
                reason=f"{self._name} {reason}",
                lost=tuple(live),
                partials={i: joined(pieces) for i, pieces in live.items() if pieces},
            )
        )

    def _lose(self, ids: Sequence[RequestId]) -> None:
        """Requests that were handed to a dead child: lost like the others, if `poll` has not said
        so yet; otherwise the caller knew."""
        for at, event in enumerate(self._events):
            if isinstance(event, Down):
                lost = event.lost + tuple(ids)
                self._events[at] = msgspec.structs.replace(event, lost=lost)
                return
        raise EngineGoneError(f"submit: {self._name} {self._down}; restart() it")


def joined(pieces: Sequence[Partial]) -> Partial:
    """A response from its pieces."""
    drafted = [p.drafted for p in pieces if p.drafted is not None]
    return Partial(
        tokens=np.concatenate([p.tokens for p in pieces]),
        logps=np.concatenate([p.logps for p in pieces]),
        versions=np.concatenate([p.versions for p in pieces]),
        drafted=np.concatenate(drafted) if len(drafted) == len(pieces) else None,
    )


def _environment(threads: int) -> dict[str, str]:
    """The parent's variables without the launcher's: the engine is no rank of anything."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER and not name.startswith(_LAUNCHER_PREFIXES)
    }
    root = str(Path(rlcore.__file__).resolve().parents[1])
    paths = [root, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    env["OMP_NUM_THREADS"] = str(threads)
    return env


class _Server:
    """The child's side: a thread that reads calls, one that writes, and the engine in the middle,
    so that decoding never waits for the parent."""

    def __init__(self, end: socket.socket):
        self._frames = _Frames(end)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()  # None: no more
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._live: set[RequestId] = set()
        self._paused = False
        self._engine: Engine | None = None
        self._parent = os.getppid()

    def run(self) -> None:
        """Serve until the parent closes its end or is gone."""
        threading.Thread(target=self._read, daemon=True).start()
        writer = threading.Thread(target=self._write, daemon=True)
        writer.start()
        try:
            while True:
                self._serve()
                if self._engine is not None:
                    self._push(self._engine.poll(_STEP_S if self._busy else _POLL_S))
        except BaseException as error:
            trace = "".join(traceback.format_exception(error))
            starts = self._engine is None and isinstance(error, ConfigError)
            refused = str(error) if starts else ""
            self._out.put(encode(_Fatal(f"{type(error).__name__}: {error}\n{trace}", refused)))
            self._out.put(None)
            writer.join(_EXIT_S)
            self._leave(1)

    @property
    def _busy(self) -> bool:
        return bool(self._live) and not self._paused

    def _serve(self) -> None:
        """Answer the calls that are there; with nothing to decode, wait for one. An error is the
        answer to its call while the engine lives."""
        wait = not self._busy
        while True:
            try:
                call = self._calls.get(timeout=_POLL_S) if wait else self._calls.get_nowait()
            except queue.Empty:
                return
            if call is None:
                self._leave(0)
            wait = False
            reply = _Reply(call.number)
            try:
                self._obey(call.method, decode(call.args, _ARGS[call.method]))
            except EngineGoneError:
                raise
            except Exception as error:
                if self._engine is None:
                    raise
                reply.error, reply.message = type(error).__name__, str(error)
            # Events of the call go first: whoever aborts and then polls finds them.
            if call.method in ("abort", "pause"):
                self._push(self._engine.poll(0.0))
            self._out.put(encode(reply))

    def _obey(self, method: str, args: tuple[Any, ...]) -> None:
        if method == "build":
            module, _, function = args[0].partition(":")
            self._engine = getattr(importlib.import_module(module), function)(**args[1])
            return
        getattr(self._engine, method)(*args)
        if method == "submit":
            self._live.update(request.id for request in args[0])
        elif method in ("pause", "resume"):
            self._paused = method == "pause"

    def _push(self, events: Sequence[AnyEvent]) -> None:
        if not events:
            return
        self._live.difference_update(e.id for e in events if isinstance(e, Finished | Aborted))
        self._out.put(encode(_Events(tuple(events))))

    def _read(self) -> None:
        try:
            while True:
                for message in self._frames.receive(_PARENT_S):
                    self._calls.put(decode(message, _Call))
                if os.getppid() != self._parent:
                    break
        except EOFError:
            log.debug("the parent is gone or has closed")
        self._calls.put(None)
        time.sleep(_CLOSE_S)  # the main thread ends the process, unless it is stuck in a call
        os._exit(0)

    def _leave(self, code: int) -> NoReturn:
        """Nobody waits for anything here: end what the engine has started, and this process."""
        late = threading.Timer(_CLOSE_S, os._exit, (code,))
        late.daemon = True
        late.start()
        try:
            if self._engine is not None:
                self._engine.close()
        except Exception:
            traceback.print_exc()
        os._exit(code)  # exit handlers of libraries take seconds

    def _write(self) -> None:
        try:
            while (message := self._out.get()) is not None:
                self._frames.send(message, time.monotonic() + _STUCK_S)
        except OSError:
            return  # the other thread sees it as well, and ends the process
        except TimeoutError:
            os._exit(0)


def main() -> None:
    """`python -m rlcore.rollout.child <file descriptor>`, started by `ChildEngine`."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Slurm sends it to all; the parent decides
        signal.signal(number, signal.SIG_IGN)
    _Server(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
