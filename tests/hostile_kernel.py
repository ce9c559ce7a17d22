"""Programs that take memory or quotas of the kernel which belong to no process, or that take more
than their share of the machine. Continues tests/hostile.py.

Each program stops at about 1 GB, so that one that gets through does no harm.
"""

from tests.hostile import Script, script

_LIBC = """
import ctypes, errno, mmap, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                      ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.syscall.restype = ctypes.c_long
IS_X86 = os.uname().machine == "x86_64"
def call(number, *args):
    return libc.syscall(number, *[a if isinstance(a, bytes) else ctypes.c_long(a) for a in args])
def must_not(name, number, *args):
    if call(number, *args) >= 0:
        print("ESCAPED", name)
"""
MEMORY, TIMEOUT, CPU = "memory", "timeout", "cpu"


def _kernel(name: str, outcome: str, text: str, **more: object) -> Script:
    return Script(name, outcome, _LIBC + script(text), **more)


SCRIPTS = [
    _kernel(
        "shared memory left by a mapping that shrinks (mmap.resize)",
        "shared anonymous memory is refused",
        """
        kept = []
        for _ in range(6):
            m = mmap.mmap(-1, 170 << 20)
            m.write(b"x" * len(m))
            m.resize(4096)
            kept.append(m)
        print("ESCAPED with", 170 * len(kept), "MB")
        """,
        quick=True,
        code=1,
    ),
    _kernel(
        "shared memory forgotten with MADV_DONTNEED in children",
        "shared anonymous memory is refused",
        """
        m = mmap.mmap(-1, 200 << 20)
        m.write(b"x" * len(m))
        m.madvise(mmap.MADV_DONTNEED)
        print("ESCAPED")
        """,
        code=1,
    ),
    _kernel(
        "shared mapping of /dev/zero",
        "the device is not there",
        """
        try:
            fd = os.open("/dev/zero", os.O_RDWR)
            mmap.mmap(fd, 1 << 20)
            print("ESCAPED")
        except OSError:
            pass
        """,
        quick=True,
    ),
    _kernel(
        "socket buffers of many processes",
        "each descriptor counts as what it may buffer",
        """
        import socket
        def fill():
            kept = []
            try:
                while True:
                    pair = socket.socketpair()
                    kept.append(pair)
                    for s in pair:
                        s.setblocking(False)
                        try:
                            while True:
                                s.send(bytes(1 << 16))
                        except BlockingIOError:
                            pass
            except OSError:
                time.sleep(60)
        for _ in range(30):
            if os.fork() == 0:
                fill()
        kept = bytearray(240 << 20)
        kept[::4096] = b"x" * len(kept[::4096])
        time.sleep(60)
        """,
        ends=MEMORY,
        quick=True,
    ),
    _kernel(
        "larger socket buffers (SO_SNDBUF)",
        "refused by the filter",
        """
        import socket
        a, b = socket.socketpair()
        for s in (a, b):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                try:
                    s.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
                    print("ESCAPED")
                except OSError:
                    pass
        """,
    ),
    _kernel(
        "descriptors in flight (SCM_RIGHTS)",
        "refused by the filter",
        """
        import array, socket
        a, b = socket.socketpair()
        fds = array.array("i", [a.fileno(), b.fileno()])
        try:
            a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            print("ESCAPED")
        except OSError:
            pass
        """,
        quick=True,
    ),
    _kernel(
        "datagram from a socketpair to the host",
        "only pairs of streams, which have no addresses",
        """
        import glob, socket
        for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
            for flags in (0, socket.SOCK_CLOEXEC, socket.SOCK_NONBLOCK):
                try:
                    a, b = socket.socketpair(socket.AF_UNIX, kind | flags)
                    print("ESCAPED", kind)
                except OSError:
                    pass
        a, b = socket.socketpair()
        for path in (os.path.join(os.path.dirname(CHECKPOINT), "socket"), "/run/x", "\\0x"):
            for send in (lambda p: a.sendto(b"x", p), a.connect, a.bind):
                try:
                    send(path)
                    print("ESCAPED", path)
                except OSError:
                    pass
        """,
        quick=True,
    ),
    _kernel(
        "larger pipes (F_SETPIPE_SZ)",
        "refused by the filter",
        """
        import fcntl
        r, w = os.pipe()
        try:
            fcntl.fcntl(w, 1031, 1 << 20)
            print("ESCAPED")
        except OSError:
            pass
        """,
        quick=True,
    ),
    _kernel(
        "full pipes of many processes",
        "each descriptor counts as what it may buffer",
        """
        def fill():
            try:
                while True:
                    r, w = os.pipe()
                    os.set_blocking(w, False)
                    os.write(w, bytes(1 << 20))
            except OSError:
                time.sleep(60)
        for _ in range(30):
            if os.fork() == 0:
                fill()
        kept = bytearray(240 << 20)
        kept[::4096] = b"x" * len(kept[::4096])
        time.sleep(60)
        """,
        ends=MEMORY,
    ),
    _kernel(
        "pages moved into pipes (vmsplice, splice, tee)",
        "refused by the filter",
        """
        r, w = os.pipe()
        r2, w2 = os.pipe()
        os.write(w, b"x")
        buffer = ctypes.create_string_buffer(8)
        vec = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
        if libc.vmsplice(w, vec, 1, 0) > 0:
            print("ESCAPED vmsplice")
        if libc.tee(r, w2, 1, 0) > 0:
            print("ESCAPED tee")
        if libc.splice(r, None, w2, None, 1, 0) > 0:
            print("ESCAPED splice")
        """,
        quick=True,
    ),
    _kernel(
        "memory that no other process may read (memfd_secret)",
        "refused by the filter",
        'must_not("memfd_secret", 447, 0)',
    ),
    _kernel(
        "System V messages and semaphores, POSIX queues",
        "refused by the filter",
        """
        if libc.msgget(0, 0o1600) >= 0:
            print("ESCAPED msgget")
        if libc.semget(0, 1000, 0o1600) >= 0:
            print("ESCAPED semget")
        must_not("mq_open", 240 if IS_X86 else 180, b"/x", os.O_CREAT | os.O_RDWR, 0o600, 0)
        """,
    ),
    _kernel(
        "POSIX shared memory (/dev/shm)",
        "there is no writable /dev/shm",
        """
        from multiprocessing import shared_memory
        try:
            block = shared_memory.SharedMemory(create=True, size=1 << 20)
            block.unlink()
            print("ESCAPED")
        except OSError:
            pass
        """,
        quick=True,
        needs_landlock=True,
    ),
    _kernel(
        "keys of the kernel (add_key, keyctl)",
        "refused by the filter",
        """
        must_not("add_key", 248 if IS_X86 else 217, b"user", b"x", b"y" * 8, 8, -3)
        must_not("keyctl", 250 if IS_X86 else 219, 1, b"x")
        """,
    ),
    _kernel(
        "buffers of perf and bpf",
        "refused by the filter",
        """
        attributes = ctypes.create_string_buffer(b"\\1" + bytes(3) + b"\\x70", 128)
        address = ctypes.addressof(attributes)
        must_not("perf_event_open", 298 if IS_X86 else 241, address, 0, -1, -1, 0)
        must_not("bpf", 321 if IS_X86 else 280, 0, address, 72)
        """,
    ),
    _kernel(
        "rings of io_uring",
        "refused by the filter",
        """
        must_not("io_uring_setup", 425, 4096, ctypes.addressof(ctypes.create_string_buffer(120)))
        """,
    ),
    _kernel(
        "userfaultfd",
        "refused by the filter",
        'must_not("userfaultfd", 323 if IS_X86 else 282, 1)',
    ),
    _kernel(
        "all inotify instances of the user, fanotify",
        "refused by the filter",
        """
        if libc.inotify_init() >= 0 or libc.inotify_init1(0) >= 0:
            print("ESCAPED inotify")
        must_not("fanotify", 300 if IS_X86 else 262, 0x200, 0)
        """,
        quick=True,
    ),
    _kernel(
        "all aio contexts of the machine (io_setup)",
        "refused by the filter",
        """
        context = ctypes.c_ulong(0)
        for _ in range(64):
            must_not("io_setup", 206 if IS_X86 else 0, 1024, ctypes.addressof(context))
            context.value = 0
        """,
        quick=True,
    ),
    _kernel(
        "epoll watches of each file and number",
        "64 descriptors; each counts as what it may buffer",
        """
        import select
        def watch():
            try:
                polls = [select.epoll() for _ in range(28)]
                pipes = [os.pipe()[0] for _ in range(14)]
                for number in range(80, 64 + 80):
                    for fd in pipes:
                        os.dup2(fd, 63)
                        for p in polls:
                            p.register(63)
            except OSError:
                pass
            time.sleep(60)
        for _ in range(30):
            if os.fork() == 0:
                watch()
        kept = bytearray(240 << 20)
        kept[::4096] = b"x" * len(kept[::4096])
        time.sleep(60)
        """,
        ends=MEMORY,
    ),
    _kernel(
        "descriptors without end: timerfd, eventfd, signalfd",
        "64 are the limit of a process",
        """
        n = 0
        try:
            while n < 1000:
                if libc.eventfd(0, 0) < 0:
                    break
                n += 1
                if libc.timerfd_create(1, 0) < 0:
                    break
                n += 1
        except OSError:
            pass
        if n > 64:
            print("ESCAPED", n)
        """,
    ),
    _kernel(
        "POSIX timers without end",
        "256 are the limit of a user",
        """
        event = ctypes.create_string_buffer(64)
        ctypes.memmove(ctypes.addressof(event) + 12, (1).to_bytes(4, "little"), 4)
        timer = ctypes.c_void_p()
        n = 0
        while n < 20000 and libc.timer_create(1, event, ctypes.byref(timer)) == 0:
            n += 1
        if n > 512:
            print("ESCAPED", n)
        """,
        quick=True,
    ),
    _kernel(
        "queued signals without end",
        "256 are the limit of a user",
        """
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
        n = 0
        while n < 20000 and libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), None) == 0:
            n += 1
        if n > 512:
            print("ESCAPED", n)
        """,
    ),
    _kernel(
        "file locks on every second byte",
        "refused by the filter",
        """
        import fcntl
        n = 0
        with open("file", "w") as file:
            try:
                for n in range(3000):
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 2 * n)
            except OSError:
                pass
        if n > 1000:
            print("ESCAPED", n)
        """,
        quick=True,
    ),
    _kernel(
        "leases and notifications of files (F_SETLEASE, F_NOTIFY)",
        "refused by the filter",
        """
        import fcntl
        with open("file", "w") as file:
            for fd, what, value in ((file.fileno(), 1024, 1), (os.open(".", 0), 1026, 2)):
                try:
                    fcntl.fcntl(fd, what, value)
                    print("ESCAPED", what)
                except OSError:
                    pass
        """,
    ),
    _kernel(
        "page tables of thousands of far apart pages that are only read",
        "page tables count as memory",
        """
        def spread():
            for i in range(60_000):
                at = libc.mmap((i + 16) << 30, 4096, 1, 0x22 | 0x100000, -1, 0)
                if at in (None, ctypes.c_void_p(-1).value):
                    break
                ctypes.string_at(at, 1)
            time.sleep(60)
        for _ in range(2):
            if os.fork() == 0:
                spread()
        time.sleep(60)
        """,
        ends=MEMORY,
        quick=True,
    ),
    _kernel(
        "mappings without end",
        "the kernel limits their number, and rlimits their size",
        """
        n = 0
        while n < 200_000:
            at = libc.mmap(None, 4096, 1 + 2 * (n & 1), 0x22, -1, 0)
            if at in (None, ctypes.c_void_p(-1).value):
                break
            n += 1
        if n > 131_072:
            print("ESCAPED", n)
        """,
    ),
    _kernel(
        "memory locked against swapping (mlock)",
        "refused by an rlimit",
        """
        at = libc.mmap(None, 1 << 20, 3, 0x22, -1, 0)
        libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        if libc.mlock(at, 1 << 20) == 0 or libc.mlockall(3) == 0:
            print("ESCAPED")
        """,
    ),
    _kernel(
        "huge pages: hugetlb, and transparent ones unmapped in part",
        "refused; transparent ones are off",
        """
        at = libc.mmap(None, 2 << 20, 3, 0x40022, -1, 0)
        if at not in (None, ctypes.c_void_p(-1).value) or ctypes.get_errno() == errno.ENOMEM:
            print("ESCAPED hugetlb")
        if libc.prctl(42, 0, 0, 0, 0) == 0 or libc.prctl(41, 0, 0, 0, 0) == 0:
            print("ESCAPED transparent huge pages")
        """,
        quick=True,
    ),
    _kernel(
        "memory of threads whose process has no first thread",
        "it is read from the threads",
        """
        import threading
        def hold():
            time.sleep(0.3)  # until the first thread has exited
            kept = bytearray(300 << 20)
            kept[::4096] = b"x" * len(kept[::4096])
            time.sleep(60)
        for _ in range(3):
            if os.fork() == 0:
                threading.Thread(target=hold).start()
                libc.syscall(60 if IS_X86 else 93, 0)
        time.sleep(60)
        """,
        ends=MEMORY,
        quick=True,
    ),
    _kernel(
        "memory of orphans",
        "they count as the program's",
        """
        for _ in range(3):
            if os.fork() == 0:
                if os.fork() == 0:
                    os.setsid()
                    kept = bytearray(300 << 20)
                    kept[::4096] = b"x" * len(kept[::4096])
                    time.sleep(60)
                os._exit(0)
            os.wait()
        time.sleep(60)
        """,
        ends=MEMORY,
        quick=True,
    ),
    _kernel(
        "memory of other programs that it starts (exec)",
        "they count as the program's",
        """
        import subprocess
        text = (
            "import time\\nx = bytearray(300 << 20); x[::4096] = b'x' * len(x[::4096])\\n"
            "time.sleep(60)"
        )
        kept = [subprocess.Popen([sys.executable, "-S", "-c", text]) for _ in range(3)]
        time.sleep(60)
        """,
        ends=MEMORY,
    ),
    _kernel(
        "mapping that grows by mremap",
        "refused at the limit of address space",
        """
        libc.mremap.restype = ctypes.c_void_p
        libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
        size, at = 1 << 20, libc.mmap(None, 1 << 20, 3, 0x22, -1, 0)
        while size < 2 << 30:
            at = libc.mremap(at, size, size * 2, 1)
            if at in (None, ctypes.c_void_p(-1).value):
                break
            size *= 2
        if size > 512 << 20:
            print("ESCAPED", size >> 20, "MB")
        """,
    ),
    _kernel(
        "pseudo-terminals of the machine (/dev/ptmx)",
        "the device is not there",
        """
        for flags in (os.O_RDWR | os.O_NOCTTY, os.O_RDONLY | os.O_NOCTTY):
            try:
                os.open("/dev/ptmx", flags)
                print("ESCAPED")
            except OSError:
                pass
        """,
        quick=True,
        needs_landlock=True,
    ),
    _kernel(
        "devices: GPUs, KVM, tun, fuse, disks",
        "only null, full, random and urandom are there",
        """
        try:
            names = os.listdir("/dev")
        except OSError:
            names = ["zero", "tty", "kvm", "fuse", "vda", "sda", "net/tun", "nvidia0", "nvidiactl"]
        for name in names:
            path = f"/dev/{name}"
            if name not in ("null", "full", "random", "urandom") and not os.path.isdir(path):
                try:
                    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                    print("ESCAPED", path)
                except OSError:
                    pass
        """,
        needs_landlock=True,
    ),
    _kernel(
        "busy loops in 31 processes",
        "killed when all together took the time of four CPUs",
        """
        for _ in range(31):
            if os.fork() == 0:
                while True:
                    pass
        while True:
            pass
        """,
        ends=(CPU, TIMEOUT),
        seconds=3.0,
    ),
    _kernel(
        "priority: raise its own, change that of others, real time",
        "it starts with nice 19; refused",
        """
        if (nice := os.getpriority(os.PRIO_PROCESS, 0)) != 19:
            print("ESCAPED nice", nice)
        for act in (
            lambda: os.setpriority(os.PRIO_PROCESS, 0, 0),
            lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19),
            lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)),
            lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)),
            lambda: os.sched_setaffinity(os.getppid(), {0}),
        ):
            try:
                act()
                print("ESCAPED")
            except OSError:
                pass
        """,
        quick=True,
    ),
    _kernel(
        "limits of other processes (prlimit)",
        "refused by the filter",
        """
        import resource
        for pid in (os.getpid(), os.getppid(), 1, 2, 3):
            if pid:
                try:
                    resource.prlimit(pid, resource.RLIMIT_CPU, (1000, 1000))
                    print("ESCAPED", pid)
                except OSError:
                    pass
        """,
        quick=True,
    ),
    _kernel(
        "thread with a descriptor table of its own",
        "refused by the filter",
        """
        stack = ctypes.create_string_buffer(1 << 16)
        top = ctypes.addressof(stack) + (1 << 15)
        flags = 0x100 | 0x800 | 0x10000 | 0x200  # VM, SIGHAND, THREAD, FS, without FILES
        pid = call(56 if IS_X86 else 220, flags, 0, 0, 0, 0)
        if pid >= 0:
            print("ESCAPED")
            sys.stdout.flush()
            os._exit(0)
        """,
    ),
    _kernel(
        "settings of its process: survive its parent, undumpable, new filters",
        "refused by the filter",
        """
        for option, value in ((1, 0), (4, 0), (22, 2), (35, 1), (36, 1), (59, 1)):
            if libc.prctl(option, value, 0, 0, 0) == 0:
                print("ESCAPED prctl", option)
        if call(317 if IS_X86 else 277, 2, 0, 0) >= 0 or ctypes.get_errno() == errno.EFAULT:
            print("ESCAPED seccomp")
        must_not("landlock", 444, 0, 0, 1)
        """,
        quick=True,
    ),
    _kernel(
        "file handles (name_to_handle_at)",
        "refused by the filter",
        """
        handle = ctypes.create_string_buffer((128).to_bytes(4, "little"), 256)
        mount = ctypes.c_int()
        number = 303 if IS_X86 else 264
        address = ctypes.addressof(handle)
        must_not("handle", number, -100, b"/", address, ctypes.addressof(mount), 0)
        """,
    ),
    _kernel(
        "system calls of another architecture (int 0x80)",
        "the filter kills the process",
        """
        if IS_X86:
            code = bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3])  # eax = getpid; int 0x80; ret
            at = libc.mmap(None, 4096, 7, 0x22, -1, 0)
            ctypes.memmove(at, code, len(code))
            print("ESCAPED", ctypes.CFUNCTYPE(ctypes.c_int)(at)())
        """,
        code=-31,
    ),
    _kernel(
        "core dump of a full process",
        "no file, and no handler of the machine is started",
        """
        import resource
        if resource.getrlimit(resource.RLIMIT_CORE) != (1, 1):
            print("ESCAPED", resource.getrlimit(resource.RLIMIT_CORE))
        sys.stdout.flush()
        if os.fork() == 0:
            os.abort()
        if os.WCOREDUMP(os.wait()[1]) or any("core" in name for name in os.listdir(".")):
            print("ESCAPED")
        """,
        quick=True,
    ),
    _kernel(
        "write into its own input and source",
        "both are sealed or closed",
        """
        for act in (
            lambda: os.write(0, b"x"),
            lambda: os.ftruncate(0, 1 << 20),
            lambda: open("/dev/fd/0", "r+b").truncate(1 << 20),
            lambda: open("/proc/self/fd/0", "r+b", buffering=0).write(b"x"),
        ):
            try:
                act()
                print("ESCAPED")
            except OSError:
                pass
        """,
    ),
    _kernel(
        "10 GB of error messages",
        "killed after 1 MB of it",
        """
        for _ in range(10_000):
            left = 1 << 20
            while left:
                left -= os.write(2, bytes(left))
        print("ESCAPED")
        """,
        ends="output",
    ),
    _kernel(
        "attributes and symbolic links in /tmp",
        "they count as files of /tmp",
        """
        open("file", "w").close()
        n = 0
        try:
            for n in range(20_000):
                os.symlink("x" * 4000, f"link{n}")
        except OSError:
            pass
        if n > 4096:
            print("ESCAPED", n, "links")
        size = 0
        try:
            for i in range(10_000):
                os.setxattr("file", f"user.{i}", bytes(60_000))
                size += 60_000
        except OSError:
            pass
        if size > 128 << 20:
            print("ESCAPED", size >> 20, "MB of attributes")
        """,
        walls_only=True,
    ),
    _kernel(
        "files that are open and removed",
        "they count as files of /tmp",
        """
        kept, size = [], 0
        try:
            while size < 1 << 30:
                file = open("file", "wb", buffering=0)
                os.unlink("file")
                kept.append(file)
                for _ in range(8):
                    size += file.write(bytes(1 << 20))
        except OSError:
            pass
        if size > 128 << 20:
            print("ESCAPED", size >> 20, "MB")
        """,
        walls_only=True,
        quick=True,
    ),
]
