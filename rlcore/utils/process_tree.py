"""Terminate a guarded child and every process that it started; find processes that are stopped."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from rlcore.utils.log import log

MARK = "RLCORE_CHILD"
"""Environment variable with a value that is unique to a guarded child (its mark). All processes
that the child starts inherit it and so can be found, whatever their group, session or parent."""
STOPPED_S = 15
"""Seconds after which a process that stays stopped by a signal counts as failed."""
_KILL_S = 2.0
_LOOK_S = 1.0


def has_exited(process: subprocess.Popen) -> bool:
    """Return whether the process has ended; its pid is not reused before `process.wait`."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by a signal, such as SIGSTOP. A process that a debugger
    holds is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] == b"T"
    except (FileNotFoundError, ProcessLookupError):
        return False


class StopMonitor:
    """Monitor that finds a process which stays stopped by a signal and thus will not answer.

    Counts looks, at most one per second, instead of time. So a suspended job, whose processes are
    all stopped for any time, has no failed process when it continues.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self._looked, self._count = pid, 0.0, 0

    def is_stuck(self) -> bool:
        """Return whether the process was stopped in the last `STOPPED_S` looks. Call this often."""
        now = time.monotonic()
        if now >= self._looked + _LOOK_S:
            self._looked = now
            self._count = self._count + 1 if is_stopped(self.pid) else 0
        return self._count >= STOPPED_S


def end_tree(process: subprocess.Popen, mark: str) -> None:
    """Send SIGKILL to `process`, its descendants, and every process with `mark` in its environment.
    `process` itself is stopped first and killed last, because it adopts orphaned descendants, which
    are then found."""
    if not has_exited(process):
        os.kill(process.pid, signal.SIGSTOP)
    _kill_family(process.pid, mark)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # The pid is not reused before `wait`.


def end_marked(mark: str) -> None:
    """Send SIGKILL to every process with `mark` in its environment."""
    _kill_family(None, mark)


def _kill_family(root: int | None, mark: str) -> None:
    deadline = time.monotonic() + _KILL_S
    while victims := _family(root, mark) - {root}:
        for pid in victims:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            log.error("processes %s are still running after SIGKILL", sorted(victims)[:5])
            break
        time.sleep(0.001)


def _family(root: int | None, mark: str) -> set[int]:
    """Return the running descendants of `root` (None: of no process) and running processes with
    the mark in their environment."""
    needle = f"{MARK}={mark}".encode()
    parent_of: dict[int, int] = {}
    marked: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
            if stat[0] in (b"Z", b"X"):
                continue
            parent_of[pid] = int(stat[1])
            if needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                marked.add(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    if root is None:
        return marked
    return {pid for pid in parent_of if pid in marked or _descends(pid, root, parent_of)}


def _descends(pid: int, root: int, parent_of: dict[int, int]) -> bool:
    while pid in parent_of:
        pid = parent_of[pid]
        if pid == root:
            return True
    return False
