"""Child process that runs environments: receives calls and sends one reply per call.

    python -m rlcore.envs.child CHANNEL_DESCRIPTOR PARENT_PID

`pool.EnvPool` starts this process, which exits with its parent. Each call runs in its own thread,
so no environment waits for another. torch is not imported, so that the process starts fast.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from rlcore.envs.kind import EnvKind, TextEnv, checked
from rlcore.envs.registry import resolve
from rlcore.envs.wire import READY, EnvCall, EnvReply, EnvStart
from rlcore.utils import net
from rlcore.utils.children import Channel, open_guarded_channel, sentence
from rlcore.utils.net import frame

_THREADS = 4096


@dataclass(slots=True)
class _Slot:
    """Environment with a lock, which makes its calls run one after another."""

    env: TextEnv | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_closed: bool = False

    def reset(
        self, make: Callable[[], TextEnv], seed: int, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Create and reset the environment. Raises RuntimeError if `close` was called before."""
        with self.lock:
            if self.is_closed:
                raise RuntimeError("the environment was closed before its reset")
            self.env = make()
            return self.env.reset(seed=seed, options=options)

    def close(self) -> None:
        """Close the environment after its current step. If the environment does not exist yet, it
        is never created."""
        with self.lock:
            self.is_closed = True
            if self.env is not None:
                self.env.close()


_CLOSED = _Slot(is_closed=True)


class EnvHost:
    """Environments of this process, by key. Calls of one environment run one after another; calls
    of different environments run concurrently."""

    def __init__(self, kind: EnvKind, config: Any, channel: Channel) -> None:
        self._kind, self._config, self._channel = kind, config, channel
        self._envs: dict[int, _Slot] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="env")

    def take(self, call: EnvCall) -> None:
        """Run a call in a thread. A reset registers the key at once, so that a later close finds
        the key even if the environment does not exist yet."""
        if call.what == "reset":
            self._envs[call.key] = _Slot()
        self._threads.submit(self._run, call)

    def send(self, data: bytearray) -> None:
        """Send the frame of a reply. A lock prevents threads from mixing their replies."""
        with self._lock:
            self._channel.send(data)

    def _run(self, call: EnvCall) -> None:
        begin = time.monotonic()
        try:
            if call.what == "close":
                if (place := self._envs.pop(call.key, None)) is not None:
                    place.close()
                reply = EnvReply(number=call.number)
            else:
                reply = self._do(call)
            data = frame(msgspec.structs.replace(reply, seconds=time.monotonic() - begin))
        except BaseException as error:  # environments may raise anything and return anything
            traceback.print_exc()
            data = frame(EnvReply(number=call.number, error=sentence(error)))
        self.send(data)

    def _do(self, call: EnvCall) -> EnvReply:
        if call.what == "reset":
            prompt = call.prompt
            assert prompt is not None
            options = {**prompt.fields, "prompt": prompt.text, "answer": prompt.answer}
            options["episode"] = call.episode
            place = self._envs.get(call.key, _CLOSED)
            make = partial(self._kind.make, self._config)
            seen, info = place.reset(make, call.seed, options)
            seen, _, numbers = checked(seen, 0.0, info)
            return EnvReply(number=call.number, seen=seen, numbers=numbers)
        place = self._envs[call.key]
        env = place.env
        assert env is not None, "step() before reset()"
        action: Any = list(call.tokens) if getattr(env, "wants_tokens", False) else call.text
        if call.turn is not None:
            action = call.turn
        with place.lock:
            seen, reward, ended, cut, info = env.step(action)
        seen, reward, numbers = checked(seen, reward, info)
        return EnvReply(
            number=call.number,
            seen=seen,
            reward=reward,
            is_over=bool(ended) or bool(cut),
            numbers=numbers,
        )


def main() -> None:
    channel = open_guarded_channel("env")
    try:
        host = _start(net.decode(channel.first(), EnvStart), channel)
        while True:
            for body in channel.receive(None):
                host.take(net.decode(body, EnvCall))
    except EOFError:  # the parent has closed the channel
        os._exit(0)  # do not wait for environments that never return


def _start(start: EnvStart, channel: Channel) -> EnvHost:
    """Load the environment and report success or the error to the parent. After an error, exit."""
    sys.path[:] = start.sys_path
    try:
        kind = resolve(start.env)
        host = EnvHost(kind, msgspec.convert(start.config, kind.config), channel)
        kind.make(host._config).close()  # fail now if a dependency is missing
    except BaseException as error:
        traceback.print_exc()
        channel.send(frame(EnvReply(number=READY, error=sentence(error))))
        sys.exit(1)
    host.send(frame(EnvReply(number=READY)))
    return host


if __name__ == "__main__":
    main()
