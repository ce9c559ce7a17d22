"""Gate of a job that shares nodes: each phase waits for a permit (`protocols.PhaseGate`).

    gate = connect("redis://127.0.0.1:6390", "my job", Profile(...))  # url "": no sharing
    while training:
        with gate.phase("rollout"):
            ...
        with gate.phase("train", resident=learner_states):
            ...
    gate.close()

One process of a job has the gate; the job's other ranks wait for this process in collectives. A
thread renews the job's lease. If renewal fails, other jobs may get the nodes, so the process exits
with code 75 before the lease expires. When restarted, the process joins as a new job and resumes
from its latest checkpoint. While the server is down, no job gets a permit, so all jobs wait."""

import contextlib
import errno
import functools
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import redis

from rlcore.config.schema import MuxConfig
from rlcore.mux import store
from rlcore.mux.profile import STEP, Profile
from rlcore.utils import phases
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log

if TYPE_CHECKING:  # `protocols` imports torch, which takes seconds
    from rlcore.protocols import PhaseGate

EXIT_LOST = 75
"""Exit code of a job that lost its lease (EX_TEMPFAIL): restart the job."""
LOOK_S = 1.0
"""Interval in seconds at which a waiting job polls, even without a notification."""
SAY_EVERY_S = 60.0
"""Interval in seconds at which a waiting job logs that it waits."""
ANSWER_S = 30.0
"""Maximum seconds for which a job that may run solo waits for the arbiter's answer."""


@runtime_checkable
class Resident(Protocol):
    """A state that a phase needs on the device; between phases it is in host memory."""

    def load(self) -> None:
        """Load the state to the device."""

    def store(self) -> None:
        """Write the state back to host memory, and free the device."""


class JobRefused(RuntimeError):
    """The arbiter refused this job, because the cluster cannot run the job."""


class NoGate:
    """Gate of a job that shares no nodes: every phase starts at once."""

    @contextmanager
    def phase(self, name: str, resident: object | None = None) -> Iterator[None]:
        yield

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _Waits:
    """Seconds for which a job waited for permits and loaded its states, for its metrics."""

    waited_s: dict[str, float] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)
    """Seconds to load the device state (`resident`) of each phase."""


