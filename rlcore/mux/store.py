"""State that jobs and the arbiter share in Redis: keys and users. Values are JSON.

A job's keys begin with `mux:job:<name>:`. A job writes its inbox and its lease, and reads its
permit and its place. `mux add` makes a Redis user for each job; the server's access control list
(ACL) denies this user the keys of other jobs.

    mux:jobs                 set: names of the jobs
    mux:bell                 list: notifies the arbiter of a new message in an inbox
    mux:arbiter              token of the running arbiter, which expires unless renewed
    mux:state                hash: all state of the arbiter
    mux:job:<name>:in        list: inbox, the job's numbered messages
    mux:job:<name>:profile   the profile given to `mux add --profile`
    mux:job:<name>:alive     the job's lease; if it has expired, the job counts as failed
    mux:job:<name>:place     the job's nodes, or why the job has none
    mux:job:<name>:permit    the phase that the job may run
    mux:job:<name>:move      rollout nodes that the phase should leave
    mux:job:<name>:bell      list: notifies the job of a new place or permit"""

import json
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Any, Protocol, cast

import redis

from rlcore.utils.errors import ConfigError
from rlcore.utils.secret import hide

TIMEOUT_S = 5.0
"""Seconds to wait for an answer of the Redis server before an error is raised."""
MOST_LEASE_S = 600.0
"""Maximum lease in seconds; also the maximum wait after an outage before jobs count as failed."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
JOBS, BELL, ARBITER, STATE = "mux:jobs", "mux:bell", "mux:arbiter", "mux:state"
COMMANDS = ("@connection", "get", "set", "rpush", "blpop", "del", "expire")
"""Redis commands that a job's user may send."""


class Client(Protocol):
    """Typed commands of a synchronous `redis.Redis` client that decodes answers. redis-py itself
    declares the results as possibly awaitable."""

    def ping(self) -> bool: ...

    def get(self, name: str) -> str | None: ...

    def set(
        self, name: str, value: str, *, px: int | None = None, nx: bool = False
    ) -> bool | None: ...

    def delete(self, *names: str) -> int: ...

    def exists(self, *names: str) -> int: ...

    def rpush(self, name: str, *values: str) -> int: ...

    def blpop(self, keys: Sequence[str], timeout: float) -> tuple[str, str] | None: ...

    def sadd(self, name: str, *values: str) -> int: ...

    def smembers(self, name: str) -> Collection[str]: ...

    def hset(self, name: str, key: str, value: str) -> int: ...

    def hgetall(self, name: str) -> dict[str, str]: ...

    def pipeline(self, transaction: bool = True) -> redis.client.Pipeline: ...

    def acl_setuser(
        self,
        username: str,
        *,
        enabled: bool,
        reset: bool,
        passwords: Sequence[str],
        keys: Sequence[str],
        commands: Sequence[str],
    ) -> bool: ...

    def acl_save(self) -> bool: ...


def connect(url: str, timeout_s: float = TIMEOUT_S) -> Client:
    """Make a client, which connects at its first command.

    Args:
        timeout_s: maximum seconds to wait for a connection, and for an answer.

    Raises:
        ValueError: `url` is not the address of a Redis server.
    """
    try:
        # A retry in the client could send a command twice; only callers know if this is safe.
        client = redis.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=None,
        )
    except ValueError as error:
        raise ConfigError(
            f"--mux.url {hide(url)}: not the address of a Redis server ({error}); give the one "
            "that `python -m rlcore mux add JOB` prints, such as redis://127.0.0.1:6390"
        ) from error
    return cast(Client, client)


def why(error: redis.RedisError, url: str) -> str:
    """Return a message with the error of the server and what to do about it."""
    where = f"--mux.url {hide(url)}"
    if isinstance(error, redis.AuthenticationError):
        return (
            f"{where}: wrong user or password; get the address from `python -m rlcore mux add JOB`"
        )
    if isinstance(error, redis.exceptions.NoPermissionError):
        return f"{where}: permission denied ({error}); use the address of this job, not of another"
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return f"{where}: no answer; start the server with `python -m rlcore mux up`"
    return f"{where}: {type(error).__name__}: {error}"


def check_name(name: str) -> str:
    """Return the job's name. Raise ValueError if the name cannot be part of a key."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"job {name!r}: the name must have 1 to 64 letters, digits, '_', '.' or '-'"
        )
    return name


def key(job: str, what: str) -> str:
    """Return the Redis key `what` of a job."""
    return f"mux:job:{job}:{what}"


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def loads(text: str | None) -> Any:
    """Return the decoded JSON value of `text`; None if `text` is None."""
    return None if text is None else json.loads(text)


def add_job(client: Client, job: str) -> str:
    """Make a Redis user for the keys of the job and the list `mux:bell`. Return the password."""
    check_name(job)
    password = secrets.token_urlsafe(24)
    client.acl_setuser(
        f"job-{job}",
        enabled=True,
        reset=True,
        passwords=[f"+{password}"],
        keys=[key(job, "*"), BELL],
        commands=[f"+{c}" for c in COMMANDS],
    )
    client.acl_save()
    client.sadd(JOBS, job)
    return password
