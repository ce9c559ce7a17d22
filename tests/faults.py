"""Faults for runs under test: signals to a process of a kind, disks, networks; what a run leaves.

The functions for `Job.within` run in the ranks, the others in the process that starts the ranks.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rlcore.utils.spans import Spans

CHILDREN = {
    "engine": "rlcore.rollout.process",
    "reward": "rlcore.rewards.child",
    "env": "rlcore.envs.child",
    "judge": "rlcore.rewards.judge.process",
    "scheduler": "sglang::scheduler",
}
"""Kinds of children, with a word of their command lines."""
_CLONE_NEWNET = 0x40000000


# ---- processes


def children(rank: int, kind: str) -> list[int]:
    """Process ids of a rank's children of a kind, in order of their start."""
    try:
        found = psutil.Process(rank).children(recursive=True)
        lines = [(child.pid, " ".join(child.cmdline())) for child in found]
    except psutil.NoSuchProcess:  # it has just ended
        return []
    return sorted(pid for pid, line in lines if CHILDREN[kind] in line)


def marked(mark: str) -> dict[int, str]:
    """Running programs with the text in their environment, with their command lines."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, PermissionError):
            if mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                line = " ".join(process.cmdline())
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = line
    return found


# ---- disks


@contextmanager
def at_phase(phase: str, nth: int, how: str, folder: str) -> Iterator[None]:
    """At the n-th entry of a phase on rank 0, `full` fills the disk that `folder` is on, `removed`
    deletes the folder, and `readonly` makes its disk (`loop_disk`) read-only."""
    seen, tell = 0, Spans._tell

    def changed(self: Spans) -> None:
        nonlocal seen
        tell(self)
        if self.current == phase and os.environ.get("RANK", "0") == "0":
            seen += 1
            if seen == nth:
                {"full": fill, "removed": shutil.rmtree, "readonly": fail}[how](Path(folder))

    Spans._tell = changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Spans._tell = tell  # type: ignore[method-assign]
        with suppress(OSError):
            (Path(folder) / "filler").unlink(missing_ok=True)


def fill(folder: Path) -> None:
    """Leave no byte of the disk."""
    with open(folder / "filler", "wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while True:
                    os.write(file.fileno(), bytes(size))


def fail(folder: Path) -> None:
    """An error of the disk of `folder`, after which the kernel only reads it. What was done before
    is on the disk, or the kernel would undo it."""
    os.sync()
    device = os.stat(folder).st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("1")


@contextmanager
def loop_disk(folder: Path, megabytes: int = 16) -> Iterator[Path]:
    """A disk of its own for `fill` and `fail`. CalledProcessError where we may not make one."""
    image, disk = folder / "disk.img", folder / "disk"
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True, capture_output=True)
    disk.mkdir()
    mount = ["mount", "-o", "loop,errors=remount-ro", image, disk]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def mend(folder: Path) -> None:
    """Make the disk of a folder of `loop_disk` empty of fillers and writable again."""
    image, disk = folder / "disk.img", folder / "disk"
    subprocess.run(["umount", disk], check=True)
    subprocess.run(["e2fsck", "-p", "-f", image], capture_output=True)  # 1: errors are corrected
    mount = ["mount", "-o", "loop,errors=remount-ro", image, disk]
    subprocess.run(mount, check=True, capture_output=True)
    (disk / "filler").unlink(missing_ok=True)


# ---- networks


@contextmanager
def two_nodes(name: str) -> Iterator[list[str]]:
    """Two network namespaces that reach each other by the interface `rl0`, at 10.77.0.1 and .2.
    CalledProcessError where we may not make them."""
    spaces = [f"{name}0", f"{name}1"]
    try:
        for space in spaces:
            _ip("netns", "add", space)
        peer = "peer", "name", "rl0", "netns", spaces[1]
        _ip("-n", spaces[0], "link", "add", "rl0", "type", "veth", *peer)
        for at, space in enumerate(spaces):
            _ip("-n", space, "addr", "add", f"10.77.0.{at + 1}/24", "dev", "rl0")
            link(space, "up")
            _ip("-n", space, "link", "set", "lo", "up")
        yield spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def link(space: str, state: str) -> None:
    """Connect (`up`) or part (`down`) a node of `two_nodes`."""
    _ip("-n", space, "link", "set", "rl0", state)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def on_nodes(*spaces: str) -> Iterator[None]:
    """Each of two ranks is on a node of `two_nodes`, whose first one has the store."""
    with open(f"/run/netns/{spaces[int(os.environ['RANK'])]}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ |= {"MASTER_ADDR": "10.77.0.1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    yield


@contextmanager
def one_rank_each() -> Iterator[None]:
    """Each rank is told that its node has no other; all are on this machine."""
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    yield


def leftovers(folder: Path, temporary: Path) -> Sequence[str]:
    """Temporary files of a run that has ended: `folder` has runs, `temporary` was its TMPDIR. Not
    torch's cache of compiled code, which all runs of a user share."""
    parts = [*folder.rglob("*.part*"), *folder.glob(".*.secret"), *folder.rglob(".*.json.*")]
    names = {p.name for p in [*parts, *temporary.iterdir()]}
    return sorted(n for n in names if not n.startswith("torchinductor_"))


# ---- clocks


_SLEEP = """
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *t, struct timespec *left) {
  return syscall(SYS_clock_nanosleep, clock, flags, t, left) ? errno : 0;
}
"""
"""libfaketime 0.9.10 fails in sleeps until a time of the monotonic clock, as Python's are."""


def clock(file: Path) -> dict[str, str] | None:
    """Variables of a program whose time of day is apart by what `file` says, such as `+2d`; None
    without libfaketime. Its monotonic clock is the machine's."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        return None
    file.write_text("+0")
    sleep = file.with_suffix(".so")
    compiler = ["c++", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(sleep)]
    subprocess.run(compiler, input=_SLEEP, text=True, check=True)
    return {
        "LD_PRELOAD": f"{sleep} {library}",
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
