"""Programs that try to get out, to take the machine down, or to be called right. Each with what
has to come of it, and a sentence for the table in rlcore/sandbox/README.md.

A script prints a line that begins with ESCAPED for everything that it should not have been able to
do. A forger is a function `f` whose test is `assert f(3) == SECRET`, `SECRET` being a number that
stands nowhere but in the test.
"""

import textwrap
from typing import NamedTuple

SECRET = 731946285


class Script(NamedTuple):
    """A program of its own."""

    name: str
    outcome: str
    """For the table."""
    source: str
    ends: str | tuple[str, ...] = ""
    """`why` of the outcome: timeout, memory, cpu, output, or "" for a program that ends itself; or
    several of them."""
    code: int = 0
    """Exit status of a program that ends itself."""
    quick: bool = False
    """In CI too."""
    walls_only: bool = False
    """Holds with namespaces; without them it is not tried."""
    needs_landlock: bool = False
    """Without namespaces, Landlock is needed."""
    seconds: float = 60.0
    """Deadline; a program that ends itself takes a second, and more beside other tests."""


def script(text: str) -> str:
    return textwrap.dedent(text).strip() + "\n"


SCRIPTS = [
    Script(
        "fork bomb",
        "the 33rd process is refused; all are killed at the deadline",
        script(
            """
            import os, time
            while True:
                try:
                    os.fork()
                except OSError:
                    time.sleep(0.01)
            """
        ),
        ends="timeout",
        seconds=1.5,
        quick=True,
    ),
    Script(
        "memory bomb",
        "MemoryError at the limit of address space",
        script(
            """
            kept = []
            try:
                while True:
                    kept.append(bytearray(8 << 20))
            except MemoryError:
                taken = len(kept) * 8
                kept.clear()
                print("ESCAPED" if taken > 512 else "refused after", taken, "MB")
            """
        ),
        quick=True,
    ),
    Script(
        "memory bomb of many processes, each below the limit",
        "killed when all together are above it",
        script(
            """
            import os, time
            for _ in range(12):
                if os.fork() == 0:
                    kept = bytearray(100 << 20)
                    kept[::4096] = b"x" * len(kept[::4096])
                    time.sleep(60)
            time.sleep(60)
            """
        ),
        ends="memory",
    ),
    Script(
        "10 GB of output",
        "killed after 1 MB of it",
        script(
            """
            import os
            for _ in range(10_000):
                left = 1 << 20
                while left:
                    left -= os.write(1, bytes(left))
            print("ESCAPED")
            """
        ),
        ends="output",
        quick=True,
    ),
    Script(
        "endless sleep, all signals ignored",
        "killed at the deadline",
        script(
            """
            import signal, time
            for s in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(s, signal.SIG_IGN)
            while True:
                time.sleep(1000)
            """
        ),
        ends="timeout",
        seconds=0.5,
        quick=True,
    ),
    Script(
        "endless loop in C (a regular expression)",
        "killed at the deadline",
        'import re\nre.match(r"(a+)+$", "a" * 60 + "b")\n',
        ends="timeout",
        seconds=0.5,
    ),
    Script(
        "double fork and setsid, output closed",
        "ends with the program: it is in its pid namespace",
        script(
            """
            import os, time
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    for fd in range(3):
                        os.close(fd)
                    while True:
                        time.sleep(1)
                os._exit(0)
            time.sleep(0.1)
            """
        ),
        quick=True,
    ),
    Script(
        "write into every folder",
        "/tmp alone takes it; the root and /dev are read-only",
        script(
            """
            import os
            for folder, folders, files in os.walk("/"):
                if folder.count("/") > 3:
                    folders.clear()
                try:
                    open(os.path.join(folder, "mine"), "w").close()
                except OSError:
                    continue
                if not folder.startswith("/tmp"):
                    print("ESCAPED", folder)
            """
        ),
        quick=True,
    ),
    Script(
        "append to every file",
        "refused, except for devices that keep nothing",
        script(
            """
            import os, stat
            for folder, folders, files in os.walk("/"):
                if folder.count("/") > 2:
                    folders.clear()
                for name in files:
                    path = os.path.join(folder, name)
                    try:
                        if not stat.S_ISREG(os.lstat(path).st_mode):
                            continue
                        open(path, "a").close()
                        print("ESCAPED", path)
                    except OSError:
                        continue
            """
        ),
    ),
    Script(
        "sockets: TCP to the host, UDP, raw, abstract and named Unix, netlink",
        "none can be made",
        script(
            """
            import socket
            for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                    try:
                        socket.socket(family, kind)
                    except OSError:
                        continue
                    print("ESCAPED", family, kind)
            """
        ),
        quick=True,
    ),
    Script(
        "the environment: its own and that of every process in /proc",
        "its own is emptied; /proc is empty",
        script(
            """
            import glob, os
            for path in glob.glob("/proc/*/environ"):
                try:
                    if "HOSTILE_SECRET" in open(path).read():
                        print("ESCAPED", path)
                except OSError:
                    continue
            if "HOSTILE_SECRET" in os.environ:
                print("ESCAPED os.environ")
            """
        ),
        quick=True,
    ),
    Script(
        "read the checkpoint folder (its path is known)",
        "no such file in its own root",
        script(
            """
            import os
            for path in (CHECKPOINT, os.path.dirname(CHECKPOINT)):
                try:
                    print("ESCAPED", os.listdir(path) if os.path.isdir(path) else open(path).read())
                except OSError:
                    continue
            """
        ),
        quick=True,
    ),
    Script(
        "/proc tricks: root, exe, mem, maps, fd, sysrq and sys of 1 and self",
        "/proc is empty",
        script(
            """
            import os
            for who in ("1", "2", "3", "self", "thread-self"):
                for what in ("root/etc", "exe", "mem", "maps", "fd", "cwd", "task", "ns/user"):
                    path = f"/proc/{who}/{what}"
                    if os.path.lexists(path):
                        print("ESCAPED", path)
            for path in ("sysrq-trigger", "sys/kernel/core_pattern", "kcore", "kallsyms"):
                if os.path.lexists("/proc/" + path):
                    print("ESCAPED", path)
            """
        ),
        quick=True,
        walls_only=True,
    ),
    Script(
        "symlink race in /tmp against the cleaner",
        "the whole /tmp is unmounted; no symlink is followed",
        script(
            """
            import os, threading, time
            stop = time.monotonic() + 0.3
            def race(i):
                path = f"/tmp/race{i}" if os.access("/tmp", os.W_OK) else f"race{i}"
                while time.monotonic() < stop:
                    try:
                        os.symlink(os.path.dirname(CHECKPOINT), path)
                        os.unlink(path)
                        os.mkdir(path)
                        os.rmdir(path)
                    except OSError:
                        continue
                os.symlink(os.path.dirname(CHECKPOINT), path + "-left")
            threads = [threading.Thread(target=race, args=(i,)) for i in range(4)]
            for t in threads: t.start()
            for t in threads: t.join()
            """
        ),
    ),
    Script(
        "delete and overwrite the interpreter and its library",
        "read-only, and not its own",
        script(
            """
            import os, sys, re
            real = os.path.realpath(sys.executable)
            for path in (sys.executable, real, re.__file__, os.__file__):
                for act in (os.unlink, lambda p: open(p, "r+b"), lambda p: os.rename(p, p + "x")):
                    try:
                        act(path)
                    except OSError:
                        continue
                    print("ESCAPED", path)
            """
        ),
        quick=True,
    ),
    Script(
        "kill all processes there are, and its parent",
        "it sees none but its own",
        script(
            """
            import os, signal
            for pid in (-1, 0 + os.getppid(), 2, 3, 4, 5):
                if pid in (0, os.getpid()):
                    continue
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue
                if pid != -1:
                    print("ESCAPED", pid)
            """
        ),
        walls_only=True,
        quick=True,
    ),
    Script(
        "new namespaces, mounts, chroot",
        "refused by the filter, and there is no capability for them",
        script(
            """
            import ctypes, os
            libc = ctypes.CDLL(None, use_errno=True)
            for flags in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x10020000):
                if libc.unshare(flags) == 0:
                    print("ESCAPED unshare", hex(flags))
            if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
                print("ESCAPED mount")
            if libc.chroot(b"/tmp") == 0:
                print("ESCAPED chroot")
            clone = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
            if clone == 0:
                os._exit(0)
            if clone > 0:
                print("ESCAPED clone")
            """
        ),
        quick=True,
    ),
    Script(
        "become root, take capabilities, raise limits",
        "refused",
        script(
            """
            import ctypes, os, resource
            libc = ctypes.CDLL(None, use_errno=True)
            for name in ("setuid", "setgid"):
                try:
                    getattr(os, name)(0)
                    if os.getuid() == 0 and open("/proc/self/status"): pass
                except OSError:
                    pass
            for what in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
                try:
                    resource.setrlimit(what, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                    print("ESCAPED limit", what)
                except (OSError, ValueError):
                    pass
            head = (ctypes.c_uint32 * 2)(0x20080522, 0)
            full = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
            if libc.capset(head, full) == 0:
                print("ESCAPED capset")
            try:
                os.nice(-5)
                print("ESCAPED nice")
            except OSError:
                pass
            """
        ),
        quick=True,
    ),
    Script(
        "debug others: ptrace, process_vm_readv, pidfd_getfd",
        "refused by the filter",
        script(
            """
            import ctypes, os
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.ptrace(16, os.getppid() or 1, 0, 0) == 0:
                print("ESCAPED ptrace")
            buffer = ctypes.create_string_buffer(8)
            vec = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
            for pid in (1, 2, 3):
                if libc.process_vm_readv(pid, vec, 1, vec, 1, 0) > 0:
                    print("ESCAPED", pid)
            """
        ),
    ),
    Script(
        "memory that no limit counts: System V, memfd",
        "refused by the filter",
        script(
            """
            import ctypes, os
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.shmget(0, 1 << 20, 0o1600) != -1:
                print("ESCAPED shmget")
            try:
                os.memfd_create("x")
                print("ESCAPED memfd")
            except OSError:
                pass
            """
        ),
        quick=True,
    ),
    Script(
        "fill /tmp: one huge file, many files, deep folders",
        "16 MB a file, 128 MB in all",
        script(
            """
            import os, signal
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            def fill(name, most):
                n = 0
                try:
                    with open(name, "wb", buffering=0) as file:
                        while n < most:
                            n += file.write(bytes(1 << 20))
                except OSError:
                    pass
                return n
            if fill("huge", 64 << 20) > 16 << 20:
                print("ESCAPED file size")
            if sum(fill(f"big{i}", 16 << 20) for i in range(12)) > 128 << 20:
                print("ESCAPED size of /tmp")
            try:
                for i in range(3000):
                    os.mkdir("d")
                    os.chdir("d")
            except OSError:
                pass
            """
        ),
        walls_only=True,
    ),
    Script(
        "threads without end",
        "they count as processes",
        script(
            """
            import threading, time
            n = 0
            try:
                while n < 200:
                    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                    n += 1
            except RuntimeError:
                pass
            print("ESCAPED" if n > 64 else "refused after", n)
            """
        ),
        walls_only=True,
    ),
    Script(
        "every descriptor that may be open",
        "there are three, and they are its own",
        script(
            """
            import os
            for fd in range(3, 1024):
                try:
                    os.fstat(fd)
                except OSError:
                    continue
                print("ESCAPED", fd)
            """
        ),
        quick=True,
    ),
    Script(
        "put words into the terminal's input (TIOCSTI)",
        "there is no terminal",
        script(
            """
            import fcntl, os
            try:
                fcntl.ioctl(os.open("/dev/tty", os.O_RDWR), 0x5412, b"x")
                print("ESCAPED")
            except OSError:
                pass
            """
        ),
    ),
]


