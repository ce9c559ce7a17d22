"""Pool of the child processes that run a rank's environments, used from an event loop.

If an environment raises, times out or its process fails, its episode fails with `EnvError`. After a
time-out the process accepts no more environments, and is stopped when its other environments are
closed. A process is stopped once its environments have closed, or a few seconds after they were
asked to. If a process fails, only its episodes with a call in progress may have caused the failure;
its other episodes are innocent. An episode that may have caused a failure gets its own process for
the next attempt, so a second crash affects no other episode.

Own code instead of gymnasium's AsyncVectorEnv: no episode waits for a step of another episode. This
is 2.33x faster where steps take N(10, 10) s (`tools/results/env.json`).
"""

import asyncio
import os
import selectors
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rlcore.config.schema import EnvConfig
from rlcore.envs.kind import EnvStep, ToolTurn
from rlcore.envs.wire import READY, EnvCall, EnvReply, EnvStart
from rlcore.records import Prompt
from rlcore.utils import net
from rlcore.utils.children import CappedLog, GuardedChild, exit_text, last_lines
from rlcore.utils.log import log
from rlcore.utils.net import frame

Reason = Literal["timeout", "crash", "error"]
_MOST_FAILED_STARTS = 3
_CLOSE_S = 3.0  # longest wait for environments to close before their process is stopped
_OWN_PER_WORKER = 4  # maximum number of single-episode processes per worker


class EnvError(Exception):
    """Error of an environment; it fails the environment's episode."""

    def __init__(self, reason: Reason, text: str, *, is_innocent: bool = False) -> None:
        """Record the reason. `is_innocent`: the process failed while no call of this episode was in
        progress."""
        super().__init__(text)
        self.reason: Reason = reason
        self.is_innocent = is_innocent


class LoopSelector:
    """Selector over an asyncio loop, with the methods that `GuardedChild` needs."""

    def __init__(self, ready: Callable[[Any, str, int], None]) -> None:
        """Bind to the running loop. `ready` is called with the registered data and the events."""
        self._loop = asyncio.get_running_loop()
        self._ready = ready
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> None:
        """Watch a descriptor for events, as `selectors.BaseSelector.register` does."""
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        whose, stream = data
        if events & selectors.EVENT_READ:
            self._loop.add_reader(fd, self._ready, whose, stream, selectors.EVENT_READ)
        if events & selectors.EVENT_WRITE:
            self._loop.add_writer(fd, self._ready, whose, stream, selectors.EVENT_WRITE)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> None:
        """Change the events of a descriptor, as `selectors.BaseSelector.modify` does."""
        self.unregister(fileobj)
        self.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> None:
        """Stop watching a descriptor, as `selectors.BaseSelector.unregister` does."""
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        del self._keys[fd]
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        """Return the key of a descriptor, as `selectors.BaseSelector.get_key` does."""
        return self._keys[fileobj if isinstance(fileobj, int) else fileobj.fileno()]


class _Process(GuardedChild):
    """Environment process with its pending calls."""

    def __init__(
        self, selector: LoopSelector, start: bytearray, sink: Callable[[bytes], None], is_own: bool
    ) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Retrieve the exception, because asyncio logs exceptions that are not retrieved.
        self.ready.add_done_callback(lambda f: f.cancelled() or f.exception())
        self.calls: dict[int, asyncio.Future[EnvReply]] = {}
        self.num_envs = 0
        self.closing: set[int] = set()
        """Numbers of the calls of `close` that have no reply yet."""
        self.is_own = is_own
        """Whether the process serves a single episode."""
        self.is_open = True
        """Whether the process accepts more environments."""
        self.has_exited = False
        super().__init__(selector, start, sink, "rlcore.envs.child")

    def enter(self) -> None:
        """Count one more environment in this process."""
        self.num_envs += 1

    def leave(self) -> None:
        """Count one environment fewer in this process."""
        self.num_envs -= 1

    @property
    def is_over(self) -> bool:
        """Whether the process has no environment and accepts no more."""
        return not self.num_envs and (self.is_own or not self.is_open)

    def retire(self) -> None:
        """Make the process accept no more environments."""
        self.is_open = False

    def end(self, exiting: bool = False) -> int | None:
        """Stop the process (`Child.end`), so that it accepts no more environments."""
        self.has_exited, self.is_open = True, False
        return super().end(exiting=exiting)


