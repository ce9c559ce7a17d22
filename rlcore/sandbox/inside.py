"""Interpreter inside the sandbox that forks one process per program.

    python -m rlcore.sandbox.inside CONTROL SETTINGS

CONTROL is a socket, SETTINGS is JSON (`SandboxSettings`). The socket receives requests (`Order`):
JSON with file descriptors attached. A program's source and tests come through these descriptors and
are read after the fork. This process never reads them, so a program cannot find another program's
tests in inherited memory.

The channel of `utils/children.py` is not used: this module imports only the standard library, and
it receives descriptors.

Own code instead of one bubblewrap per program: forks inside one sandbox run 29 scripts per second
instead of 2.7 (`tools/results/sandbox.json`, on a loaded machine).
"""

import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from rlcore.sandbox import confine, judge, program

_WATCH_S = 0.05
_ORDER_BYTES = 1 << 16
_MAX_FDS = 8
_KILL_S = 2.0
_FILES = 64
_TICKS = os.sysconf("SC_CLK_TCK")
_CPUS, _SPARE_CPU_S = 4, 2.0
"""A program may use this many CPUs until its deadline, plus a reserve in seconds."""
_BUFFER_BYTES = 208 << 10
"""Linux's default of what a socket buffers (net.core.wmem_default), more than a pipe's 64 KB."""
_RESERVE_BYTES = 2 << 30
"""Programs are killed if the machine has less memory left than this, or than a 16th of it."""
TMP_BYTES, TMP_FILES = 128 << 20, 4096
_CHANNEL = 3
_PRELOADED = (
    "bisect cmath collections copy dataclasses datetime decimal fractions functools heapq "
    "itertools math operator re statistics string typing"
)
"""Modules that programs often import; imported once, before the forks."""


class SandboxSettings(NamedTuple):
    """Settings of this sandbox, the same for all its programs."""

    has_namespaces: bool
    """Whether each program gets its own pid namespace, an empty /tmp, and no /proc."""
    to_nobody: bool
    """Whether programs run as the user `nobody`."""
    seccomp: bool
    readable: list[str]
    """Paths that Landlock lets programs read; empty: Landlock is not used."""
    tmp: str
    """Working folder of programs without namespaces; `SandboxProcess` empties the folder."""
    spare_processes: int
    """Number of other processes that the kernel counts towards a program's process limit."""
    cgroup: list[int]
    """Descriptors of the files `cgroup.procs` through which this process enters its cgroups."""
    ooms: int
    """Descriptor of the file that counts kills at the cgroup's memory limit; -1: no cgroup."""


class Order(NamedTuple):
    """Request to run one program. The attached descriptors are source, stdin, stdout, stderr, and
    optionally a channel."""

    job: int
    what: str
    """Kind of program: script, functions or tests."""
    seconds: float
    memory: int
    """Limit in bytes of each process's address space and of all processes' memory together."""
    processes: int
    file_bytes: int


class ProgramJob(NamedTuple):
    """Program that is running."""

    order: Order
    pid: int
    pidfd: int
    start: float
    tasks: dict[str, Any]
    """State of the program: `peak` memory in bytes, and `why` the sandbox killed it."""


