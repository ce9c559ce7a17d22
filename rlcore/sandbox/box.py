"""Interface of the sandbox: run an untrusted program, or test its functions, within limits."""

import contextlib
import fcntl
import json
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from rlcore.sandbox import judge
from rlcore.sandbox.isolation import IsolationGrade, SandboxProcess
from rlcore.utils.log import log

_GRACE_S = 5.0
_PAUSES_S = 1.0, 5.0
"""Seconds before each retry if a sandbox does not start."""
_LOOK_S, _KILLED_S = 0.1, 0.01
_REPORT_BYTES = 4096
_READ_BYTES = 1 << 16
_SCRIPT, _JUDGE = 1, 2


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """Resource limits of a program."""

    memory_mb: int = 512
    """Memory limit of each process and of all together, in MB; files in /tmp may add 128 MB."""
    processes: int = 32
    """Maximum number of processes; threads count too."""
    output_bytes: int = 1 << 20
    """Maximum size in bytes of stdout and stderr together. A program that writes more is killed."""
    file_mb: int = 16
    """Maximum size in MB of a file that a program writes."""


@dataclass(frozen=True, kw_only=True)
class ProgramOutcome:
    """Outcome of a program: exit status, reason for a kill, resources and output."""

    code: int
    """Exit status of the program; -N if signal N killed it."""
    why: str
    """Why the sandbox killed the program: "timeout", "memory", "cpu" or "output"; "": not
    killed."""
    seconds: float
    peak_bytes: int
    """Peak resident memory of the program in bytes, measured by sampling."""
    stdout: bytes = b""
    stderr: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """Results of the tests of a program."""

    passed: tuple[bool, ...]
    """Whether each test passed, in the tests' order; False for tests that were not reached."""
    outcome: ProgramOutcome
    """Outcome of the program that the tests called."""


@dataclass
class _RunningProgram:
    """State of a running program."""

    kills: str = ""
    report: dict | None = None
    streams: dict[int, bytearray] = field(default_factory=dict)

    def kill(self, why: str) -> None:
        """Record why the program is killed."""
        self.kills = why

    def end(self, report: dict) -> None:
        """Record the sandbox's report that the program has ended."""
        self.report = report


class Broken(RuntimeError):
    """Failure of the sandbox itself. The next program runs in a new sandbox."""


Deadline = Callable[[], float]
"""Function that returns the time at which a program is killed, on the clock `time.monotonic()`. The
function is called repeatedly, so the deadline may become earlier."""


