"""What can be put around programs on this machine, and the command that does it.

Two grades. With bubblewrap and user namespaces: a root of its own that holds the interpreter,
read-only, no network, own process numbers. Without: the same limits and system-call filter, and
Landlock where the kernel has it, but the machine's files and processes are in sight. Which one it
is is tried, not guessed: containers forbid namespaces in many ways.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple

from rlcore.sandbox import confine
from rlcore.sandbox.inside import Settings
from rlcore.utils.log import log

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


class Grade(NamedTuple):
    """What surrounds a program."""

    isolated: bool
    """Namespaces. False is the weaker fallback."""
    sentence: str
    """What there is, and what is missing and why."""


class Walls:
    """A running `inside`, and the socket to it. Made and used by one thread, which must live as
    long: the process dies with it."""

    def __init__(self, isolated: bool, packages: tuple[str, ...] = ()) -> None:
        """Start it; `packages` are folders that programs may import from. RuntimeError where this
        machine does not let us, TimeoutError where it takes too long."""
        self.isolated = isolated
        self.tmp = "" if isolated else tempfile.mkdtemp(prefix="rlcore-box-")
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed in close
        self._process: subprocess.Popen | None = None
        try:
            with theirs:
                start = _start_isolated if isolated else _start_plain
                self._process = start(theirs, self.tmp, packages, self._errors)
            self.control.settimeout(_START_S)
            if not self.control.recv(16):
                raise RuntimeError(self._last_words())
        except TimeoutError as error:
            self.close()
            raise TimeoutError(f"the sandbox does not start within {_START_S:g} s") from error
        except OSError as error:
            said = self._last_words()
            self.close()
            raise RuntimeError(said or f"{type(error).__name__}: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process that holds all others."""
        assert self._process is not None
        return self._process.pid

    def empty_tmp(self) -> None:
        """Remove what a program has left; isolated ones lose theirs by themselves."""
        if self.tmp and any(os.scandir(self.tmp)):
            _remove(self.tmp)
            os.mkdir(self.tmp)
            os.chmod(self.tmp, 0o1777)

    def close(self) -> None:
        """End it and all programs in it. Safe to call twice."""
        self.control.close()
        if self._process is not None:
            if self.isolated:
                self._process.kill()
            try:
                self._process.wait(_END_S)  # without namespaces it first ends what is its own
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._errors.close()
        if self.tmp:
            try:
                _remove(self.tmp)
            except (OSError, subprocess.SubprocessError) as error:
                log.error("sandbox: %s is left behind: %s", self.tmp, error)

    def _last_words(self) -> str:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it ended without a word"


def _remove(folder: str) -> None:
    """Also where a program has locked its folders: without namespaces they are this user's.
    shutil.rmtree ends with a RecursionError where it has nested a thousand of them."""
    remove = ["rm", "-rf", "--one-file-system", "--", folder]
    if subprocess.run(remove, timeout=_START_S, capture_output=True).returncode:
        subprocess.run(
            ["chmod", "-R", "u+rwX", "--", folder], timeout=_START_S, capture_output=True
        )
        subprocess.run(remove, check=True, timeout=_START_S, capture_output=True)


def grade(require_isolation: bool = False, packages: tuple[str, ...] = ()) -> Grade:
    """What this machine allows, by trying it. RuntimeError where `require_isolation` asks for more,
    or nothing runs at all."""
    if sys.platform != "linux":
        raise RuntimeError("the sandbox needs Linux")
    try:
        if shutil.which("bwrap") is None:
            raise RuntimeError(
                "bubblewrap is not installed (Debian, Ubuntu: apt install bubblewrap)"
            )
        Walls(True, packages).close()
    except (RuntimeError, TimeoutError) as error:
        if require_isolation:
            raise RuntimeError(
                f"no isolation on this machine: {error}; install bubblewrap, allow user namespaces "
                "(in Docker: --security-opt seccomp=unconfined --security-opt "
                "systempaths=unconfined), or do without --reward.require_isolation"
            ) from error
        Walls(False, packages).close()
        parts = ["rlimits", *_filters()]
        return Grade(False, f"WEAK, {' + '.join(parts)} and no namespaces: {error}")
    user = "another user" if os.geteuid() == 0 else "this user"
    parts = ["bubblewrap namespaces", "rlimits", *_filters()[:1], f"as {user}"]
    return Grade(True, " + ".join(parts))


def _filters() -> list[str]:
    found = ["seccomp"] if confine.seccomp_program() else ["no seccomp on this processor"]
    return [*found, "Landlock" if confine.landlock_version() else "no Landlock in this kernel"]


