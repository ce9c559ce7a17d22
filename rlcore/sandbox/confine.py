"""System calls that confine a process before it runs an untrusted program.

This module runs inside the sandbox and imports only the standard library. Each function raises
OSError if the kernel refuses a call.

Own code instead of libseccomp's bindings: only the standard library exists inside the sandbox.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable
from typing import Any

NOBODY = 65534
"""Id of user and group `nobody`. Programs run as this user if the sandbox can change users."""

CLONE_NEWPID = 0x20000000
_NEW_NAMESPACES = 0x7E020080  # flags CLONE_NEW*: ns, cgroup, uts, ipc, user, pid, net, time
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_SET_THP_DISABLE = 36, 38, 41
_NICE = 19
_TIMERS = 256
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
"""Devices that programs may open. Not /dev/zero: a shared mapping of it is memory of no process."""
_SECCOMP_MODE_FILTER = 2
_EPERM, _ENOSYS = 1, 38
_CAPSET_VERSION = 0x20080522

# System-call numbers from 424 on are the same on all architectures.
_SHARED_CALLS = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "memfd_secret": 447,
}
# Numbers of denied calls on (x86_64, aarch64): sockets, other processes, mounts, namespaces.
# Also denied: kernel memory of no process (System V, memfd, pages in pipes, descriptors in flight),
# quotas of the whole machine (aio, inotify), kernel keys, clocks, modules, bpf.
_CALLS = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "setsockopt": (54, 208),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "vmsplice": (278, 75),
    "splice": (275, 76),
    "tee": (276, 77),
    "io_setup": (206, 0),
    "inotify_init1": (294, 26),
    "seccomp": (317, 277),
    "remap_file_pages": (216, 234),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "personality": (135, 92),
    "set_mempolicy": (238, 237),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
_INOTIFY_INIT = 253  # only x86_64 has this call
_CLONE, _CLONE3 = (56, 220), 435
_CLONE_THREAD, _CLONE_FILES = 0x10000, 0x400
_MMAP, _MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = (9, 222), 0x1, 0x20, 0x40000
# Calls with one argument that must be in a list: numbers, index of the argument, allowed values.
# fcntl: descriptors, flags, F_GETLK, F_GETPIPE_SZ. Locks, leases, F_SETPIPE_SZ take kernel memory.
# prctl: names, and questions about the process. prlimit64: the limits of this process.
_LISTED = (
    ((72, 25), 1, (0, 1, 2, 3, 4, 5, 1030, 1032)),
    ((157, 167), 0, (3, 15, 16, 21, 23, 38, 39)),
    ((302, 261), 0, (0,)),
)
_SOCKETPAIR, _AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = (53, 199), 1, 1, 0xF
_ARCHES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_X32 = 0x40000000
_LD, _AND, _JEQ, _JGE, _JSET, _RET = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_ONLY = 0b1101  # Landlock rights: execute, read files, read folders

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(name: str, *args: Any) -> int:
    """Call a function of the C library. Raises OSError if it returns -1."""
    found = getattr(_libc, name)(*args)
    if found == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return found


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), 0)


def set_dumpable(is_dumpable: bool) -> None:
    """Set whether other processes of the same user may inspect this process."""
    _prctl(_PR_SET_DUMPABLE, is_dumpable)


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class PidNamespaces:
    """Handle that gives the next child its own pid namespace. When this child exits, the kernel
    kills its descendants. Needs CAP_SYS_ADMIN, and a process with one thread."""

    def __init__(self) -> None:
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def for_next_child(self) -> None:
        """Create a pid namespace for the next fork only."""
        _call("setns", self._own, CLONE_NEWPID)  # a second unshare fails without this call
        _call("unshare", CLONE_NEWPID)


def mount_tmp(num_bytes: int, num_files: int) -> None:
    """Mount an empty /tmp of this size over the existing /tmp."""
    options = f"size={num_bytes},nr_inodes={num_files},mode=1777".encode()
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", _MS_NOSUID | _MS_NODEV, options)


def unmount_tmp() -> None:
    """Unmount the topmost /tmp with its contents."""
    _call("umount2", b"/tmp", _MNT_DETACH)


def hide_proc() -> None:
    """Hide /proc from now on, except through descriptors that are already open."""
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _call("mount", b"tmpfs", b"/proc", b"tmpfs", flags, b"size=4096,nr_inodes=2,mode=0555")


def close_from(first: int) -> None:
    """Close every descriptor whose number is `first` or higher."""
    os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def drop_privileges(to_nobody: bool) -> None:
    """Drop all capabilities, now and after any exec. `to_nobody`: also become user `nobody`."""
    if to_nobody:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header = struct.pack("Ii", _CAPSET_VERSION, 0)
    _call("capset", header, struct.pack("6I", 0, 0, 0, 0, 0, 0))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent() -> None:
    """Kill this process when the parent exits. A change of user clears the setting."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit(seconds: float, memory: int, processes: int, file_bytes: int, files: int) -> None:
    """Set the rlimits and the priority of this process and its children. `memory`: address space
    per process. Without huge pages, because the kernel keeps a whole huge page of which a process
    has unmapped all but 4 KB."""
    os.nice(_NICE)
    _prctl(_PR_SET_THP_DISABLE, 1)
    cpu = int(seconds) + 2
    for what, most in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_CORE, 1),  # 0 would let a pattern that names a program get the dump
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, _TIMERS),
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_RTPRIO, 0),
    ):
        resource.setrlimit(what, (most, most))