class Zygote:
    """Server that forks one process per program; see the module docstring."""

    def __init__(self, control: socket.socket, settings: SandboxSettings) -> None:
        self._control, self._settings = control, settings
        self._pids = confine.PidNamespaces() if settings.has_namespaces else None
        self._filter = confine.seccomp_program() if settings.seccomp else b""
        self._jobs: dict[int, ProgramJob] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._ooms = self._oom_kills()
        if settings.has_namespaces:
            confine.hide_proc()
            confine.mount_tmp(TMP_BYTES, TMP_FILES)

    def serve(self) -> None:
        """Process requests until the client closes the socket."""
        while True:
            wait_s = _WATCH_S if self._jobs else None
            ready = self._poll.poll(None if wait_s is None else wait_s * 1000)
            for fd, _ in ready:
                if fd == self._control.fileno():
                    if not self._order():
                        return
                else:
                    self._ended(next(j for j in self._jobs.values() if j.pidfd == fd))
            if not ready:
                self._watch()

    def end(self) -> None:
        """Kill all programs and every process that they started. In a pid namespace, the kernel
        does so when this process exits."""
        self._jobs.clear()
        if self._pids is None:
            self._sweep()

    def _order(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, _ORDER_BYTES, _MAX_FDS)
        if not data:
            return False
        message = json.loads(data)
        if "kill" in message:
            self._kill(message["kill"], "killed")
            return True
        try:
            self._start(Order(**message), fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _start(self, order: Order, fds: list[int]) -> None:
        if self._pids is not None:
            self._pids.for_next_child()
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._prefer_for_oom(order)
            _child(self._settings, order, fds, self._filter)
        pidfd = os.pidfd_open(pid)
        self._poll.register(pidfd, select.POLLIN)
        self._jobs[order.job] = ProgramJob(order, pid, pidfd, start, {"peak": 0, "why": ""})

    def _kill(self, number: int, why: str) -> None:
        job = self._jobs.get(number)
        if job is not None:  # a program that has ended needs no signal
            job.tasks["why"] = job.tasks["why"] or why
            signal.pidfd_send_signal(job.pidfd, signal.SIGKILL)

    def _ended(self, job: ProgramJob) -> None:
        seconds = time.monotonic() - job.start
        _, status, usage = os.wait4(job.pid, 0)
        self._poll.unregister(job.pidfd)
        os.close(job.pidfd)
        del self._jobs[job.order.job]
        if job.order.what != "tests" and self._has_oom():
            job.tasks["why"] = job.tasks["why"] or "memory"
            self._ooms = self._oom_kills()
        if self._pids is None:
            self._sweep()
        elif job.order.what != "tests" and os.listdir("/tmp"):
            confine.unmount_tmp()
            confine.mount_tmp(TMP_BYTES, TMP_FILES)
        report = {
            "job": job.order.job,
            "code": os.waitstatus_to_exitcode(status),
            "why": job.tasks["why"],
            "seconds": seconds,
            "peak": max(job.tasks["peak"], usage.ru_maxrss * 1024),
        }
        self._control.send(json.dumps(report).encode())

    def _watch(self) -> None:
        """Measure each program's memory and CPU time over all its processes, and kill programs
        above a limit. Rlimits bound each process, but not the sum."""
        tree = self._processes()
        inherited, _ = self._memory(os.getpid())  # bytes that a fork shares with this process
        judges = [job.pid for job in self._jobs.values() if job.order.what == "tests"]
        judging = {pid for judge in judges for pid in _family(judge, tree)}
        others = _family(os.getpid(), tree) - judging - {os.getpid()}  # with orphans of the program
        is_full = self._has_oom() or self._is_machine_full()
        for number, job in list(self._jobs.items()):
            family = judging if job.pid in judges else others
            sizes = map(self._memory, family)
            used = sum(max(0, pages - inherited) + kernel for pages, kernel in sizes)
            job.tasks["peak"] = max(job.tasks["peak"], used)
            if used > job.order.memory or (is_full and job.pid not in judges):
                self._kill(number, "memory")
            elif sum(tree[pid][1] for pid in family) > _CPUS * job.order.seconds + _SPARE_CPU_S:
                self._kill(number, "cpu")

    def _memory(self, pid: int) -> tuple[int, int]:
        """Return the bytes of a process, resident and swapped; and of the kernel for it: page
        tables, and the most that its descriptors may buffer. 0, 0 if the process has exited."""
        try:
            for path in self._threads(pid):
                lines = map(bytes.split, self._read(f"{path}/status").splitlines())
                sizes = {line[0]: int(line[1]) << 10 for line in lines if line[2:] == [b"kB"]}
                if sizes:
                    pages = sizes[b"VmRSS:"] + sizes.get(b"VmSwap:", 0)
                    return pages, sizes[b"VmPTE:"] + self._descriptors(path) * _BUFFER_BYTES
        except OSError:
            return 0, 0
        return 0, 0

    def _threads(self, pid: int) -> Iterator[str]:
        """Yield the path of a process, then of its threads. The kernel reports no memory for a
        process whose first thread has exited."""
        yield str(pid)
        yield from (f"{pid}/task/{name}" for name in self._list(f"{pid}/task"))

    def _descriptors(self, path: str) -> int:
        """Return how many descriptors are open in addition to the program's own three."""
        count = os.stat(f"{path}/fd", dir_fd=self._proc).st_size  # 0 before Linux 6.2
        return max(0, (count or len(self._list(f"{path}/fd"))) - _CHANNEL)

    def _is_machine_full(self) -> bool:
        """Return whether the machine is about to run out of memory. Not asked of a sandbox with a
        cgroup, whose memory is bounded."""
        if self._settings.ooms >= 0:
            return False
        lines = (line.split() for line in self._read("meminfo").splitlines())
        sizes = {name: int(value) << 10 for name, value, *_ in lines}
        return sizes[b"MemAvailable:"] < min(_RESERVE_BYTES, sizes[b"MemTotal:"] >> 4)

    def _has_oom(self) -> bool:
        return self._oom_kills() > self._ooms

    def _oom_kills(self) -> int:
        """Return how many processes the kernel has killed at the cgroup's memory limit."""
        if self._settings.ooms < 0:
            return 0
        text = os.pread(self._settings.ooms, 4096, 0)
        return int(text.partition(b"oom_kill ")[2].split()[0])

    def _prefer_for_oom(self, order: Order) -> None:
        """Let the kernel kill this process before all others if memory runs out; not a judge."""
        if order.what != "tests":
            confine.set_dumpable(True)  # else a normal user must not write the file
            fd = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=self._proc)
            os.write(fd, b"1000")
            os.close(fd)

    def _sweep(self) -> None:
        """Kill all processes below this one that belong to no running program. Without pid
        namespaces, processes that a program leaves behind become children of this process. Stop
        all of them before killing the first, because a fork bomb replaces each killed process."""
        end = time.monotonic() + _KILL_S
        stopped: set[int] = set()
        while self._has_strays() and time.monotonic() < end:
            tree = self._processes()
            kept = {pid for job in self._jobs.values() for pid in _family(job.pid, tree)}
            strays = _family(os.getpid(), tree) - kept - {os.getpid()}
            fresh = strays - stopped
            for pid in fresh or strays:
                try:
                    os.kill(pid, signal.SIGSTOP if fresh else signal.SIGKILL)
                    if not fresh and tree[pid][0] == os.getpid():
                        os.waitpid(pid, 0)
                except (ProcessLookupError, ChildProcessError):
                    continue
            stopped |= fresh

    def _has_strays(self) -> bool:
        """Return whether this process has children that are not running programs."""
        children = self._read(f"{os.getpid()}/task/{os.getpid()}/children")
        return bool(set(map(int, children.split())) - {j.pid for j in self._jobs.values()})

    def _processes(self) -> dict[int, tuple[int, float]]:
        """Return the parent's id and the CPU seconds, with those of ended children, of every
        visible process, by process id."""
        found = {}
        for name in self._list("."):
            if name.isdigit():
                try:
                    fields = self._read(f"{name}/stat").rpartition(b") ")[2].split()
                except OSError:  # the process has just exited
                    continue
                found[int(name)] = (int(fields[1]), sum(map(int, fields[11:15])) / _TICKS)
        return found

    def _read(self, path: str) -> bytes:
        """Read a file of /proc. Raises OSError if its process has exited."""
        fd = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        try:
            return os.read(fd, 1 << 16)
        finally:
            os.close(fd)

    def _list(self, path: str) -> list[str]:
        """List a folder of /proc. Raises OSError if its process has exited."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)


def _family(root: int, tree: dict[int, tuple[int, float]]) -> set[int]:
    """Return the process ids of `root` and its descendants. Orphans in a pid namespace are children
    of the namespace's first process."""
    family = {root} & tree.keys()
    size = 0
    while len(family) != size:
        size = len(family)
        family |= {pid for pid, (parent, _) in tree.items() if parent in family}
    return family