def interpreters() -> list[str]:
    """Ours outside of any virtual environment, so that programs see the standard library alone, and
    the system's of the same version."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = os.path.join(sys.base_prefix, "bin", name)
    return [own, *(p for p in (f"/usr/bin/{name}",) if os.path.exists(p) and p != own)]


def _environment(path: str, packages: tuple[str, ...]) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join([path, *packages]),
        "PYTHONHASHSEED": "0",
        "MALLOC_ARENA_MAX": "1",  # one for each thread would use the address space up
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _start_plain(
    control: socket.socket, tmp: str, packages: tuple[str, ...], errors: IO[bytes]
) -> subprocess.Popen:
    is_root = os.geteuid() == 0
    python = next((p for p in interpreters() if not is_root or _anyone_reads(p)), "")
    if not python:
        raise RuntimeError(
            f"without namespaces programs run as another user, who cannot read {sys.base_prefix}; "
            "install Python where all users can read it, or do not run as root"
        )
    os.chmod(tmp, 0o1777)
    readable = (*_SYSTEM, *_FILES, str(Path(python).parents[1]), *packages)
    settings = Settings(
        has_namespaces=False,
        to_nobody=is_root,
        seccomp=True,
        readable=[p for p in readable if os.path.exists(p)] if confine.landlock_version() else [],
        tmp=tmp,
        spare_processes=_others(confine.NOBODY if is_root else os.geteuid()),
    )
    return subprocess.Popen(
        [python, *_OPTIONS, str(control.fileno()), json.dumps(settings._asdict())],
        env=_environment(str(_PACKAGE.parent), packages),
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        pass_fds=(control.fileno(),),
        start_new_session=True,
    )


def _anyone_reads(file: str) -> bool:
    """Another user could run it and import from its folders."""
    path = Path(file).resolve()
    return all(p.stat().st_mode & 0o005 == 0o005 for p in (path, *path.parents))


def _others(user: int) -> int:
    """Threads of this user now, and some that may come: the limit of processes is a user's, over
    the whole machine, and what is not ours must not use it up."""
    found = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):  # it has just ended
            if entry.name.isdigit() and entry.stat().st_uid == user:
                found += len(os.listdir(f"{entry.path}/task"))
    return found + (_SPARE_NOBODY if user == confine.NOBODY else _SPARE_OWN)


def _start_isolated(
    control: socket.socket, tmp: str, packages: tuple[str, ...], errors: IO[bytes]
) -> subprocess.Popen:
    is_root = os.geteuid() == 0
    settings = Settings(True, is_root, True, [], tmp, 3)  # beside it: this one, init and the judge
    ready, go = os.pipe()
    info, told = os.pipe()
    fds = [control.fileno()]
    command = ["bwrap", *_ROOM, *_mounts(packages)]
    if is_root:  # two users are mapped, so that programs are not this one, whom no limit binds
        command += ["--userns-block-fd", str(ready), "--info-fd", str(told)]
        fds += [ready, told]
    else:
        command += ["--cap-add", "ALL"]
    for name, value in _environment(_INSIDE, packages).items():
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
    """An empty root with the system's programs and libraries, the interpreter and what runs in it:
    no home, no data, no checkpoints, no sockets."""
    out: list[str] = []
    for path in _SYSTEM:
        if os.path.islink(path):
            out += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            out += ["--ro-bind", path, path]
    for path in _FILES:
        out += ["--ro-bind-try", path, path]
    for path in (sys.base_prefix, *packages):
        if path.startswith("/tmp/"):
            raise RuntimeError(f"{path} is under /tmp, which programs have for themselves; move it")
        if not path.startswith("/usr/") and path != "/usr":
            for parent in reversed(Path(path).parents[:-1]):
                out += ["--perms", "0755", "--dir", str(parent)]
            out += ["--ro-bind", path, path]
    out += ["--perms", "0755", "--dir", "/opt", "--perms", "0755", "--dir", _INSIDE]
    out += ["--perms", "0755", "--dir", f"{_INSIDE}/rlcore"]
    for name in _NEEDED:
        out += ["--ro-bind", str(_PACKAGE / name), f"{_INSIDE}/rlcore/{name}"]
    out += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    out += ["--perms", "0755", "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/"]
    return out


def _map_users(info: int, go: int) -> None:
    """Tell the kernel which users there are within: root, to build it, and nobody."""
    said, deadline = b"", time.monotonic() + _START_S
    os.set_blocking(info, False)
    while b"}" not in said:
        with contextlib.suppress(BlockingIOError):
            data = os.read(info, 4096)
            if not data:
                return  # bubblewrap has failed, and its last words say why
            said += data
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.001)
    child = json.loads(said)["child-pid"]
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{child}/{name}").write_text(_SUBIDS)
    os.write(go, b"1")
