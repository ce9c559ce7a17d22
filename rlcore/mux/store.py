"""What jobs and the arbiter know of each other, in Redis: its keys, its users. Values are JSON.

A job's keys begin with `mux:job:<name>:`. It may write its inbox and its lease and read its permit
and its place, nothing of other jobs: the server refuses more to a user of Redis that `mux add` made
(ACL).

    mux:jobs                 set: names
    mux:bell                 list: somebody has written into an inbox
    mux:arbiter              the arbiter's token, while it lives
    mux:state                hash: all that the arbiter knows
    mux:job:<name>:in        list: what the job says, each numbered
    mux:job:<name>:profile   what `mux add --profile` was given
    mux:job:<name>:alive     its lease; gone: the job is dead
    mux:job:<name>:place     where it was put, or why not
    mux:job:<name>:permit    the phase that it may run
    mux:job:<name>:move      rollout nodes that this phase is to leave
    mux:job:<name>:bell      list: place or permit have changed
"""

import json
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Any, Protocol, cast

import redis

from rlcore.utils.errors import ConfigError
from rlcore.utils.secret import hide

TIMEOUT_S = 5.0
"""Of one answer of the server."""
MOST_LEASE_S = 600.0
"""After the server was away, nobody is declared dead for as long as the longest lease."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
JOBS, BELL, ARBITER, STATE = "mux:jobs", "mux:bell", "mux:arbiter", "mux:state"
COMMANDS = ("@connection", "get", "set", "rpush", "blpop", "del", "expire")
"""That a job's user may give."""


class Client(Protocol):
    """Commands of a blocking `redis.Redis` that decodes its answers. redis-py declares each of them
    as possibly awaitable."""

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
    """A client, which connects when it is used.

    Args:
        timeout_s: of a connection, and of an answer.

    Raises:
        ValueError: this is no address of a Redis server.
    """
    try:
        # One retry of the client's own would send a command twice; callers know when they may.
        client = redis.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=None,
        )
    except ValueError as error:
        raise ConfigError(
            f"--mux.url {hide(url)}: no address of a Redis server ({error}); for example "
            "redis://127.0.0.1:6390, or what `python -m rlcore mux add JOB` says"
        ) from error
    return cast(Client, client)


def why(error: redis.RedisError, url: str) -> str:
    """One sentence on what went wrong with a server, and what to do."""
    where = f"--mux.url {hide(url)}"
    if isinstance(error, redis.AuthenticationError):
        return f"{where}: wrong user or password; ask `python -m rlcore mux add JOB` for an address"
    if isinstance(error, redis.exceptions.NoPermissionError):
        return f"{where}: this user may not do that ({error}); is it the address of another job?"
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return f"{where}: no answer; is the server up? `python -m rlcore mux up` starts one"
    return f"{where}: {type(error).__name__}: {error}"


def check_name(name: str) -> str:
    """The name of a job. ValueError for one that is no part of a key."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"job {name!r}: a name has 1 to 64 letters, digits, '_', '.', '-'")
    return name


def key(job: str, what: str) -> str:
    """Of a job."""
    return f"mux:job:{job}:{what}"


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def loads(text: str | None) -> Any:
    """None where there is nothing."""
    return None if text is None else json.loads(text)


def add_job(client: Client, job: str) -> str:
    """Make a user of Redis that sees this job's keys alone; its new password."""
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