def _child(settings: SandboxSettings, order: Order, fds: list[int], filter: bytes) -> None:
    """Confine this process, then run the program in it. Does not return."""
    status = 125
    try:
        source = _arrange(fds)
        _confine(settings, order, filter)
        status = _run(order.what, source)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException as error:  # a limit was reached early, or the kernel refused a call
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # the program or the reader closed the stream
                continue
        os._exit(status & 0xFF)


def _arrange(fds: list[int]) -> str:
    """Read the source from the first descriptor, renumber the other given descriptors 0, 1, 2, ...,
    and close all remaining descriptors."""
    with open(fds[0], "rb", closefd=False) as file:
        source = file.read().decode("utf-8", "surrogatepass")
    spare = [os.dup(fd) for fd in fds[1:]]  # copies, so that dup2 below overwrites no source
    for place, fd in enumerate(spare):
        os.dup2(fd, place)
    confine.close_from(len(spare))
    for place, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        setattr(sys, name, os.fdopen(place, mode, encoding="utf-8", errors="replace"))
    return source


def _confine(settings: SandboxSettings, order: Order, filter: bytes) -> None:
    os.setsid()
    processes = order.processes + settings.spare_processes
    confine.limit(order.seconds, order.memory, processes, order.file_bytes, _FILES)
    tmp = "/tmp" if settings.has_namespaces else settings.tmp
    os.chdir("/" if order.what == "tests" else tmp)
    os.environ["HOME"] = os.environ["TMPDIR"] = tmp
    confine.drop_privileges(settings.to_nobody)
    confine.die_with_parent()
    confine.set_dumpable(order.what != "tests")
    if settings.readable:
        confine.landlock([*settings.readable, *confine.DEVICES], [tmp, "/dev/null"])
    if filter:
        confine.filter_calls(filter)


def _run(what: str, source: str) -> int:
    random.seed(0)  # fixed seed, because Python reseeds `random` after a fork
    if what == "script":
        return program.run_script(source)
    channel = socket.socket(fileno=_CHANNEL).makefile("rwb")
    if what == "functions":
        return program.serve(source, channel)
    judge.judge(json.loads(source), channel, sys.stdout.buffer)
    return 0


def main() -> None:
    """Run programs until the client closes the socket; see the module docstring."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    settings = SandboxSettings(**json.loads(sys.argv[2]))
    for fd in settings.cgroup:
        os.write(fd, b"0")  # 0: this process
        os.close(fd)
    zygote = Zygote(control, settings)
    confine.set_dumpable(False)  # programs of the same user must not inspect this process
    if not settings.has_namespaces:
        confine.adopt_orphans()
    for name in _PRELOADED.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # garbage collection in a fork must not copy shared pages
    control.send(b"{}")
    try:
        zygote.serve()
    finally:
        zygote.end()


if __name__ == "__main__":
    main()