# ---- seccomp


def seccomp_program() -> bytes:
    """Build the seccomp filter. Denied calls, and clone with new namespaces, fail with EPERM.
    clone3 fails with ENOSYS, so that the C library falls back to clone. Returns b"" on an unknown
    processor."""
    if platform.machine() not in _ARCHES or struct.calcsize("P") != 8:
        return b""
    arch, column = _ARCHES[platform.machine()]
    denied = [numbers[column] for numbers in _CALLS.values()] + list(_SHARED_CALLS.values())
    denied += [_INOTIFY_INIT] if column == 0 else []
    allow, deny = (_RET, 0, 0, _ALLOW), (_RET, 0, 0, _ERRNO | _EPERM)
    lines = [(_LD, 0, 0, 4), (_JEQ, 1, 0, arch), (_RET, 0, 0, _KILL), (_LD, 0, 0, 0)]
    lines += [(_JGE, 0, 1, _X32), (_RET, 0, 0, _KILL)]
    for numbers, argument, values in _LISTED:
        tests = [(_JEQ, len(values) - i, 0, value) for i, value in enumerate(values)]
        lines += _if_call(numbers[column], [_load(argument), *tests, deny, allow])
    flags = [(_JSET, 2, 0, _MAP_HUGETLB), (_JSET, 0, 2, _MAP_ANONYMOUS), (_JSET, 0, 1, _MAP_SHARED)]
    lines += _if_call(_MMAP[column], [_load(3), *flags, deny, allow])
    pair = [_load(0), (_JEQ, 0, 3, _AF_UNIX), _load(1), (_AND, 0, 0, _SOCK_TYPE)]
    lines += _if_call(_SOCKETPAIR[column], [*pair, (_JEQ, 1, 0, _SOCK_STREAM), deny, allow])
    thread = [(_JSET, 0, 2, _CLONE_THREAD), (_JSET, 1, 0, _CLONE_FILES), deny, allow]
    clone = [_load(0), (_JSET, 0, 1, _NEW_NAMESPACES), deny, *thread]
    lines += _if_call(_CLONE[column], clone)
    for number in denied:
        lines += [(_JEQ, 0, 1, number), deny]
    lines += [(_JEQ, 0, 1, _CLONE3), (_RET, 0, 0, _ERRNO | _ENOSYS), allow]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _load(argument: int) -> tuple[int, int, int, int]:
    """Load the low half of the call's argument with this index."""
    return (_LD, 0, 0, 16 + 8 * argument)


def _if_call(
    number: int, lines: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    """Run the lines, which end with a return, if the call has this number."""
    return [(_JEQ, 0, len(lines), number), *lines]


def filter_calls(program: bytes) -> None:
    """Install the seccomp filter `program` in this process, permanently."""
    text = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(text))
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    _call("prctl", _PR_SET_SECCOMP, mode, ctypes.create_string_buffer(head), 0, 0)


# ---- Landlock


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if the kernel has no Landlock."""
    found = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return max(0, found)


def landlock(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Deny access to files outside of these folders. If the kernel's Landlock is new enough, also
    deny TCP and signals to other programs. https://docs.kernel.org/userspace-api/landlock.html"""
    version = landlock_version()
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network = 3 if version >= 4 else 0
    scoped = 3 if version >= 6 else 0
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = struct.pack("QQQ", every, network, scoped)
    ruleset = _call("syscall", _LANDLOCK_CREATE, rules, ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for allowed, folders in ((_READ_ONLY, readable), (every, writable)):
            for folder in folders:
                _allow(ruleset, allowed, folder)
        _call("syscall", _LANDLOCK_RESTRICT, ruleset, ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, allowed: int, path: str) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            allowed &= 0b110 | 1 << 14 | 1 << 15  # Landlock rights: write, read, truncate, ioctl
        rule = struct.pack("=Qi", allowed, fd)
        _call("syscall", _LANDLOCK_ADD, ruleset, 1, rule, ctypes.c_uint32(0))
    finally:
        os.close(fd)
