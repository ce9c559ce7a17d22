"""Install a seccomp filter, so that a reward's child process and all processes that it starts
cannot signal or trace the trainer.

A process may kill any process of the same user. So `os.kill(os.getppid(), 9)` in a user's reward,
or in a library that the reward calls, would end the run. The filter refuses (EPERM) signals to the
given processes, to their groups, and to all processes at once. It protects against accidents and
simple attacks; untrusted code needs the sandbox (rlcore/sandbox).

Own code instead of libseccomp's bindings: one filter through ctypes saves the dependency.
"""

import ctypes
import platform
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # SECCOMP_RET_ERRNO with EPERM
_NUMBER, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24
"""Byte offsets of fields in seccomp_data; for an argument, the offset of its low half."""
_ARCHES: Mapping[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "kill": 62,
            "tkill": 200,
            "tgkill": 234,
            "rt_sigqueueinfo": 129,
            "rt_tgsigqueueinfo": 297,
            "pidfd_open": 434,
            "ptrace": 101,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "kill": 129,
            "tkill": 130,
            "tgkill": 131,
            "rt_sigqueueinfo": 138,
            "rt_tgsigqueueinfo": 240,
            "pidfd_open": 434,
            "ptrace": 117,
        },
    ),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def ancestors(pid: int) -> list[int]:
    """Return `pid` and its ancestors up to init (excluded), as long as /proc shows each parent."""
    found = []
    while pid > 1:
        found.append(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            break
        pid = int(stat[1])
    return found


def protect(pids: Iterable[int]) -> str:
    """Install the filter for this process and all processes that it will start. Return "" on
    success, else the reason of the failure."""
    machine = platform.machine()
    if machine not in _ARCHES:
        return f"system calls of {machine} are not known"
    code = _program(machine, list(pids))
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(code) // 8, code)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        return f"prctl: errno {ctypes.get_errno()}"
    return ""


def _program(machine: str, pids: list[int]) -> bytes:
    """Return the filter in BPF: one comparison per instruction, with forward jumps only."""
    arch, calls = _ARCHES[machine]
    refused = [-1, *pids, *(-p for p in pids)]
    by_first = [n for name, n in calls.items() if name not in ("tkill", "ptrace")]

    def compare(value: int, then: int, otherwise: int = 0) -> bytes:
        return struct.pack("=HBBI", _JUMP_IF_EQUAL, then, otherwise, value & 0xFFFFFFFF)

    def load(offset: int) -> bytes:
        return struct.pack("=HBBI", _LOAD, 0, 0, offset)

    allow = struct.pack("=HBBI", _RETURN, 0, 0, _ALLOW)
    refuse = struct.pack("=HBBI", _RETURN, 0, 0, _REFUSE)
    n = len(refused)
    # If a pid matches, its comparison jumps to `refuse` at the end; otherwise `allow` is reached.
    check = b"".join(compare(pid, n - i) for i, pid in enumerate(refused)) + allow + refuse
    first, second = load(_ARG0) + check, load(_ARG1) + check
    size = n + 3
    head = [load(_ARCH), compare(arch, 1), allow, load(_NUMBER)]
    # Filter: `head`, tests of the call's number, `allow`, checks of arguments 1 and 2, `refuse`.
    tests = [
        *((number, 0) for number in by_first),
        (calls["ptrace"], size),
        (calls["tkill"], 2 * size),
    ]
    lines = [compare(number, len(tests) - i + offset) for i, (number, offset) in enumerate(tests)]
    return b"".join([*head, *lines, allow, first, second, refuse])