class EnvSlot:
    """Handle with which an episode calls its environment in another process."""

    def __init__(self, pool: "EnvPool", process: _Process, key: int) -> None:
        self._pool, self._process, self._key = pool, process, key

    async def reset(self, seed: int, prompt: Prompt, episode: str) -> EnvStep:
        """Create the environment and reset it. Raises EnvError."""
        return await self._ask(what="reset", seed=seed, prompt=prompt, episode=episode)

    async def step(
        self, text: str, tokens: tuple[int, ...], turn: ToolTurn | None = None
    ) -> EnvStep:
        """Pass a turn of the policy to the environment; `turn` has its calls. Raises EnvError."""
        return await self._ask(what="step", text=text, tokens=tokens, turn=turn)

    async def _ask(self, **what: Any) -> EnvStep:
        reply = await self._pool.ask(self._process, key=self._key, **what)
        return EnvStep(reply.seen, reply.reward, reply.is_over, reply.numbers, reply.seconds)

    def close(self) -> None:
        """Close the environment, even during a call."""
        self._pool.leave(self._process, self._key)


class EnvPool:
    """Pool of environment processes. All methods are called in one event loop."""

    def __init__(
        self,
        env: str,
        config: EnvConfig,
        *,
        log_file: Path | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        """Start the processes. `env` is the value of `--env`. Output of environments goes to
        `log_file`, up to 4 MiB."""
        self.name, self._config = env, config
        self._start_timeout_s = start_timeout_s
        self._log = CappedLog(log_file, "env")
        self._start = frame(
            EnvStart(
                env=env,
                config=asdict(config),
                sys_path=tuple(os.path.abspath(p) for p in sys.path),
            )
        )
        self._selector = LoopSelector(self._serve)
        self._processes: list[_Process] = []
        self._own = asyncio.Semaphore(_OWN_PER_WORKER * config.workers)
        self.num_waiting = 0
        """Number of calls of `open` that wait until fewer single-episode processes run."""
        self._open: dict[int, _Process] = {}
        """Processes of the open environments, by key."""
        self._numbers = 0
        self._failed_starts, self._failed_at = 0, 0.0
        self._closing = False
        self.failure = ""
        """Error message if no environment can run at all; else empty."""
        for _ in range(config.workers):
            self._add(is_own=False)

    async def open(self, *, alone: bool = False) -> EnvSlot:
        """Choose the process of an environment: with `alone` a new process, else the process with
        the fewest environments. Raises EnvError if the process does not start."""
        if alone:
            self.num_waiting += 1
            try:
                await self._own.acquire()
            finally:
                self.num_waiting -= 1
        try:
            process = self._choose(alone)
        except BaseException:
            if alone:
                self._own.release()
            raise
        process.enter()
        self._numbers += 1
        self._open[self._numbers] = process
        place = EnvSlot(self, process, self._numbers)
        try:
            # wait_for of Python 3.11 may swallow a cancellation if the future is done
            async with asyncio.timeout(self._start_timeout_s):
                await asyncio.shield(process.ready)
        except BaseException as error:
            place.close()
            if isinstance(error, TimeoutError):
                why = f"its process did not start within {self._start_timeout_s:g} s"
                self._end(process, why)
                raise EnvError("timeout", why) from error
            raise
        return place

    async def ask(self, process: _Process, **what: Any) -> EnvReply:
        """Send a call and wait for its reply. Raises EnvError."""
        if process.has_exited:
            raise EnvError("crash", "its process has exited", is_innocent=True)
        self._numbers += 1
        number = self._numbers
        try:
            message = frame(EnvCall(number=number, **what))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise EnvError("error", f"{what['what']} cannot be sent: {error}") from error
        future = process.calls[number] = asyncio.get_running_loop().create_future()
        process.send(message)
        try:
            async with asyncio.timeout(self._config.timeout_s):
                reply = await future
        except TimeoutError as error:
            if process.is_open and not process.has_exited:
                process.retire()
                process.print_stack()
            raise EnvError(
                "timeout", f"no answer to {what['what']} within {self._config.timeout_s:g} s"
            ) from error
        finally:
            process.calls.pop(number, None)
        if reply.error:
            raise EnvError("error", reply.error)
        return reply

    def leave(self, process: _Process, key: int) -> None:
        """Close an environment. If its process has no other environment and accepts no more, stop
        the process after the reply, or after `_CLOSE_S`. Idempotent."""
        if self._open.pop(key, None) is None:
            return
        process.leave()
        if process.has_exited:
            return
        if process.ready.done():
            self._numbers += 1
            process.closing.add(self._numbers)
            process.send(frame(EnvCall(number=self._numbers, key=key, what="close")))
        if process.is_over:
            wait_s = _CLOSE_S if process.closing else 0.0
            asyncio.get_running_loop().call_later(wait_s, self._end, process, "")

    async def close(self) -> None:
        """Close all environments, for up to `_CLOSE_S`, and stop all processes."""
        self._closing = True
        for key, process in list(self._open.items()):
            self.leave(process, key)
        deadline = time.monotonic() + _CLOSE_S
        while any(p.closing for p in self._processes) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for process in list(self._processes):
            self._end(process, "closed")

    # ---- processes

    def _choose(self, alone: bool) -> _Process:
        if self.failure:
            raise EnvError("crash", self.failure)
        shared = [p for p in self._processes if p.is_open and not p.is_own]
        if alone or (len(shared) < self._config.workers and all(p.num_envs for p in shared)):
            return self._add(is_own=alone)
        return min(shared, key=lambda p: p.num_envs)

    def _add(self, *, is_own: bool) -> _Process:
        process = _Process(self._selector, self._start, self._log.write, is_own)
        self._processes.append(process)
        return process

    def _serve(self, process: _Process, what: str, events: int) -> None:
        if process.has_exited:  # the process failed earlier in this loop iteration
            return
        if what == "output":
            process.read_output()
        elif events & selectors.EVENT_WRITE:
            process.flush()
        else:
            self._receive(process)

    def _receive(self, process: _Process) -> None:
        try:
            for body in process.channel.receive():
                self._answer(process, net.decode(body, EnvReply))
        except EOFError:
            self._end(process, "", exiting=True)
        except (ValueError, IndexError) as error:
            self._end(process, f"the environment wrote to its process's channel ({error})")

    def _answer(self, process: _Process, reply: EnvReply) -> None:
        if reply.number == READY and not process.ready.done():
            if reply.error:
                self.failure = f"--env {self.name}: cannot start in a child process: {reply.error}"
                process.ready.set_exception(EnvError("crash", self.failure))
            else:
                self._failed_starts = 0
                process.ready.set_result(None)
            return
        process.closing.discard(reply.number)
        if process.is_over and not process.closing:
            asyncio.get_running_loop().call_soon(self._end, process, "")
        future = process.calls.get(reply.number)
        if future is not None and not future.done():  # ignore a reply that comes too late
            future.set_result(reply)

    def _end(self, process: _Process, reason: str, exiting: bool = False) -> None:
        """Stop a process and fail its pending calls. Without `reason`, the exit status is given."""
        if process.has_exited:
            return
        self._processes.remove(process)
        if process.is_own:
            self._own.release()
        status = process.end(exiting=exiting)
        reason = reason or f"its process exited: {exit_text(status)}"
        if not process.ready.done():
            if self._closing:
                process.ready.cancel()
            else:
                self._failed_start(process, reason)
        for future in process.calls.values():
            if not future.done():
                future.set_exception(EnvError("crash", reason))

    def _failed_start(self, process: _Process, reason: str) -> None:
        """Count a process that failed before it was ready; after three such failures in a row, give
        up. Processes that started together and fail together count once."""
        if process.started > self._failed_at:
            self._failed_starts, self._failed_at = self._failed_starts + 1, time.monotonic()
        sentence = f"--env {self.name}: a process failed before its first episode: {reason}"
        log.warning("%s%s", sentence, last_lines(process.printed()))
        if self._failed_starts >= _MOST_FAILED_STARTS:
            self.failure = f"{sentence}, {self._failed_starts} times in a row"
        process.ready.set_exception(EnvError("crash", reason))