class Forger(NamedTuple):
    """A program whose `f` must not pass `assert f(3) == SECRET` (nor the other tests below)."""

    name: str
    outcome: str
    source: str


FORGED_TESTS = [
    f"assert f(3) == {SECRET}",
    f"assert set(f(4)) == {{{SECRET}}}",
    f"assert f(5) is not None and str(f(5)) == '{SECRET}'",
]

FORGERS = [
    Forger(
        "print what the harness would print",
        "its output is discarded",
        "print('+++'); print('OK'); print('passed')\ndef f(x): print('+'); return 0",
    ),
    Forger(
        "write the verdict to every descriptor",
        "the verdict's is not open there; the judge ignores junk",
        "import os\n"
        "for fd in range(256):\n"
        "    try: os.write(fd, b'+++')\n"
        "    except OSError: pass\n"
        "def f(x): return 0",
    ),
    Forger("leave with os._exit(0)", "no answer is no pass", "import os\nos._exit(0)"),
    Forger(
        "leave with os._exit(0) in the call",
        "no answer is no pass",
        "import os\ndef f(x): os._exit(0)",
    ),
    Forger("raise SystemExit(0)", "no answer is no pass", "def f(x): raise SystemExit(0)"),
    Forger(
        "return an object that is equal to everything",
        "the judge sees only a reference",
        "class E:\n"
        "    def __eq__(self, o): return True\n"
        "    def __hash__(self): return 0\n"
        "    def __iter__(self): return iter([self])\n"
        "    def __str__(self): return Any()\n"
        "class Any(str):\n"
        "    def __eq__(self, o): return True\n"
        "    __hash__ = str.__hash__\n"
        "def f(x): return E()",
    ),
    Forger(
        "return a number of a class that is equal to everything",
        "it travels as the number that it is",
        "class N(int):\n"
        "    def __eq__(self, o): return True\n"
        "    __hash__ = int.__hash__\n"
        "def f(x): return N(1) if x != 4 else [N(1)]",
    ),
    Forger(
        "replace builtins, AssertionError, sys.exit and json",
        "they are its own process's",
        "import builtins, sys, json, os\n"
        "builtins.AssertionError = type('X', (BaseException,), {})\n"
        "builtins.set = lambda *a: 1\n"
        "builtins.str = lambda *a: 1\n"
        "sys.exit = os._exit = lambda *a: None\n"
        "json.dumps = lambda *a, **k: '{\"value\": true}'\n"
        "def f(x): return 0",
    ),
    Forger(
        "define set and str anew",
        "in a test they mean Python's",
        "def set(x): return 1\ndef str(x): return 1\ndef f(x): return 0",
    ),
    Forger(
        "find the expected value in frames and among all objects",
        "it is neither there nor in a parent",
        "import gc, re, sys\n"
        "def look():\n"
        "    frame = sys._getframe()\n"
        "    while frame is not None:\n"
        "        yield from [*frame.f_locals.values(), *frame.f_globals.values()]\n"
        "        yield from frame.f_code.co_consts\n"
        "        frame = frame.f_back\n"
        "    for o in gc.get_objects():\n"
        "        yield from gc.get_referents(o)\n"
        "def f(x):\n"
        "    for v in look():\n"
        "        if type(v) is int and 700000000 < v < 800000000: return v\n"
        "        if type(v) is bytes: v = v.decode('latin')\n"
        "        if type(v) is str and (m := re.search(r'73[0-9]{7}', v)): return int(m[0])\n"
        "    return 0",
    ),
    Forger(
        "answer before it is asked, on the judge's channel",
        "it does not know the right value",
        "import os\n"
        'os.write(3, b\'{"ready":true}\\n{"value":["ref",0]}\\n{"value":true}\\n\' * 9)\n'
        "def f(x): return 0",
    ),
    Forger(
        "answer with what the judge cannot read",
        "the test fails",
        "import os\nos.write(3, b'[[[[' * 5000 + b'\\n')\ndef f(x): return 0",
    ),
    Forger(
        "answer without end",
        "16 MB are the limit",
        "def f(x): return 'x' * (40 << 20)",
    ),
]
