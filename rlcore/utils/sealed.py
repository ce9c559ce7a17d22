"""Share a secret between the ranks of a run, and authenticate values in the run's store with it.

torchrun's store is open to the whole network: it has no authentication, and torch listens on all
interfaces. The secret is therefore passed in a file that only the run's user can read, never in the
store. With the secret, values in the store get a code (HMAC-SHA256 over key and value), and
messages between ranks are encrypted (`rollout/transport.py`).
"""

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from rlcore.utils.errors import ConfigError

SECRET_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size
_POLL_S = 0.02


class ForgedValueError(ValueError):
    """A value in the store that was not written by a rank of this run."""


class SealedStore:
    """Wrapper of torch's `Store` that authenticates values. Counters (`add`) and the existence of
    keys (`check`) are not authenticated."""

    def __init__(self, store: Any, secret: bytes) -> None:
        self._store, self._secret = store, secret

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value with its authentication code."""
        body = value.encode() if isinstance(value, str) else value
        self._store.set(key, self._code(key, body) + body)

    def get(self, key: str) -> bytes:
        """Wait for a value and return it without the code. Raise ForgedValueError if the code is
        wrong."""
        sealed = bytes(self._store.get(key))
        code, body = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if not hmac.compare_digest(code, self._code(key, body)):
            raise ForgedValueError(
                f"the value of {key} in the run's store was written by another program "
                "(authentication failed); block the port of torchrun's store for other machines"
            )
        return body

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the new value; not authenticated."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist; not authenticated."""
        return self._store.check(keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` waits."""
        self._store.set_timeout(timeout)

    def _code(self, key: str, body: bytes) -> bytes:
        # The key's length makes the text different for each pair of key and body.
        return hmac.digest(self._secret, b"%d:%s" % (len(key), key.encode() + body), "sha256")


def share_secret(
    file: Path, rank: int, size: int, store: Any, timeout_s: float, clock: Callable[[], float]
) -> bytes:
    """Make the run's secret on rank 0 and pass it to all ranks through `file`; collective.

    The file has mode 0600 and is in a folder that all nodes share. It is removed as soon as every
    rank has read it. If one rank cannot read it, no rank starts.

    Args:
        file: path of the file, which no earlier start has used.
        store: torch's store; it records whether the file exists, how many ranks have tried to
            read it, and why one could not.

    Raises:
        ConfigError: a rank cannot write or read the file; every rank raises the same message.
        TimeoutError: a rank has not read the file in time; the message names the file.
    """
    if rank:
        return _take_secret(file, rank, store, timeout_s, clock)
    return _give_secret(file, size, store, timeout_s, clock)


def _give_secret(
    file: Path, size: int, store: Any, timeout_s: float, clock: Callable[[], float]
) -> bytes:
    secret = secrets.token_bytes(SECRET_BYTES)
    try:
        _write(file, secret)
    except OSError as error:
        problem = (
            f"--run.dir {file.parent}: cannot create the run's folder ({error.strerror}: "
            f"{error.filename}); choose another"
        )
        store.set("secret/there", problem)
        raise ConfigError(problem) from error
    store.set("secret/there", "")
    try:
        end = clock() + timeout_s
        _await(lambda: store.add("secret/read", 0) == size - 1, end, clock, _NOT_READ, file)
    finally:
        file.unlink(missing_ok=True)
    problem = _text(store.get("secret/problem")) if store.check(["secret/problem"]) else ""
    store.set("secret/end", problem)
    if problem:
        raise ConfigError(problem)
    return secret


def _take_secret(
    file: Path, rank: int, store: Any, timeout_s: float, clock: Callable[[], float]
) -> bytes:
    secret = b""
    _await(lambda: store.check(["secret/there"]), clock() + timeout_s, clock, _NOT_MADE, file)
    if problem := _text(store.get("secret/there")):
        raise ConfigError(problem)
    try:
        secret = _read(file, rank)
    except ConfigError as error:
        store.set("secret/problem", str(error))
    store.add("secret/read", 1)
    _await(lambda: store.check(["secret/end"]), clock() + timeout_s, clock, _NOT_READ, file)
    if problem := _text(store.get("secret/end")):
        raise ConfigError(problem)
    return secret


def _text(value: bytes) -> str:
    return value.decode(errors="replace")  # another program may have written the value


_NOT_MADE = "start-up: rank 0 did not write the run's secret to {file} in time"
_NOT_READ = "start-up: some rank did not read the run's secret from {file} in time"


def _await(
    is_done: Callable[[], bool], end: float, clock: Callable[[], float], problem: str, file: Path
) -> None:
    while not is_done():
        if clock() > end:
            raise TimeoutError(problem.format(file=file))
        time.sleep(_POLL_S)


def _write(file: Path, secret: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(secret)
        out.flush()
        os.fsync(out.fileno())


def _read(file: Path, rank: int) -> bytes:
    try:
        secret = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--run.dir {file.parent}: rank {rank} cannot read the file that rank 0 wrote there "
            f"({error.strerror}); choose a folder on a disk shared by all nodes"
        ) from error
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"--run.dir {file.parent}: rank {rank} reads {len(secret)} bytes of {file.name} but "
            f"rank 0 wrote {SECRET_BYTES}; choose a folder on a disk shared by all nodes"
        )
    return secret
