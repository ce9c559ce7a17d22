"""Engine in a child process, which decodes without waiting for `poll`.

If the child fails, `poll` reports this as an event and the run continues. Parent and child exchange
the messages of `wire.py` over the channel of `utils/children.py`. The child (`process.py`) serves
calls between two decode steps, sends events as they occur, and exits when its parent exits. It
imports only the engine and its dependencies, not the parent's program.

If a call raises an error in the child, the parent raises it. Three errors end the child instead and
cause a `Down` event: an `EngineFailedError`, an engine that does not start, and an error in `poll`.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rlcore.records import (
    Aborted,
    AnyEvent,
    Bucket,
    Down,
    Finished,
    History,
    LengthReport,
    Partial,
    Request,
    RequestId,
)
from rlcore.rollout.errors import EngineFailedError
from rlcore.rollout.wire import LARGEST_FRAME, EngineCall, EngineReply, Fatal, FromEngine
from rlcore.utils.children import Child, without_launcher
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log
from rlcore.utils.net import decode, encode, frame
from rlcore.utils.process_tree import STOPPED_S, StopMonitor, is_stopped

if TYPE_CHECKING:  # `protocols` imports torch, which only some engines need
    from rlcore.protocols import PauseMode, Tag

_LOOK_S = 1.0  # longest wait for a message before the child's state is checked again
_GRACE_S = 10.0  # margin over the engine's deadline, so that the engine reports its error first
_ERRORS = {kind.__name__: kind for kind in (ConfigError, ValueError, RuntimeError, TimeoutError)}


class ChildEngine:
    """`Engine` that runs another engine in a child process.

    The child calls `factory`, "module:function", with `settings` (plain data) as keywords; the
    function returns the engine. If settings such as an address change between starts, pass a
    function that returns the settings. The child starts at once; the first call waits up to
    `start_s` until the child has started.

    Every call has a deadline and raises the error that the engine raised. If the child exits or
    stays stopped by a signal, `poll` returns one `Down` with the lost requests and their tokens
    from progress events. `restart` starts a new child, without weights. If the engine has failed,
    calls raise EngineFailedError and `failure` has the reason. If the engine rejects its settings,
    every call raises ConfigError.

    The deadline of a call is `deadline_s`. If the settings have a `deadline_s` for the engine's own
    calls, the deadline here is that value plus 10 s.

    Argument `resize`: function that sets another tensor-parallel size in the settings. If given,
    the method `resize` starts a new child; if None, the method calls the engine's `resize`.
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
        """Tokens so far of each live request, one `Partial` per progress event."""
        self._events: list[AnyEvent] = []
        self._child: Child | None = None
        self._down = ""
        self._closed = False
        self._start()

    @property
    def pid(self) -> int:
        """Process id of the child; 0 if none is running."""
        return self._child.process.pid if self._child is not None and not self._down else 0

    @property
    def failure(self) -> str:
        """Reason why the child has failed; empty while it works. Also empty once a call has raised
        ConfigError for rejected settings, so that no caller restarts the child."""
        if not self._down and not self._closed:
            self._pump(0.0)
        return f"{self._name} {self._down}" if self._down and not self._told else ""

    def fail(self, reason: str) -> None:
        """Kill the child, because something that it depends on has failed. `poll` then returns a
        `Down` with this `reason`."""
        if not self._down and not self._closed:
            self._die(f"was stopped: {reason}")

    def restart(self) -> None:
        """Stop the child if it is running, and start a new child without requests and weights. If
        the old child's requests were not reported as lost, the next `poll` returns a `Down`."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if not self._down:
            self._die("was restarted")
        self._start()

    def is_starting(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until the child has started or failed. Return whether it is still
        starting."""
        end = time.monotonic() + timeout_s
        while not (self._built or self._down or self._replies) and time.monotonic() < end:
            self._pump(end - time.monotonic())
        return not (self._built or self._down or self._replies)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. If the child has failed, its `Down` lists these requests as lost."""
        new = [request.id for request in requests if request.id not in self._live]
        dead = bool(self._down)
        self._live.update((i, []) for i in new)  # events of the call may arrive before its reply
        try:
            self._call("submit", tuple(requests))
        except EngineFailedError:
            if dead:
                self._live.clear()
                self._lose(new)
        except BaseException:
            for i in new:
                self._live.pop(i, None)
            raise

    def abort(self, ids: Collection[RequestId]) -> None:
        """Abort requests. If the child has failed, do nothing: its `Down` lists the requests."""
        try:
            self._call("abort", tuple(ids))
        except EngineFailedError:
            return

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        """Return the events that the child has sent. Wait up to `timeout_s` for the first event."""
        end = time.monotonic() + timeout_s
        while not self._down:
            self._pump(0.0 if self._events else end - time.monotonic())
            if self._events or time.monotonic() >= end:
                break
        events, self._events = self._events, []
        return events

    def pause(self, mode: "PauseMode") -> None:
        """Call `pause` of the engine."""
        self._call("pause", mode)

    def resume(self) -> None:
        """Call `resume` of the engine."""
        self._call("resume")

    def begin_load(self, version: int) -> None:
        """Call `begin_load` of the engine."""
        self._call("begin_load", version)

    def load_bucket(self, bucket: Bucket, payloads: Sequence[bytes | memoryview]) -> None:
        """Call `load_bucket` of the engine. With transport `shm`, the payloads' files may be
        removed after the call."""
        self.send_bucket(bucket, payloads)()

    def send_bucket(
        self, bucket: Bucket, payloads: Sequence[bytes | memoryview]
    ) -> Callable[[], None]:
        """Call `load_bucket` of the engine without waiting for the reply. Return a function that
        waits for the reply, up to the deadline of a call, and raises the error."""
        number = self._begin_call("load_bucket", bucket, tuple(payloads))
        return partial(self._await, number, "load_bucket", self._deadline_s)

    def end_load(self) -> None:
        """Call `end_load` of the engine."""
        self._call("end_load")

    def sleep(self, tags: "Collection[Tag]") -> None:
        """Call `sleep` of the engine."""
        self._call("sleep", tuple(tags))

    def wake(self, tags: "Collection[Tag]") -> None:
        """Call `wake` of the engine."""
        self._call("wake", tuple(tags))

    def resize(self, tp: int) -> None:
        """Change the tensor-parallel size. With a `resize` function, start a new child without
        weights; raise RuntimeError while requests run. Without it, call the engine's `resize`."""
        if self._resize is None:
            self._call("resize", tp)
            return
        if self._closed:
            raise RuntimeError("resize: the engine is closed")
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests are running; abort them first")
        if not self._down:
            self._dismiss()
        self._events = []
        self._resize(tp)
        self._start()

    def remember(self, histories: Sequence[History]) -> None:
        """Call `remember` of the engine."""
        self._call("remember", tuple(histories))

    def close(self) -> None:
        """Close the child's stream and wait until it exits; kill the child after a few seconds."""
        if self._closed:
            return
        self._closed = True
        if self._down or self._child is None:
            return
        self._dismiss()
        self._down = "is closed"

    # ---- the child

    def _dismiss(self) -> None:
        """Close the child's stream and wait until it exits; kill it after a few seconds."""
        assert self._child is not None
        self._child.end(exiting=True)

    def _start(self) -> None:
        settings = dict(self._settings() if callable(self._settings) else self._settings)
        if "deadline_s" in settings:
            self._deadline_s = settings["deadline_s"] + _GRACE_S
        self._child = Child(
            "rlcore.rollout.process",
            threads=self._threads,
            env=without_launcher(),
            largest=LARGEST_FRAME,
        )
        self._monitor = StopMonitor(self._child.process.pid)
        self._down = ""
        self._refused, self._told = "", False
        self._replies: dict[int, EngineReply] = {}
        self._number = 0
        self._built = False
        self._ask("build", (self._factory, settings))

    def _ask(self, method: str, args: tuple[Any, ...]) -> int:
        self._number += 1
        assert self._child is not None
        call = EngineCall(self._number, method, encode(args))
        try:
            self._child.channel.send(frame(call), self._deadline_s)
        except TimeoutError as error:
            if not is_stopped(self.pid):
                raise TimeoutError(f"{method}: {self._name} does not read its calls") from error
            self._die(f"was stopped by a signal for {self._deadline_s:g} s, and is killed")
        except OSError:
            self._pump(0.0)
            if not self._down:
                self._die("closed its stream")
        return self._number

    def _call(self, method: str, *args: Any) -> None:
        self._await(self._begin_call(method, *args), method, self._deadline_s)

    def _begin_call(self, method: str, *args: Any) -> int:
        """Send a call to the child, which serves calls in order. Return the number of the call."""
        if self._closed:
            raise RuntimeError(f"{method}: the engine is closed")
        if not self._built:
            self._await(1, "start", self._start_s)
            self._built = True
        self._check(method)
        return self._ask(method, args)

    def _await(self, number: int, method: str, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while number not in self._replies:
            self._check(method)
            left = end - time.monotonic()
            if left > 0:
                self._pump(min(left, _LOOK_S))
            elif is_stopped(self.pid):
                self._die(f"was stopped by a signal for {deadline_s:g} s, and is killed")
            else:
                raise TimeoutError(f"{method}: {self._name} has not answered for {deadline_s:g} s")
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
            raise EngineFailedError(f"{method}: {self._name} {self._down}; restart() it")

    @property
    def _name(self) -> str:
        pid = self._child.process.pid if self._child is not None else 0
        return f"engine process {pid} of rank {self._rank}"

    def _pump(self, timeout_s: float) -> None:
        """Receive the child's messages. Wait up to `timeout_s` for the first message."""
        assert self._child is not None
        try:
            for body in self._child.channel.receive(timeout_s):
                item = decode(body, FromEngine)
                if isinstance(item, EngineReply):
                    self._replies[item.number] = item
                elif isinstance(item, Fatal):
                    reason, _, trace = item.reason.partition("\n")
                    log.debug("%s: traceback\n%s", self._name, trace)
                    self._refused = item.refused
                    self._die(f"failed: {reason}")
                    return
                else:
                    self._events += [self._note(event) for event in item.events]
        except EOFError:
            self._die("")
        except (ValueError, IndexError) as error:
            self._die(f"sent invalid data ({error})")
        else:
            if self._monitor.is_stuck():
                self._die(f"was stopped by a signal for {STOPPED_S} s, and is killed")

    def _note(self, event: AnyEvent) -> AnyEvent:
        """Store the event's tokens of live requests, and forget ended requests. Return the event
        without tokens."""
        if isinstance(event, Finished | Aborted):
            self._live.pop(event.id, None)
        elif isinstance(event, LengthReport) and event.tails:
            for i, tail in zip(event.ids, event.tails, strict=True):
                if i in self._live:
                    self._live[i].append(tail)
            event = msgspec.structs.replace(event, tails=())
        return event

    def _die(self, reason: str) -> None:
        """Terminate the child, and queue a `Down` for `poll`. An empty `reason` means that the
        child has exited by itself."""
        assert self._child is not None
        code = self._child.end(exiting=not reason)
        if code is None:
            reason = reason or "does not end"
            log.error("%s is still running after SIGKILL", self._name)
        elif not reason:
            reason = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
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
        """Add requests that were submitted to a failed child to its pending `Down`. If `poll` has
        already returned the `Down`, raise EngineFailedError."""
        for at, event in enumerate(self._events):
            if isinstance(event, Down):
                lost = event.lost + tuple(ids)
                self._events[at] = msgspec.structs.replace(event, lost=lost)
                return
        raise EngineFailedError(f"submit: {self._name} {self._down}; restart() it")


def joined(pieces: Sequence[Partial]) -> Partial:
    """Join pieces of one response, in order, to a single `Partial`."""
    drafted = [p.drafted for p in pieces if p.drafted is not None]
    return Partial(
        tokens=np.concatenate([p.tokens for p in pieces]),
        logps=np.concatenate([p.logps for p in pieces]),
        versions=np.concatenate([p.versions for p in pieces]),
        drafted=np.concatenate(drafted) if len(drafted) == len(pieces) else None,
        routes=pieces[0].routes,  # a failed engine loses what it has recorded
    )
