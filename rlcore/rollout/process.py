"""The engine process: it receives calls, runs the engine and sends events.

    python -m rlcore.rollout.process FD PARENT

Only `child.ChildEngine` starts this process. When the parent exits, the kernel kills this process
(`children.tie`). When the parent closes the channel, it closes the engine and exits.
"""

import importlib
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import structs

from rlcore.records import Aborted, AnyEvent, Finished, RequestId
from rlcore.rollout.errors import EngineFailedError
from rlcore.rollout.wire import ARGS, LARGEST_FRAME, EngineCall, EngineReply, Events, Fatal
from rlcore.utils.children import Channel, open_channel
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log
from rlcore.utils.net import decode, frame

if TYPE_CHECKING:  # `protocols` imports torch, which only some engines need
    from rlcore.protocols import Engine

_POLL_S = 0.02  # longest wait for a call while the engine is idle
_STEP_S = 0.001  # timeout of `poll` while the engine decodes
_CLOSE_S = 3.0  # longest time to close the engine
_EXIT_S = 5.0  # longest time to send the last messages


class EngineServer:
    """Server of the parent's calls. The main thread runs the engine. Two other threads read calls
    and write messages, so that decoding never waits for the parent."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._calls: queue.SimpleQueue[EngineCall | None] = (
            queue.SimpleQueue()
        )  # None marks the end of the calls
        self._out: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._live: set[RequestId] = set()
        self._paused = False
        self._engine: Engine | None = None

    def run(self) -> None:
        """Serve calls until the parent closes the channel."""
        threading.Thread(target=self._read, daemon=True).start()
        writer = threading.Thread(target=self._write, daemon=True)
        writer.start()
        try:
            while True:
                self._serve()
                if self._engine is not None:
                    # An idle engine waits in `_serve`; waiting here would delay the next call.
                    self._push(self._engine.poll(_STEP_S if self._busy else 0.0))
        except BaseException as error:
            trace = "".join(traceback.format_exception(error))
            starts = self._engine is None and isinstance(error, ConfigError)
            refused = str(error) if starts else ""
            self._out.put(frame(Fatal(f"{type(error).__name__}: {error}\n{trace}", refused)))
            self._out.put(None)
            writer.join(_EXIT_S)
            self._leave(1)

    @property
    def _busy(self) -> bool:
        return bool(self._live) and not self._paused

    def _serve(self) -> None:
        """Answer the pending calls; an idle engine waits briefly for a call. If a call fails, reply
        with its error. If the engine has failed or has not started, raise the error instead."""
        wait = not self._busy
        while True:
            try:
                call = self._calls.get(timeout=_POLL_S) if wait else self._calls.get_nowait()
            except queue.Empty:
                return
            if call is None:
                self._leave(0)
            wait = False
            reply = EngineReply(call.number)
            try:
                self._obey(call.method, decode(call.args, ARGS[call.method]))
            except EngineFailedError:
                raise
            except Exception as error:
                if self._engine is None:
                    raise
                reply = structs.replace(reply, error=type(error).__name__, message=str(error))
            # Send events before the reply, so that the parent's next `poll` returns them.
            if call.method in ("abort", "pause"):
                assert self._engine is not None
                self._push(self._engine.poll(0.0))
            self._out.put(frame(reply))

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
        self._out.put(frame(Events(tuple(events))))

    def _read(self) -> None:
        try:
            while True:
                for body in self._channel.receive(None):
                    self._calls.put(decode(body, EngineCall))
        except EOFError:
            log.debug("the parent has closed its end")
        except ValueError as error:
            log.error("the engine process cannot read its calls: %s", error)
        self._calls.put(None)
        time.sleep(_CLOSE_S)  # in this time the main thread exits the process, unless it is stuck
        os._exit(0)

    def _leave(self, code: int) -> NoReturn:
        """Close the engine and exit the process, at the latest after `_CLOSE_S` seconds."""
        late = threading.Timer(_CLOSE_S, os._exit, (code,))
        late.daemon = True
        late.start()
        try:
            if self._engine is not None:
                self._engine.close()
        except Exception:
            traceback.print_exc()
        os._exit(code)  # os._exit skips exit handlers, which take seconds

    def _write(self) -> None:
        try:
            while (message := self._out.get()) is not None:
                self._channel.send(message)
        except TimeoutError:
            os._exit(0)
        except OSError:
            return  # the reader thread sees the closed channel and exits the process


def main() -> None:
    """Serve calls of the parent process until it closes the channel."""
    for number in (signal.SIGINT, signal.SIGTERM):  # only the parent reacts to signals from Slurm
        signal.signal(number, signal.SIG_IGN)
    EngineServer(open_channel(LARGEST_FRAME)).run()


if __name__ == "__main__":
    main()