class PermitGate:
    """Gate of one job, which waits for the arbiter's permits."""

    def __init__(
        self,
        url: str,
        job: str,
        profile: Profile,
        *,
        pools: Mapping[str, tuple[str, ...]] | None = None,
        hosts: Mapping[str, Sequence[str]] | None = None,
        keep: int = 0,
        lease_s: float = MuxConfig.lease_s,
        wait_s: float = MuxConfig.max_wait_s,
        waits_for_place: bool = True,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """Join the cluster and wait for a place.

        Args:
            pools: pools that each phase uses; by default a phase uses the pool of its own name. The
                phase `step` of a job whose profile is `colocated` uses the rollout and train pools.
            hosts: names of the nodes on which the job's processes already run, by pool. Jobs that
                name the same node share it and take turns. None: the job gets node numbers in
                `place`, and has to start its processes on these nodes.
            keep: number of rollout nodes, counted from the first, on which a rollout's tail can
                continue while another job uses the rest (`progress`). 0: the tail keeps all nodes.
            lease_s: seconds without renewal after which the job counts as failed.
            wait_s: maximum seconds to wait for a place, and for each permit.
            waits_for_place: whether to wait until nodes are free, and for `wait_s` until the
                arbiter answers. False: refuse such a job, and wait for `ANSWER_S`.
            on_lost: called with the reason if another job may get the nodes; must not let the
                phase continue. Default: the process exits with code 75.

        Raises:
            JobRefused: the cluster can never place the job, or not now and it does not wait.
            TimeoutError: no place within `wait_s`, or no answer within `ANSWER_S`.
            ConnectionError: the server does not answer, or refuses the password or a command.
        """
        self._url, self._job = url, store.check_name(job)
        self._pools = {STEP: phases.POOLS} | dict(pools or {})
        self._lease_s, self._wait_s = lease_s, wait_s
        self._incarnation = secrets.token_hex(8)
        self._on_lost = on_lost or self._end
        self._redis = store.connect(url)
        self._count = 0
        self._is_placed = False
        self._closed = threading.Event()
        self.waits = _Waits()
        self.host_gb: dict[str, float] = {}
        """Measured host memory of the job on a node in GB, by pool; empty if not measured."""
        self._inside = ""
        """Name of the running phase; "" if no phase runs."""
        self.asked = 0
        """Number of the message that requested the most recent phase."""
        self._speaks = threading.Lock()
        self.place: dict[str, Any] = {}
        try:
            self._redis.ping()
            self._renew(self._redis)
            self._register()
        except redis.RedisError as error:
            raise ConnectionError(store.why(error, url)) from error
        self._thread = threading.Thread(target=self._heartbeat, name="mux lease", daemon=True)
        self._thread.start()
        try:
            more = {"hosts": {p: list(n) for p, n in hosts.items()}, "keep": keep} if hosts else {}
            self._say("join", profile=asdict(profile) | {"lease_s": lease_s}, **more)
            self.place = self._placed(waits_for_place)
        except BaseException:
            self.close()  # leave the cluster, so that the arbiter does not place a job that exited
            raise
        self._is_placed = True
        log.info("mux: %s", self.place["why"])

    @contextmanager
    def phase(self, name: str, resident: object | None = None) -> Iterator[None]:
        """Wait for the permit, load `resident` (a `Resident`) from host memory, run the block,
        write `resident` back, and release the nodes.

        Raises:
            TimeoutError: no permit within `wait_s`; the error names the jobs ahead.
        """
        if resident is not None and not isinstance(resident, Resident):
            raise TypeError(f"phase {name}: {type(resident).__name__} has no load() and store()")
        self.enter(name)
        got = begin = end = time.monotonic()
        try:
            if resident is not None:
                resident.load()
                begin = time.monotonic()
                self.waits.start_s[name] = begin - got
            try:
                yield
            finally:
                end = time.monotonic()
                if resident is not None:
                    resident.store()
        finally:
            self.leave(name, end - begin, begin - got + time.monotonic() - end)

    def enter(self, name: str) -> None:
        """Wait for the permit to run phase `name`.

        Raises:
            TimeoutError: no permit within `wait_s`; the error names the jobs ahead.
            ConnectionError: the server refuses this job, or does not answer within `wait_s`.
        """
        begin = time.monotonic()
        number = self._say("ask", pools=self._pools.get(name, (name,)))
        self._permitted(name, number)
        self.waits.waited_s[name] = time.monotonic() - begin
        self._inside, self.asked = name, number

    def leave(self, name: str, seconds: float, switch_s: float = 0.0) -> None:
        """Release the nodes to the next job.

        Args:
            seconds: duration of the phase, compared with the profile.
            switch_s: duration of loading and storing, compared with the pool's `switch_s`.
        """
        self._inside = ""
        more = {"gb": self.host_gb} if self.host_gb else {}
        self._say("done", phase=name, seconds=seconds, switch_s=switch_s, **more)

    def has_on_host(self, host_gb: dict[str, float]) -> None:
        """Set the host memory of the job on a node in GB, by pool, for `leave` to report."""
        self.host_gb = host_gb

    def progress(self, done: int, wanted: int, *, of: int) -> None:
        """Report that `done` of the `wanted` responses of a rollout are done. From the share
        `phase_mux.TAIL` on, `leave_now` may return nodes. `of`: number of the message that
        requested the rollout."""
        self._say("progress", of=of, done=done, wanted=wanted)

    def leave_now(self, *, of: int) -> tuple[int, ...]:
        """Return the rollout nodes, as indices in `hosts`, that the rollout should leave because
        another job could start there. Call `freed` once the devices of these nodes are empty.

        Raises:
            ConnectionError: the server refuses this job, or does not answer within `wait_s`.
        """
        text = self._try(lambda: self._redis.get(store.key(self._job, "move")), "move")
        about = store.loads(text)
        if about is None or (about["incarnation"], about["n"]) != (self._incarnation, of):
            return ()
        return tuple(about["leave"])

    def freed(self, nodes: Sequence[int], *, of: int) -> None:
        """Release these rollout nodes to other jobs. `of`: number of the message that requested the
        rollout."""
        self._say("freed", of=of, nodes=list(nodes))

    def close(self) -> None:
        """Leave the cluster. Idempotent. If the job ends inside a phase, the job keeps its permit
        until its lease expires, since its other ranks may still use the nodes."""
        if self._closed.is_set():
            return
        self._closed.set()
        if not self._inside:
            with contextlib.suppress(redis.RedisError):  # if Redis is down, the lease expires
                self._redis.rpush(store.key(self._job, "in"), self._message("leave", {}))
                self._redis.rpush(store.BELL, self._job)
        self._thread.join(store.TIMEOUT_S)

    # ---- messages

    def _register(self) -> None:
        # If the job has a Redis user of its own, `mux add` has registered the job.
        with contextlib.suppress(redis.exceptions.NoPermissionError):
            self._redis.sadd(store.JOBS, self._job)

    def _say(self, what: str, **more: Any) -> int:
        """Append a message to the job's inbox and return its number. The arbiter ignores messages
        whose number it has already seen."""
        with self._speaks:  # messages must arrive in the order of their numbers
            text = self._message(what, more)
            number = self._count
            self._try(lambda: self._redis.rpush(store.key(self._job, "in"), text), what)
        self._try(lambda: self._redis.rpush(store.BELL, self._job), what)
        return number

    def _message(self, what: str, more: Mapping[str, Any]) -> str:
        self._count += 1
        about = {"what": what, "incarnation": self._incarnation, "n": self._count}
        return store.dumps(about | dict(more))

    def _try(self, call: Callable[[], Any], what: str) -> Any:
        """Return the result of `call()`. While the server is down, retry for up to `wait_s`."""
        end = time.monotonic() + self._wait_s
        is_away = False
        while True:
            try:
                return call()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if isinstance(error, redis.AuthenticationError) or time.monotonic() > end:
                    raise ConnectionError(store.why(error, self._url)) from error
                if not is_away:
                    log.warning("mux: %s; retrying request %r", store.why(error, self._url), what)
                is_away = True
                time.sleep(0.2)
            except redis.RedisError as error:
                raise ConnectionError(store.why(error, self._url)) from error

    def _wait(
        self,
        what: str,
        ready: Callable[[], Any],
        missing: Callable[[], str],
        wait_s: float = math.inf,
    ) -> Any:
        """Wait until `ready` returns a value other than None, and return this value. Wait at most
        `wait_s` seconds, and not longer than the gate's `wait_s`."""
        wait_s = min(wait_s, self._wait_s)
        begin = said = time.monotonic()
        while (found := self._try(ready, what)) is None:
            now = time.monotonic()
            if now - begin > wait_s:
                raise TimeoutError(f"job {self._job}: waited {wait_s:g} s for {what}; {missing()}")
            if now - said > SAY_EVERY_S:
                log.info("mux: job has waited for %s for %.0f s; %s", what, now - begin, missing())
                said = now
            bell = store.key(self._job, "bell")
            self._try(lambda: self._redis.blpop([bell], timeout=LOOK_S), what)  # noqa: B023
        return found

    def _placed(self, waits: bool) -> dict[str, Any]:
        last: dict[str, Any] = {}

        def ready() -> dict[str, Any] | None:
            about = store.loads(self._redis.get(store.key(self._job, "place")))
            if about is None or about["incarnation"] != self._incarnation:
                return None
            if about != last:
                last.clear()
                last.update(about)
                if about["status"] == "queued":
                    log.info("mux: %s", about["why"])
            return None if about["status"] == "queued" and waits else about

        def missing() -> str:
            return last.get("why") or "the arbiter does not answer; check it with `mux status`"

        about = self._wait("place", ready, missing, math.inf if waits else ANSWER_S)
        if about["status"] != "placed":
            raise JobRefused(about.get("why") or f"job {self._job}: {about['status']}")
        return about

    def _permitted(self, name: str, number: int) -> None:
        behind: list[str] = []

        def ready() -> dict[str, Any] | None:
            about = store.loads(self._redis.get(store.key(self._job, "permit")))
            if about is None or about["incarnation"] != self._incarnation or about["n"] != number:
                return None
            behind[:] = about["behind"]
            return about if about["slots"] else None

        def missing() -> str:
            return f"behind {', '.join(behind)}" if behind else "the arbiter does not answer"

        self._wait(f"permit for {name}", ready, missing)

    # ---- the lease

    def _renew(self, client: store.Client) -> None:
        key = store.key(self._job, "alive")
        client.set(key, self._incarnation, px=int(self._lease_s * 1000))

    def _heartbeat(self) -> None:
        often_s = self._lease_s / 10
        client = store.connect(self._url, min(store.TIMEOUT_S, often_s))
        renewed = time.monotonic()
        while not self._closed.wait(often_s):
            begin = time.monotonic()
            try:
                self._renew(client)
                renewed = begin
                about = store.loads(client.get(store.key(self._job, "place")))
                if self._is_placed and (
                    about is None
                    or about["incarnation"] != self._incarnation
                    or about["status"] == "lost"
                ):
                    reason = "another process joined under this name, or its lease expired"
                    if about is not None and about["incarnation"] == self._incarnation:
                        reason = about.get("why") or reason
                    self._on_lost(reason)
                    return
            except redis.RedisError as error:
                if _refuses_connections(error):
                    renewed = begin  # without a server no job gets these nodes
            # Give up at 2/3 of the lease: one more try (pause, connect, answer) may take the rest.
            if time.monotonic() - renewed > self._lease_s * 2 / 3 and not self._closed.is_set():
                self._on_lost(f"its lease of {self._lease_s:g} s could not be renewed")
                return

    def _end(self, reason: str) -> None:
        log.error("mux: job %s exits: %s; start it again to resume", self._job, reason)
        os._exit(EXIT_LOST)


def _refuses_connections(error: redis.RedisError) -> bool:
    """Return whether the error means that no process listens at the server's port."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def connect(
    url: str,
    job: str,
    profile: Profile | None,
    *,
    otherwise: Literal["wait", "solo"] = MuxConfig.if_unavailable,
    slo: float = MuxConfig.slo,
    colocated: bool | None = None,
    hosts: Callable[[Profile], Mapping[str, Sequence[str]]] | None = None,
    **more: Any,
) -> "PermitGate | NoGate":
    """Return the gate of a job; if `url` is empty, a gate that lets every phase start at once.

    `otherwise`: action if the server does not answer or has no free nodes. `wait`: wait, and
    raise if the job can never get nodes. `solo`: run as if no other job used the nodes. `profile`:
    None: use the profile given to `mux add`, with this `slo`. `colocated`: required value in the
    profile; None: any. `hosts`: function from a profile to `hosts` of the `PermitGate`.

    Raises:
        ValueError: the job has no profile, or its profile has another value of `colocated`.
        JobRefused, TimeoutError, ConnectionError: raised by `PermitGate`, except with `solo`.
    """
    if not url:
        return NoGate()

    def about() -> Profile:
        found = profile or stored(url, job, slo)
        if colocated is not None and found.colocated != colocated:
            kinds = "some ranks sampled and others trained", "every rank sampled and trained"
            raise ConfigError(
                f"job {job}: in the profiled run {kinds[found.colocated]}, but in this run "
                f"{kinds[colocated]}; profile it with the same cluster.rollout_ranks"
            )
        return found

    def join() -> PermitGate:
        profile = about()
        named = hosts(profile) if hosts else None
        waits = otherwise == "wait"
        return PermitGate(url, job, profile, hosts=named, waits_for_place=waits, **more)

    if otherwise == "solo":
        try:
            return join()
        except (ConnectionError, JobRefused, TimeoutError) as error:
            log.warning("mux: %s; the job runs solo", error)
            return NoGate()
    end, said = time.monotonic() + more.get("wait_s", math.inf), -math.inf
    while True:
        try:
            return join()
        except ConnectionError as error:
            is_down = isinstance(error.__cause__, redis.ConnectionError | redis.TimeoutError)
            is_wrong = isinstance(error.__cause__, redis.AuthenticationError)
            if not is_down or is_wrong or time.monotonic() > end:
                raise
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                log.warning("mux: %s; the job waits", error)
            time.sleep(min(LOOK_S, max(0.0, end - time.monotonic()) + 0.01))


def stored(url: str, job: str, slo: float) -> Profile:
    """Return a job's profile that was given to `mux add --profile`, with this `slo`.

    Raises:
        ValueError: `mux add` was given no profile for this job.
        ConnectionError: the server does not answer, or refuses the password or a command.
    """
    try:
        found = store.loads(store.connect(url).get(store.key(store.check_name(job), "profile")))
    except redis.RedisError as error:
        raise ConnectionError(store.why(error, url)) from error
    if found is None:
        raise ConfigError(
            f"job {job}: no profile with the worst-case times of its phases. Run it once with "
            "--debug.full_length and without --mux.url, then give that run's mux_profile.json to "
            "`rlcore mux add --profile` or --mux.profile"
        )
    return replace(Profile.of(found), slo=slo)


def phase(gate: "PhaseGate", name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function to run as a phase: `@phase(gate, "rollout")`."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with gate.phase(name):
                return function(*args, **kwargs)

        return inside

    return wrap
