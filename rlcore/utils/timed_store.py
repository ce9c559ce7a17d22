"""Limit how long a call of torch's `Store` takes.

torch waits without limit for the answer of a store whose host is frozen or unreachable, in every
method, and after the time-out of `get` and `wait` too (torch 2.13). Each call therefore runs in its
own thread, and the caller stops waiting at the deadline.
"""

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_MORE_S = 5.0
"""Seconds that torch may take to return after its own time-out for a missing key."""


class TimedStore:
    """Wrapper of a store, whose methods raise TimeoutError if the store does not answer in time,
    and ConnectionError if its host has exited: torch does not connect again.
    While a call waits beyond its deadline, all further calls fail at once."""

    def __init__(self, store: Any, answer_s: float) -> None:
        """`answer_s`: deadline of a call in seconds; `get` may also wait for its key as long."""
        self._store, self._answer_s = store, answer_s
        self._late: threading.Thread | None = None

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._call("set", self._answer_s, key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value, up to the store's own time-out, and return it."""
        return self._call("get", self._answer_s + _MORE_S, key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values, as `get` does."""
        return self._call("multi_get", self._answer_s + _MORE_S, keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the new value."""
        return self._call("add", self._answer_s, key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._call("check", self._answer_s, keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` if the value is `expected`; return the new value."""
        return self._call("compare_set", self._answer_s, key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Remove a key and return whether it existed."""
        return self._call("delete_key", self._answer_s, key)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys exist."""
        self._call("wait", timeout.total_seconds() + _MORE_S, keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` waits for its key, at most `answer_s`."""
        self._store.set_timeout(timeout)

    def _call(self, name: str, seconds: float, *args: Any) -> Any:
        if self._late is not None and self._late.is_alive():
            raise TimeoutError(silent_store(self._answer_s))
        result, thread = _start(lambda: getattr(self._store, name)(*args), f"store {name}")
        thread.join(seconds)
        if thread.is_alive():
            self._late = thread
            raise TimeoutError(silent_store(seconds))
        try:
            return result()
        except dist.DistNetworkError as error:
            raise ConnectionError(lost_store()) from error


def call_within(seconds: float, work: Callable[[], T], missing: str) -> T:
    """Return the result of `work`, which runs in a thread of its own. Raise TimeoutError with the
    text `missing` if it takes longer than `seconds`; the thread then goes on."""
    result, thread = _start(work, "timed call")
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(missing)
    return result()


def silent_store(seconds: float) -> str:
    """Return the message about a store that does not answer."""
    return (
        f"the run's store has not answered for {seconds:g} s; check that torchrun runs on "
        f"{_address()}, is not stopped, and can be reached"
    )


def lost_store() -> str:
    """Return the message about a store whose host has exited."""
    return f"the run's store on {_address()} has closed the connection: its process has exited"


def _address() -> str:
    host, port = (os.environ.get(f"MASTER_{name}", "unknown") for name in ("ADDR", "PORT"))
    return f"MASTER_ADDR {host}, port {port}"


def _start(work: Callable[[], T], name: str) -> tuple[Callable[[], T], threading.Thread]:
    """Start `work` in a thread. Return a function that returns its result, and the thread."""
    values: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            values.append(work())
        except Exception as error:
            errors.append(error)

    def result() -> T:
        if errors:
            raise errors[0]
        return values[0]

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return result, thread