class Sandbox:
    """Sandbox that runs one program at a time, each in a fresh process. Only the thread that
    created it may use it."""

    def __init__(self, grade: IsolationGrade, packages: Sequence[str] = ()) -> None:
        """Start the sandbox with this grade of isolation (see `isolation.grade`). Programs may
        import from the folders `packages`. Raises RuntimeError or TimeoutError if the start
        fails."""
        self._grade, self._packages = grade, tuple(packages)
        self._walls: SandboxProcess | None = SandboxProcess(grade, self._packages)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the sandbox's main process. The id changes after `Broken`."""
        assert self._walls is not None
        return self._walls.pid

    def close(self) -> None:
        """Stop the sandbox. With namespaces, kill all its processes. Idempotent."""
        if self._walls is not None:
            self._walls.close()
            self._walls = None

    def run(
        self,
        source: str,
        deadline: Deadline,
        *,
        stdin: str | bytes = "",
        limits: ProgramLimits | None = None,
    ) -> ProgramOutcome:
        """Run the source as a script. Raises Broken if the sandbox fails meanwhile."""
        limits = limits or ProgramLimits()
        with _Files() as files:
            out, err = files.pipe(), files.pipe()
            given = files.memory(stdin)
            run = _RunningProgram(streams={out[0]: bytearray(), err[0]: bytearray()})
            self._order(
                _SCRIPT,
                "script",
                limits,
                deadline,
                [files.memory(source), given, out[1], err[1]],
            )
            files.close(out[1], err[1])
            self._wait({_SCRIPT: run}, _SCRIPT, deadline, limits.output_bytes)
            return _outcome(run, bytes(run.streams[out[0]]), bytes(run.streams[err[0]]))

    def test(
        self,
        source: str,
        tests: Sequence[str],
        deadline: Deadline,
        *,
        limits: ProgramLimits | None = None,
    ) -> Verdicts:
        """Run the source, then run each test, which calls the source's functions (see `judge`).
        Output of the program is discarded. Raises Broken if the sandbox fails meanwhile."""
        limits = limits or ProgramLimits()
        with _Files() as files:
            verdict = files.pipe()
            ours, theirs = socket.socketpair()
            with ours, theirs:
                nothing = files.nothing()
                self._order(
                    _SCRIPT,
                    "functions",
                    limits,
                    deadline,
                    [files.memory(source), nothing, nothing, nothing, ours.fileno()],
                )
                self._order(
                    _JUDGE,
                    "tests",
                    limits,
                    deadline,
                    [
                        files.memory(json.dumps(list(tests))),
                        nothing,
                        verdict[1],
                        nothing,
                        theirs.fileno(),
                    ],
                )
            files.close(verdict[1])
            runs = {
                _SCRIPT: _RunningProgram(),
                _JUDGE: _RunningProgram(streams={verdict[0]: bytearray()}),
            }
            self._wait(runs, _JUDGE, deadline, limits.output_bytes)
        said = bytes(runs[_JUDGE].streams[verdict[0]])[: len(tests)]
        passed = [said[i : i + 1] == judge.PASSED for i in range(len(tests))]
        return Verdicts(passed=tuple(passed), outcome=_outcome(runs[_SCRIPT], b"", b""))

    # ---- messages to and from the sandbox's process

    def _order(
        self, job: int, what: str, limits: ProgramLimits, deadline: Deadline, fds: list[int]
    ) -> None:
        if self._walls is None:
            self._walls = self._start()
        order = {
            "job": job,
            "what": what,
            "seconds": max(0.0, deadline() - time.monotonic()),
            "memory": limits.memory_mb << 20,
            "processes": limits.processes,
            "file_bytes": limits.file_mb << 20,
        }
        try:
            self._walls.limit(limits.memory_mb << 20, limits.processes)
            socket.send_fds(self._walls.control, [json.dumps(order).encode()], fds)
        except OSError as error:
            raise self._broken("does not accept programs") from error

    def _start(self) -> SandboxProcess:
        """Start a new sandbox, with retries, so that a brief lack of memory or disk space does not
        end the run. Raises RuntimeError if all tries fail."""
        for pause in (*_PAUSES_S, None):
            try:
                return SandboxProcess(self._grade, self._packages)
            except (RuntimeError, OSError) as error:
                if pause is None:
                    tries = len(_PAUSES_S) + 1
                    raise RuntimeError(
                        f"the sandbox did not restart in {tries} tries: {error}"
                    ) from error
                log.warning("sandbox: %s; retrying in %g s", error, pause)
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _wait(
        self, runs: dict[int, _RunningProgram], main: int, deadline: Deadline, room: int
    ) -> None:
        """Wait until all programs in `runs` have ended. When `main` ends, kill the others."""
        assert self._walls is not None
        given_up = float("inf")
        with selectors.DefaultSelector() as selector:
            selector.register(self._walls.control, selectors.EVENT_READ)
            for run in runs.values():
                for fd in run.streams:
                    os.set_blocking(fd, False)
                    selector.register(fd, selectors.EVENT_READ, run)
            while any(run.report is None for run in runs.values()):
                now = time.monotonic()
                if now >= deadline():
                    self._kill(runs, "timeout")
                if runs[main].report is not None or any(run.kills for run in runs.values()):
                    self._kill(runs, "done")
                    given_up = min(given_up, now + _GRACE_S)
                if now > given_up:
                    raise self._broken(f"did not end a program within {_GRACE_S:g} s")
                wait = min(max(_KILLED_S, deadline() - now), _LOOK_S)
                for key, _ in selector.select(wait):
                    if key.data is None:
                        self._report(runs)
                    elif not _read(key.fd, key.data, room):
                        selector.unregister(key.fd)
                for number, run in runs.items():
                    if sum(map(len, run.streams.values())) > room and run.report is None:
                        self._kill({number: run}, "output")
            for key in list(selector.get_map().values()):  # read the remaining output
                if key.data is not None:
                    _read(key.fd, key.data, room)
        try:
            self._walls.empty_tmp()
        except (OSError, subprocess.SubprocessError) as error:
            raise self._broken("cannot empty its /tmp") from error

    def _report(self, runs: dict[int, _RunningProgram]) -> None:
        assert self._walls is not None
        try:
            data = self._walls.control.recv(_REPORT_BYTES)
        except OSError:
            data = b""
        if not data:
            raise self._broken("failed")
        report = json.loads(data)
        runs[report["job"]].end(report)

    def _kill(self, runs: dict[int, _RunningProgram], why: str) -> None:
        assert self._walls is not None
        for number, run in runs.items():
            if not run.kills and run.report is None:
                run.kill(why)
                with contextlib.suppress(OSError):  # if the sandbox has failed, `_report` raises
                    self._walls.control.send(json.dumps({"kill": number}).encode())

    def _broken(self, how: str) -> Broken:
        self.close()
        return Broken(f"the sandbox {how}")


def _read(fd: int, run: _RunningProgram, room: int) -> bool:
    """Read the available output of a program, until slightly more than `room` bytes are stored.
    Returns False at the end of the stream."""
    try:
        while sum(map(len, run.streams.values())) <= room:
            data = os.read(fd, _READ_BYTES)
            if not data:
                return False
            run.streams[fd] += data
    except BlockingIOError:
        return True
    return True


def _outcome(run: _RunningProgram, out: bytes, err: bytes) -> ProgramOutcome:
    assert run.report is not None
    why = run.report["why"]
    if why == "killed":
        why = "" if run.kills == "done" else run.kills
    return ProgramOutcome(
        code=run.report["code"],
        why=why,
        seconds=run.report["seconds"],
        peak_bytes=run.report["peak"],
        stdout=out,
        stderr=err,
    )


class _Files:
    """File descriptors of one program run; leaving the context closes them."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(*self._open)

    def close(self, *fds: int) -> None:
        """Close these descriptors now; the context no longer closes them."""
        for fd in fds:
            self._open.discard(fd)
            os.close(fd)

    def pipe(self) -> tuple[int, int]:
        pair = os.pipe()
        self._open.update(pair)
        return pair

    def nothing(self) -> int:
        fd = os.open(os.devnull, os.O_RDWR)
        self._open.add(fd)
        return fd

    def memory(self, content: str | bytes) -> int:
        """Create a sealed, read-only file in memory with this content; return its descriptor."""
        fd = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._open.add(fd)
        if isinstance(content, str):
            content = content.encode("utf-8", "surrogatepass")
        data = memoryview(content)
        while data:
            data = data[os.write(fd, data) :]
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd
