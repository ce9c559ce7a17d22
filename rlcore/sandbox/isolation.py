"""Isolation of untrusted programs on this machine, and the command that starts the sandbox.

There are three grades. `namespaces`: with bubblewrap and user namespaces, programs see a read-only
root with the interpreter, no network, and their own process ids. `cgroup`: in addition, the kernel
limits all memory of programs, also what no process shows. `fallback`: the same limits and
system-call filter apply, and Landlock if the kernel has it, but programs see the machine's files
and processes. The grade is found by starting a sandbox, because containers forbid namespaces and
cgroups in many ways.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from functools import cache
from pathlib import Path
from typing import IO, Literal, NamedTuple

from rlcore.sandbox import confine
from rlcore.sandbox.cgroup import PREFIX, Cgroup, is_stale, lock
from rlcore.sandbox.inside import TMP_BYTES, SandboxSettings
from rlcore.utils.log import log
from rlcore.utils.process_tree import MARK, end_marked, end_tree, has_exited

_PACKAGE = Path(__file__).resolve().parents[1]
_INSIDE = "/opt/rlcore-inside"
_NEEDED = ("__init__.py", "sandbox")
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_START_S = 30.0
_END_S = 5.0
_SPARE_NOBODY, _SPARE_OWN = 64, 512
_OPTIONS = ("-s", "-P", "-B", "-m", "rlcore.sandbox.inside")
_SUBIDS = f"0 0 1\n{confine.NOBODY} {confine.NOBODY} 1\n"


IsolationGrade = Literal["fallback", "namespaces", "cgroup"]
GRADES: tuple[IsolationGrade, ...] = ("fallback", "namespaces", "cgroup")
"""Grades of isolation, weakest first. Each gives what the grades before it give."""
_OWN_PROCESSES, _OWN_BYTES = 3, 64 << 20
"""Other processes (`inside`, init and the judge) in a sandbox with namespaces, and their memory."""


class Grade(NamedTuple):
    """Grade of isolation on this machine."""

    name: IsolationGrade
    sentence: str
    """Description for the log: the mechanisms in use, and which one is missing and why."""


class SandboxProcess:
    """Process that runs `sandbox.inside`, with its control socket. Only the thread that created
    this object may use it. With namespaces, the process is killed when that thread exits."""

    def __init__(self, grade: IsolationGrade, packages: tuple[str, ...] = ()) -> None:
        """Start the process; programs may import from the folders `packages`. Raises RuntimeError
        if this machine forbids the grade, TimeoutError if the start takes too long."""
        self._isolated = grade != "fallback"
        self._mark = uuid.uuid4().hex
        self._cgroup: Cgroup | None = None
        self._folder, self._lock, self.tmp = "", -1, ""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed in close
        self._process: subprocess.Popen | None = None
        try:
            with theirs:
                self._process = self._start(grade, theirs, packages)
            self.control.settimeout(_START_S)
            if not self.control.recv(16):
                raise RuntimeError(self._last_words())
        except TimeoutError as error:
            self.close()
            raise TimeoutError(f"the sandbox did not start within {_START_S:g} s") from error
        except OSError as error:
            said = self._last_words()
            self.close()
            raise RuntimeError(said or f"{type(error).__name__}: {error}") from error
        except BaseException:
            self.close()
            raise

    def _start(
        self, grade: IsolationGrade, control: socket.socket, packages: tuple[str, ...]
    ) -> subprocess.Popen:
        if not self._isolated:
            self._make_folder()
            fds = (control.fileno(), self._lock)
            return _start_plain(fds, self.tmp, packages, self._errors, self._mark)
        entries: list[int] = []
        ooms = -1
        try:
            if grade == "cgroup":
                self._cgroup = Cgroup(self._mark)
                entries, ooms = self._cgroup.open()
            return _start_isolated(control, entries, ooms, packages, self._errors, self._mark)
        finally:
            for fd in (*entries, ooms):
                if fd >= 0:
                    os.close(fd)

    def _make_folder(self) -> None:
        """Make the working folder of programs without namespaces, in a folder that is locked while
        this process or `inside` runs. Remove the folders and processes of sandboxes that failed."""
        parent = Path(tempfile.gettempdir())
        for old in parent.glob(PREFIX + "*"):
            if is_stale(old):
                end_marked(old.name.removeprefix(PREFIX))
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    remove_folder(str(old))
        self._folder = str(parent / (PREFIX + self._mark))
        os.mkdir(self._folder)
        self._lock = lock(Path(self._folder))
        self.tmp = f"{self._folder}/tmp"
        os.mkdir(self.tmp)
        os.chmod(self._folder, 0o711)
        os.chmod(self.tmp, 0o1777)

    def limit(self, memory: int, processes: int) -> None:
        """Set what programs may take together, in bytes and in processes. Only a cgroup has such
        limits; else `inside` watches the sums."""
        if self._cgroup is not None:
            self._cgroup.limit(memory + TMP_BYTES + _OWN_BYTES, processes + _OWN_PROCESSES)

    @property
    def pid(self) -> int:
        """Process id of the sandbox's first process, which starts all others."""
        assert self._process is not None
        return self._process.pid

    def empty_tmp(self) -> None:
        """Remove a program's temporary files. With namespaces, `inside` replaces /tmp instead."""
        if self.tmp and any(os.scandir(self.tmp)):
            remove_folder(self.tmp)
            os.mkdir(self.tmp)
            os.chmod(self.tmp, 0o1777)

    def close(self) -> None:
        """Stop the process, and kill all programs in the sandbox. Idempotent."""
        self.control.close()
        if self._process is not None and self._process.returncode is None:
            if not self._isolated:
                self._end_tree(self._process)
            self._process.kill()
            self._process.wait()
        self._errors.close()
        try:
            if self._cgroup is not None:
                self._cgroup.close()
            if self._folder:
                remove_folder(self._folder)
        except (OSError, subprocess.SubprocessError) as error:
            log.error("sandbox: cannot remove %s: %s", self._folder or "its cgroup", error)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _end_tree(self, process: subprocess.Popen) -> None:
        """Wait until the process has killed its programs and exited, since its socket is closed. If
        it fails to do so, kill the programs, found by parent or by mark."""
        deadline = time.monotonic() + _END_S
        while not has_exited(process) and time.monotonic() < deadline:
            time.sleep(0.001)
        end_tree(process, self._mark)

    def _last_words(self) -> str:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "the sandbox exited without an error message"


def remove_folder(folder: str) -> None:
    """Remove a folder, even if a program without namespaces ran as this user and changed the
    permissions. Uses `rm`, because shutil.rmtree raises RecursionError on 1,000 nested folders."""
    remove = ["rm", "-rf", "--one-file-system", "--", folder]
    if subprocess.run(remove, timeout=_START_S, capture_output=True).returncode:
        subprocess.run(
            ["chmod", "-R", "u+rwX", "--", folder], timeout=_START_S, capture_output=True
        )
        subprocess.run(remove, check=True, timeout=_START_S, capture_output=True)


def grade(required: IsolationGrade = "fallback", packages: tuple[str, ...] = ()) -> Grade:
    """Find this machine's grade of isolation by starting sandboxes, the strongest grade first.
    Raises RuntimeError if the grade is weaker than required, or if no program can run at all."""
    if sys.platform != "linux":
        raise RuntimeError("the sandbox runs only on Linux")
    missing: list[str] = []
    for name in reversed(GRADES):
        if GRADES.index(name) < GRADES.index(required):
            raise RuntimeError(
                f"programs cannot be isolated here with grade {required}: {missing[-1]}; "
                f"{_REMEDIES[required]}, or set --reward.require_isolation to a weaker grade "
                f"({', '.join(GRADES)})"
            )
        try:
            SandboxProcess(name, packages).close()
        except (RuntimeError, TimeoutError) as error:
            if name == "fallback":
                raise
            missing.append(str(error))
        else:
            return Grade(name, _sentence(name, missing))
    raise AssertionError("the fallback returns or raises")


@cache
def grade_name(
    required: IsolationGrade = "fallback", packages: tuple[str, ...] = ()
) -> IsolationGrade:
    """Return the name of this machine's grade of isolation; found once per process."""
    return grade(required, packages).name


_REMEDIES = {
    "namespaces": "install bubblewrap and allow user namespaces (in Docker: --security-opt "
    "seccomp=unconfined --security-opt systempaths=unconfined)",
    "cgroup": "run as root, or in a cgroup that belongs to this user (systemd-run --user --scope)",
}


def _sentence(name: IsolationGrade, missing: list[str]) -> str:
    seccomp, landlock = _filters()
    if name == "fallback":
        return f"fallback, WEAK: rlimits + {seccomp} + {landlock} and no namespaces: {missing[-1]}"
    user = "another user" if os.geteuid() == 0 else "this user"
    found = f"{name}: bubblewrap namespaces + rlimits + {seccomp} + as {user}"
    return f"{found} + memory cgroup" if name == "cgroup" else f"{found}; no cgroup: {missing[-1]}"


def _filters() -> tuple[str, str]:
    seccomp = "seccomp" if confine.seccomp_program() else "no seccomp on this processor"
    return seccomp, "Landlock" if confine.landlock_version() else "no Landlock in this kernel"


def interpreters() -> list[str]:
    """Return the paths of this interpreter, without its virtual environment, and of the system's
    interpreter of the same version. Both give programs only the standard library."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = os.path.join(sys.base_prefix, "bin", name)
    return [own, *(p for p in (f"/usr/bin/{name}",) if os.path.exists(p) and p != own)]


def installed_packages() -> tuple[str, ...]:
    """Return the package folders of this Python environment."""
    paths = sysconfig.get_paths()
    return tuple(dict.fromkeys(p for p in (paths["purelib"], paths["platlib"]) if os.path.isdir(p)))


def _environment(path: str, packages: tuple[str, ...], mark: str) -> dict[str, str]:
    return {
        MARK: mark,
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join([path, *packages]),
        "PYTHONHASHSEED": "0",
        "MALLOC_ARENA_MAX": "1",  # one malloc arena per thread would exhaust the address space
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _start_plain(
    fds: tuple[int, int], tmp: str, packages: tuple[str, ...], errors: IO[bytes], mark: str
) -> subprocess.Popen:
    """Start `inside`. `fds`: its control socket, and the lock that it holds while it runs."""
    is_root = os.geteuid() == 0
    python = next((p for p in interpreters() if not is_root or _anyone_reads(p)), "")
    if not python:
        raise RuntimeError(
            "without namespaces programs run as another user, which cannot read "
            f"{sys.base_prefix}; install Python where all users can read it, or do not run as root"
        )
    readable = (*_SYSTEM, *_FILES, str(Path(python).parents[1]), *packages)
    settings = SandboxSettings(
        has_namespaces=False,
        to_nobody=is_root,
        seccomp=True,
        readable=[p for p in readable if os.path.exists(p)] if confine.landlock_version() else [],
        tmp=tmp,
        spare_processes=_others(confine.NOBODY if is_root else os.geteuid()),
        cgroup=[],
        ooms=-1,
    )
    return subprocess.Popen(
        [python, *_OPTIONS, str(fds[0]), json.dumps(settings._asdict())],
        env=_environment(str(_PACKAGE.parent), packages, mark),
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        pass_fds=fds,
        start_new_session=True,
    )


def _anyone_reads(file: str) -> bool:
    """Return whether any user can run the file and read its parent folders."""
    path = Path(file).resolve()
    return all(p.stat().st_mode & 0o005 == 0o005 for p in (path, *path.parents))


def _others(user: int) -> int:
    """Return by how much to raise a program's process limit: the user's current number of threads
    plus a reserve. The kernel counts these threads, too, towards the limit."""
    found = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):  # the process has just exited
            if entry.name.isdigit() and entry.stat().st_uid == user:
                found += len(os.listdir(f"{entry.path}/task"))
    return found + (_SPARE_NOBODY if user == confine.NOBODY else _SPARE_OWN)


def _start_isolated(
    control: socket.socket,
    entries: list[int],
    ooms: int,
    packages: tuple[str, ...],
    errors: IO[bytes],
    mark: str,
) -> subprocess.Popen:
    """Start `inside` in bubblewrap; `entries` and `ooms` are `Cgroup.open`."""
    if shutil.which("bwrap") is None:
        raise RuntimeError("bubblewrap is not installed (Debian, Ubuntu: apt install bubblewrap)")
    is_root = os.geteuid() == 0
    settings = SandboxSettings(
        has_namespaces=True,
        to_nobody=is_root,
        seccomp=True,
        readable=[],
        tmp="",
        spare_processes=_OWN_PROCESSES,
        cgroup=entries,
        ooms=ooms,
    )
    ready, go = os.pipe()
    info, told = os.pipe()
    fds = [control.fileno(), *entries, *([ooms] if ooms >= 0 else [])]
    command = ["bwrap", *_ROOM, *_mounts(packages)]
    if is_root:  # map two users: limits do not bind root, so programs run as `nobody`
        command += ["--userns-block-fd", str(ready), "--info-fd", str(told)]
        fds += [ready, told]
    else:
        command += ["--cap-add", "ALL"]
    for name, value in _environment(_INSIDE, packages, mark).items():
        command += ["--setenv", name, value]
    command += [
        "--",
        interpreters()[0],
        *_OPTIONS,
        str(control.fileno()),
        json.dumps(settings._asdict()),
    ]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=fds,
            start_new_session=True,
        )
        os.close(told)
        told = -1
        if is_root:
            _map_users(info, go)
    finally:
        for fd in (ready, go, info, told):
            if fd >= 0:
                os.close(fd)
    return process


_ROOM = (
    *("--unshare-user", "--uid", "0", "--gid", "0"),
    *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--hostname", "sandbox", "--die-with-parent", "--new-session", "--clearenv"),
)


def _mounts(packages: tuple[str, ...]) -> list[str]:
    """Build the mount options: a root with only the system's programs and libraries, the
    interpreter and this package. Programs see no home, no data, no checkpoints, no sockets."""
    out: list[str] = []
    for path in _SYSTEM:
        if os.path.islink(path):
            out += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            out += ["--ro-bind", path, path]
    out += ["--perms", "0755", "--dir", "/etc"]
    for path in _FILES:
        out += ["--ro-bind-try", path, path]
    for path in (sys.base_prefix, *packages):
        if path.startswith("/tmp/"):
            raise RuntimeError(f"{path} is under /tmp, which programs cannot see; move it")
        if not path.startswith("/usr/") and path != "/usr":
            for parent in reversed(Path(path).parents[:-1]):
                out += ["--perms", "0755", "--dir", str(parent)]
            out += ["--ro-bind", path, path]
    out += ["--perms", "0755", "--dir", "/opt", "--perms", "0755", "--dir", _INSIDE]
    out += ["--perms", "0755", "--dir", f"{_INSIDE}/rlcore"]
    for name in _NEEDED:
        out += ["--ro-bind", str(_PACKAGE / name), f"{_INSIDE}/rlcore/{name}"]
    out += ["--proc", "/proc", "--perms", "0755", "--dir", "/dev"]
    for path in confine.DEVICES:
        out += ["--dev-bind", path, path]
    out += ["--perms", "0755", "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/"]
    return out


def _map_users(info: int, go: int) -> None:
    """Map two users into the namespace: `root` sets it up, and programs run as `nobody`."""
    said, deadline = b"", time.monotonic() + _START_S
    os.set_blocking(info, False)
    while b"}" not in said:
        with contextlib.suppress(BlockingIOError):
            data = os.read(info, 4096)
            if not data:
                return  # bubblewrap has failed; its stderr has the reason
            said += data
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.001)
    child = json.loads(said)["child-pid"]
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{child}/{name}").write_text(_SUBIDS)
    os.write(go, b"1")
