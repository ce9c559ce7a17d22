"""Cgroup of a sandbox: the kernel counts all memory of its programs, and limits it.

A cgroup is made below the process's own, where this is allowed: by root, or by a user to whom the
folder belongs. cgroup v2 lets a group hold either processes or limited groups, so there it is made
beside the process's own group if the parent limits memory. No privilege is asked for and no other
group is changed.
"""

import contextlib
import fcntl
import os
import signal
import time
from pathlib import Path

PREFIX = "rlcore-sandbox-"
"""Begin of the names of cgroups and folders of sandboxes."""
_CONTROLLERS = ("memory", "pids")
_END_S = 5.0
_NEW_S = 60.0


class Cgroup:
    """Cgroup of one sandbox, in each hierarchy that has a controller. `close` removes it."""

    def __init__(self, name: str) -> None:
        """Create the cgroup. Raises OSError if this user must not, RuntimeError if the machine
        cannot limit memory and processes."""
        self._locks: list[int] = []
        self._folders: dict[str, Path] = {}
        self._limits = (0, 0)
        try:
            for controller, parent in parents().items():
                folder = parent / (PREFIX + name)
                if folder not in self._folders.values():
                    remove_stale(parent)
                    folder.mkdir()
                    self._locks.append(lock(folder))
                self._folders[controller] = folder
        except BaseException:
            self.close()
            raise

    def open(self) -> tuple[list[int], int]:
        """Open the files through which a process enters the cgroup, and the file that counts kills
        at the memory limit. The caller closes the descriptors."""
        folders = dict.fromkeys(self._folders.values())
        entries = [os.open(f / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for f in folders]
        memory = self._folders["memory"]
        events = next(
            p for p in (memory / "memory.events", memory / "memory.oom_control") if p.exists()
        )
        return entries, os.open(events, os.O_RDONLY | os.O_CLOEXEC)

    def give_to(self, user: int) -> None:
        """Let a normal user make cgroups in this cgroup, as far as v1 allows it."""
        for folder in dict.fromkeys(self._folders.values()):
            for path in (folder, folder / "cgroup.procs"):
                os.chown(path, user, user)

    def limit(self, memory: int, processes: int) -> None:
        """Set the limits in bytes and processes, without swap. Raises OSError if the cgroup holds
        more."""
        if self._limits == (memory, processes):
            return
        group, pids = self._folders["memory"], self._folders["pids"]
        if (group / "memory.max").exists():
            (group / "memory.max").write_text(str(memory))
            _write_if_there(group / "memory.swap.max", "0")
        else:
            _write_if_there(group / "memory.memsw.limit_in_bytes", "-1")  # never below the next
            (group / "memory.limit_in_bytes").write_text(str(memory))
            _write_if_there(group / "memory.memsw.limit_in_bytes", str(memory))
        (pids / "pids.max").write_text(str(processes))
        self._limits = (memory, processes)

    def close(self) -> None:
        """Kill all processes in the cgroup and remove it. Idempotent. Raises OSError if a process
        does not end."""
        folders, self._folders = dict.fromkeys(self._folders.values()), {}
        try:
            for folder in folders:
                _end(folder)
        finally:
            while self._locks:
                os.close(self._locks.pop())


def lock(folder: Path) -> int:
    """Lock a folder, so that `is_stale` returns False while a process has the descriptor."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def is_stale(folder: Path) -> bool:
    """Return whether a folder of a sandbox is left over: this user's, locked by no process, and not
    just about to be locked."""
    try:
        stat = folder.lstat()
        if stat.st_uid != os.geteuid() or time.time() - stat.st_ctime < _NEW_S:
            return False
        os.close(lock(folder))
    except OSError:  # locked, or removed meanwhile
        return False
    return True


def remove_stale(parent: Path) -> None:
    """Remove the cgroups that processes left below `parent` when they were killed."""
    for folder in parent.glob(PREFIX + "*"):
        if is_stale(folder):
            with contextlib.suppress(OSError):
                _end(folder)


def _end(folder: Path) -> None:
    """Kill the processes of a cgroup, until it can be removed."""
    deadline = time.monotonic() + _END_S
    while folder.exists():
        for pid in map(int, (folder / "cgroup.procs").read_text().split()):
            if pid > 0:  # 0 stands for a process that this pid namespace does not show
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def parents() -> dict[str, Path]:
    """Return the folder for new cgroups of each controller. Raises RuntimeError if there is none
    that this user may write to."""
    found = {}
    texts = [Path(f"/proc/self/{name}").read_text() for name in ("cgroup", "mountinfo")]
    for controller in _CONTROLLERS:
        own = own_folder(controller, *texts)
        if own is None:
            raise RuntimeError(f"no cgroup hierarchy with the controller {controller} is mounted")
        places = [own]
        if (own / "cgroup.controllers").exists():
            beside = (own, own.parent)
            places = [p for p in beside if controller in _words(p / "cgroup.subtree_control")]
        places = [p for p in places if os.access(p, os.W_OK)]
        if not places:
            raise RuntimeError(f"user {os.geteuid()} must not limit {controller} below {own}")
        found[controller] = places[0]
    return found


def own_folder(controller: str, memberships: str, mounts: str) -> Path | None:
    """Return the folder of a process's cgroup in the hierarchy with the controller. `memberships`
    and `mounts`: texts of the files cgroup and mountinfo of the process in /proc."""
    groups = {}
    for line in memberships.splitlines():
        _, names, path = line.split(":", 2)
        groups.update(dict.fromkeys(names.split(","), path))
    kind = controller if controller in groups else ""  # "": cgroup v2
    for line in mounts.splitlines():
        here, _, there = line.partition(" - ")
        root, point = here.split()[3:5]
        system, _, options = there.split()[:3]
        is_it = controller in options.split(",") if kind else system == "cgroup2"
        if kind and system != "cgroup" or not is_it or kind not in groups:
            continue
        with contextlib.suppress(ValueError):  # the mount does not show this process's cgroup
            return Path(point) / Path(groups[kind]).relative_to(root)
    return None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:  # the parent of the topmost cgroup is none
        return []


def _write_if_there(file: Path, text: str) -> None:
    if file.exists():
        file.write_text(text)
