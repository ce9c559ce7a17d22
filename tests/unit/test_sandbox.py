"""The sandbox: what programs get, what hostile ones get (tests/hostile.py), what tests say of them.

Not covered: kernels without seccomp or Landlock, processors other than this one.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlcore.sandbox import box as box_module
from rlcore.sandbox import cgroup, inside, isolation
from rlcore.sandbox.box import Broken, Sandbox
from tests.attack import SCRIPTS, attack, skipped
from tests.hostile import FORGED_TESTS, FORGERS, SECRET

ROOT = Path(__file__).resolve().parents[2]
README = Path(isolation.__file__).with_name("README.md")
LONG_S = 60.0


def within(seconds: float):
    """A deadline from now."""
    end = time.monotonic() + seconds
    return lambda: end


@pytest.fixture(scope="module")
def grade() -> isolation.Grade:
    """This machine's grade."""
    return isolation.grade()


def open_box(name: isolation.IsolationGrade, grade: isolation.Grade) -> Sandbox:
    if isolation.GRADES.index(name) > isolation.GRADES.index(grade.name):
        pytest.skip(f"no {name} here: {grade.sentence}")
    return Sandbox(name)


GRADES = [
    "namespaces",
    pytest.param("cgroup", marks=pytest.mark.slow),
    pytest.param("fallback", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=GRADES)
def box(request, grade):
    with open_box(request.param, grade) as sandbox:
        yield sandbox


# ---- programs


def test_a_script_gets_its_input_and_a_clean_process(box):
    source = "import sys\nx = 1\nprint(int(input()) + x, __name__, file=sys.stdout)\nsys.exit(3)"
    found = box.run(source, within(LONG_S), stdin="41\n")
    assert (found.stdout, found.code, found.why) == (b"42 __main__\n", 3, "")
    again = box.run("print('x' in globals(), 'random' in globals())", within(LONG_S))
    assert again.stdout == b"False False\n"


def test_an_exception_and_a_broken_source_end_with_their_traceback(box):
    found = box.run("1 / 0", within(LONG_S))
    assert found.code == 1 and b"ZeroDivisionError" in found.stderr
    assert b"SyntaxError" in box.run("def", within(LONG_S)).stderr


def test_a_program_finds_an_empty_folder_whatever_the_last_one_left(box):
    left = "import os\nopen('left', 'w').close()\nos.makedirs('a/b')\nprint(os.listdir('.'))"
    assert b"left" in box.run(left, within(LONG_S)).stdout
    assert box.run("import os; print(os.listdir('.'))", within(LONG_S)).stdout == b"[]\n"


def test_random_numbers_and_hashes_repeat(box):
    source = "import random; print(random.random(), hash('a'))"
    assert box.run(source, within(LONG_S)).stdout == box.run(source, within(LONG_S)).stdout


def test_a_deadline_may_come_closer_while_a_program_runs(box):
    begin = time.monotonic()
    found = box.run(
        "while True: pass", lambda: begin + (60 if time.monotonic() < begin + 0.3 else 0)
    )
    assert found.why == "timeout" and found.seconds < 30


def test_a_sandbox_that_dies_says_so_and_comes_back(grade):
    with open_box("namespaces", grade) as sandbox:
        sandbox._walls._process.kill()
        with pytest.raises(Broken, match="the sandbox"):
            for _ in range(100):  # its end takes a moment
                sandbox.run("print(1)", within(LONG_S))
        assert sandbox.run("print(1)", within(LONG_S)).stdout == b"1\n"


def test_a_sandbox_that_cannot_be_emptied_or_come_back_at_once_costs_one_program(monkeypatch):
    with Sandbox("fallback") as sandbox:

        def locked() -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(sandbox._walls, "empty_tmp", locked)
        with pytest.raises(Broken, match="the sandbox cannot empty its /tmp"):
            sandbox.run("print(1)", within(LONG_S))
        tries, start = [], box_module.SandboxProcess

        def in_vain(*args) -> isolation.SandboxProcess:
            tries.append(args)
            if len(tries) < 3:
                raise (RuntimeError("no memory"), OSError(28, "No space"))[len(tries) - 1]
            return start(*args)

        monkeypatch.setattr(box_module, "_PAUSES_S", (0.0, 0.0))
        monkeypatch.setattr(box_module, "SandboxProcess", in_vain)
        assert sandbox.run("print(1)", within(LONG_S)).stdout == b"1\n"


def test_a_sandbox_that_never_comes_back_says_how_often_it_was_tried(monkeypatch):
    def in_vain(*args) -> isolation.SandboxProcess:
        raise OSError(28, "No space left on device")

    with Sandbox("fallback") as sandbox:
        sandbox.close()
        monkeypatch.setattr(box_module, "_PAUSES_S", (0.0, 0.0))
        monkeypatch.setattr(box_module, "SandboxProcess", in_vain)
        with pytest.raises(RuntimeError, match="did not restart in 3 tries: .*No space"):
            sandbox.run("print(1)", within(LONG_S))


def test_closing_a_sandbox_whose_folder_stays_raises_nothing(monkeypatch, caplog):
    remove, folders = isolation.remove_folder, []

    def in_vain(folder: str) -> None:
        folders.append(folder)
        raise subprocess.TimeoutExpired("rm", 30)

    monkeypatch.setattr(isolation, "remove_folder", in_vain)
    Sandbox("fallback").close()
    assert f"cannot remove {folders[0]}" in caplog.text
    remove(folders[0])


def pids_of(argument: str) -> list[int]:
    """Living processes with this argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


SLEEPER = """
import subprocess, time
subprocess.Popen(["sleep", "{0}"], start_new_session=True)
time.sleep({0})
"""
"""A program whose own child has left its session."""


@pytest.mark.parametrize("what", ["an exception in a run", "killed", "stopped"])
def test_without_namespaces_closing_ends_a_running_program_and_all_that_it_started(
    what, monkeypatch
):
    """Also if the interpreter that waits inside can no longer do so."""
    monkeypatch.setattr(box_module, "_GRACE_S", 0.2)
    monkeypatch.setattr(isolation, "_END_S", 0.5)
    seconds = f"{300 + os.getpid() % 1000}.25"
    begin = time.monotonic()
    end = begin + LONG_S

    def deadline() -> float:
        if not pids_of(seconds):
            return end
        if what == "an exception in a run":
            raise KeyError(what)
        os.kill(sandbox.pid, signal.SIGKILL if what == "killed" else signal.SIGSTOP)
        return begin

    with Sandbox("fallback") as sandbox:
        with pytest.raises((KeyError, Broken)):
            sandbox.run(SLEEPER.format(seconds), deadline)
        assert time.monotonic() < end, "the program did not start"
        sandbox.close()
        assert pids_of(seconds) == []


OWNER = """
import sys
from rlcore.sandbox.box import Sandbox
with Sandbox(sys.argv[1]) as box:
    box.run(sys.argv[2], lambda: 1e6)
"""
"""A rank whose sandbox runs a program."""


def start_owner(name: str, seconds: str) -> subprocess.Popen:
    """Start a rank, and wait until its program has started a child."""
    command = [sys.executable, "-c", OWNER, name, SLEEPER.format(seconds)]
    owner = subprocess.Popen(command, cwd=ROOT)
    until(lambda: bool(pids_of(seconds)))
    return owner


def until(holds) -> None:
    end = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("name", isolation.GRADES)
def test_programs_end_with_a_killed_rank(name, grade):
    open_box(name, grade).close()
    seconds = f"{300 + os.getpid() % 1000}.5"
    owner = start_owner(name, seconds)
    owner.kill()
    owner.wait()
    until(lambda: pids_of(seconds) == [])


@pytest.fixture
def shared_tmp(monkeypatch):
    """A folder for temporary files that `nobody` can enter, too."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        os.chmod(folder, 0o711)
        yield Path(folder)


def test_the_next_sandbox_removes_what_a_rank_and_its_sandbox_left_when_both_were_killed(
    monkeypatch, shared_tmp
):
    seconds = f"{300 + os.getpid() % 1000}.75"
    owner = start_owner("fallback", seconds)
    inside = int(Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()[0])
    for pid in (owner.pid, inside):
        os.kill(pid, signal.SIGKILL)
    owner.wait()
    with Sandbox("fallback"):
        assert len(list(shared_tmp.iterdir())) == 2, "a new folder must not be removed"
    (left,) = shared_tmp.iterdir()
    assert pids_of(seconds), "nothing was left behind, so this test shows nothing"
    monkeypatch.setattr(cgroup, "_NEW_S", 0.0)
    with Sandbox("fallback") as one, Sandbox("fallback") as two:
        assert not left.exists() and pids_of(seconds) == []
        for other in (one, two):  # those of others that run stay
            assert other.run("open('x', 'w')", within(LONG_S)).code == 0


def cgroups() -> list[Path]:
    """Cgroups of sandboxes of this process's cgroup."""
    parents = cgroup.parents()
    return [p for parent in parents.values() for p in parent.glob(f"{cgroup.PREFIX}*")]


def test_a_cgroup_is_removed_and_so_is_what_a_killed_rank_left(monkeypatch, grade):
    open_box("cgroup", grade).close()
    before = cgroups()
    owner = start_owner("cgroup", f"{300 + os.getpid() % 1000}.625")
    assert len(cgroups()) > len(before)
    owner.kill()
    owner.wait()
    left = set(cgroups()) - set(before)  # and those of tests beside this one, which end soon
    assert left
    monkeypatch.setattr(cgroup, "_NEW_S", 0.0)
    with Sandbox("cgroup"):
        pass
    end = time.monotonic() + LONG_S
    while left & set(cgroups()):
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_a_kill_at_the_memory_limit_of_the_cgroup_is_told(monkeypatch, grade):
    """The limit is below that of the watch, so only the kernel can have killed the program."""
    with open_box("cgroup", grade) as sandbox:
        limit = sandbox._walls.limit
        monkeypatch.setattr(sandbox._walls, "limit", lambda m, p: limit(m - (550 << 20), p))
        taking = "x = bytearray(300 << 20); x[::4096] = b'x' * len(x[::4096])"
        in_child = f"import os\nif os.fork() == 0:\n    {taking}\nelse:\n    os.wait()"
        for source in (taking, in_child):
            assert sandbox.run(source, within(LONG_S)).why == "memory"
        assert sandbox.run("print(1)", within(LONG_S)).stdout == b"1\n"


def test_a_cgroup_counts_processes_of_all_generations(grade):
    source = (
        "import os, time\nn = 0\n"
        "try:\n    while n < 90:\n        if os.fork() == 0: time.sleep(60)\n        n += 1\n"
        "except OSError: print(n)"
    )
    with open_box("cgroup", grade) as sandbox:
        started = int(sandbox.run(source, within(LONG_S)).stdout)
    assert started < 32 + isolation._OWN_PROCESSES, "the kernel's limit leaves room for our own"


V1 = """12:pids:/docker/a1
11:cpu,cpuacct:/docker/a1
4:memory:/docker/a1
0::/x"""
V1_MOUNTS = """30 25 0:26 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw
31 25 0:27 /docker/a1 /sys/fs/cgroup/memory ro,nosuid master:1 - cgroup cgroup rw,memory
32 25 0:28 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
33 25 0:29 /other /mnt/unified rw - cgroup2 cgroup2 rw"""


@pytest.mark.parametrize(
    "controller, memberships, mounts, folder",
    [
        ("memory", V1, V1_MOUNTS, "/sys/fs/cgroup/memory"),
        ("pids", V1, V1_MOUNTS, "/sys/fs/cgroup/pids/docker/a1"),
        ("memory", "0::/a/b.scope", V1_MOUNTS, "/sys/fs/cgroup/unified/a/b.scope"),
        ("memory", "0::/", "1 2 0:3 / /sys/fs/cgroup ro - cgroup2 cgroup rw", "/sys/fs/cgroup"),
        ("memory", "0::/a", "1 2 0:3 /b /sys/fs/cgroup ro - cgroup2 cgroup rw", None),
        ("memory", "0::/a", "1 2 0:3 / / rw - ext4 /dev/vda rw", None),
        ("pids", "4:memory:/", V1_MOUNTS, None),
    ],
)
def test_the_cgroup_of_a_process_is_found(controller, memberships, mounts, folder):
    assert cgroup.own_folder(controller, memberships, mounts) == (folder and Path(folder))


def test_in_cgroup_v2_the_parent_takes_the_group_if_the_own_cannot(monkeypatch, tmp_path):
    """A group with processes cannot have limited groups; its parent can."""
    own = tmp_path / "slice" / "run.scope"
    own.mkdir(parents=True)
    for folder, controllers in ((own, ""), (own.parent, "cpu memory pids")):
        (folder / "cgroup.controllers").write_text("cpu memory pids")
        (folder / "cgroup.subtree_control").write_text(controllers)
    monkeypatch.setattr(cgroup, "own_folder", lambda *_: own)
    assert cgroup.parents() == {"memory": own.parent, "pids": own.parent}
    (own.parent / "cgroup.subtree_control").write_text("cpu")
    with pytest.raises(RuntimeError, match="must not limit memory below"):
        cgroup.parents()


def test_programs_are_killed_if_the_machine_runs_out_of_memory(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        zygote = inside.Zygote(ours, inside.SandboxSettings(False, False, False, [], "", 0, [], -1))
        for left, is_full in ((1 << 20, True), (8 << 20, False)):
            text = f"MemTotal: {64 << 20} kB\nMemAvailable: {left} kB\n".encode()
            monkeypatch.setattr(zygote, "_read", lambda path, text=text: text)
            assert zygote._is_machine_full() == is_full


def test_folders_that_a_program_has_locked_are_removed():
    """Without namespaces programs are this user's, who is not root."""
    script = """if True:
        import os, tempfile
        from rlcore.sandbox import confine, isolation
        if os.geteuid() == 0:
            os.setuid(confine.NOBODY)
        folder = tempfile.mkdtemp(dir="/tmp")
        os.makedirs(f"{folder}/a/b")
        open(f"{folder}/a/b/c", "w").close()
        for path in ("a/b", "a", "."):
            os.chmod(f"{folder}/{path}", 0)
        isolation.remove_folder(folder)
        print(os.path.exists(folder))
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert done.stdout == b"False\n", done.stderr.decode()


# ---- tests of programs


@pytest.mark.parametrize(
    "program, test, passes",
    [
        ("def f(x): return x + 1", "assert f(2) == 3", True),
        ("def f(x): return x + 1", "assert f(2) == 4", False),
        ("def g(x): return 1", "assert f(2) == 1", False),
        ("def f(x): return (x, [x], {x: {x}})", "assert f(2) == (2, [2], {2: {2}})", True),
        ("def f(x): return [x]", "assert f(2) == (2,)", False),
        ("def f(x): return x / 3", "assert math.isclose(f(1), 0.3333, rel_tol=0.01)", True),
        ("def f(x): return {x, 1}", "assert set(f(2)) == {1, 2}", True),
        ("def sum(a, b): return a + b + 1", "assert sum(1, 2) == 4", True),
        ("def f(x): return 2 ** 20000", "assert f(0) == 2 ** 20000", True),
        ("def f(x): return float('nan')", "assert f(0) != f(0)", True),
        ("def f(x): yield from range(x)", "assert list(f(3)) == [0, 1, 2]", True),
        ("def f(x): raise KeyError(x)", "try:\n f(1)\n assert 0\nexcept KeyError: pass", True),
        ("class P:\n def __init__(s, a): s.a = a", "assert P(4).a == 4", True),
        ("class S:\n def f(s, x): return x", "assert S().f(4) == 4", True),
        ("def f(x, t): return isinstance(x, t)", "assert f(1, int) and not f(1, str)", True),
        ("def f(x): return x", "def check(c):\n assert c(b'a') == b'a'\ncheck(f)", True),
        ("import copy\ndef copy(x): return x", "assert copy(3) == 3", True),
        ("class code:\n def go(): return 5", "assert code.go() == 5", True),
        ("class math:\n def sqrt(x): return 5", "assert math.sqrt(4) == 5", False),
        ("class json:\n def tool(): return 5", "assert json.tool() == 5", False),
        ("f = lambda x: None", "assert f(1) is None", True),
        ("class E:\n def __bool__(s): return False\nf = E", "assert not f()", True),
        ("class E:\n def __len__(s): return 0\nf = E", "assert f()", False),
    ],
)
def test_a_test_means_what_it_means_in_python(box, program, test, passes):
    assert box.test(program, [test], within(LONG_S)).passed == (passes,)


EQUAL = "class E:\n def __eq__(s, o): return True\n"


@pytest.mark.parametrize(
    "program, test, passes",
    [
        ("def f(a): a.sort()", "a = [3, 1]; f(a); assert a == [1, 3]", True),
        ("def f(a): return sorted(a)", "a = [3, 1]; f(a); assert a == [1, 3]", False),
        ("def f(a): return a[::-1]", "a = [3, 1]; assert f(a) == [1, 3] and a == [3, 1]", True),
        ("def f(a): a.sort(); return a", "a = [3, 1]; f(a); assert a == [3, 1]", False),
        ("def f(a): a[:] = zip(*a)", "a = [[1, 2], [3, 4]]; f(a); assert a[0] == (1, 3)", True),
        ("def f(a): a[1][0] += 1", "a = [[1], [2]]; f(a); assert a == [[1], [3]]", True),
        (
            "def f(d, *, s): d.clear(); s.add(2)",
            "d, s = {1: 2}, {1}; f(d, s=s); assert not d and s == {1, 2}",
            True,
        ),
        (
            "def f(b, q): b.reverse(); q.popleft()",
            "from collections import deque\nb, q = bytearray(b'ab'), deque([1, 2])\nf(b, q)\n"
            "assert (b, list(q)) == (b'ba', [2])",
            True,
        ),
        (
            "class N: pass\ndef f(a): a.reverse()",
            "m, n = N(), N(); a = [m, n]; f(a); assert a[0] is n and a[1] is m",
            True,
        ),
        (f"{EQUAL}def f(a): a[0] = E()", "a = [3]; f(a); assert a == [1]", False),
        (
            f"{EQUAL}class L(list, E): pass\ndef f(a): a[0] = L()",
            "a = [3]; f(a); assert a == [1]",
            False,
        ),
        (
            'import os\nos.write(3, b\'{"ready":true}\\n{"value":["ref",0]}\\n'
            '{"value":null,"changed":[[1,["t",[]]]]}\\n\')\ndef f(a, b): pass',
            "a, b = [1], (1,); f(a, b); assert a == [1] and b == (1,)",
            False,
        ),
    ],
)
def test_a_container_that_the_program_changes_is_changed_for_the_test(box, program, test, passes):
    assert box.test(program, [test], within(LONG_S)).passed == (passes,)


def test_each_test_stands_alone_and_a_dead_program_passes_none_of_the_rest(box):
    program = "import os\ndef f(x):\n if x == 3: os._exit(0)\n return x"
    tests = [f"assert f({i}) == {i}" for i in (1, 3, 1)]
    assert box.test(program, tests, within(LONG_S)).passed == (True, False, False)
    wrong_first = ["assert f(1) == 2", "assert f(1) == 1"]
    assert box.test(program, wrong_first, within(LONG_S)).passed == (False, True)
    endless = "def f(x):\n while x: pass\n return 0"
    found = box.test(endless, ["assert f(0) == 0", "assert f(1) == 0"], within(3.0))
    assert found.passed == (True, False) and found.outcome.why == "timeout"


@pytest.mark.parametrize("forger", FORGERS, ids=lambda f: f.name)
def test_no_verdict_is_forged(box, forger):
    assert box.test(forger.source, FORGED_TESTS, within(LONG_S)).passed == (False, False, False)


def test_the_forged_tests_can_be_passed(box):
    honest = f"def f(x): return [{SECRET}] if x == 4 else {SECRET}"
    assert box.test(honest, FORGED_TESTS, within(LONG_S)).passed == (True, True, True)


# ---- hostile programs


@pytest.fixture
def checkpoint(monkeypatch, tmp_path):
    """A file that programs must not read; and a secret in the environment."""
    monkeypatch.setenv("HOSTILE_SECRET", "1")
    tmp_path.chmod(0o700)
    path = tmp_path / "model.bin"
    path.write_text("weights")
    yield path
    assert path.read_text() == "weights"


CASES = [pytest.param(s, marks=[] if s.quick else pytest.mark.slow, id=s.name) for s in SCRIPTS]


@pytest.mark.parametrize("script", CASES)
def test_a_hostile_program_gets_nothing(script, checkpoint, grade):
    with open_box("namespaces", grade) as sandbox:
        harm, _ = attack(script, sandbox, checkpoint)
    assert not harm


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.name)
@pytest.mark.parametrize("name", ["cgroup", "fallback"])
def test_a_hostile_program_gets_nothing_in_the_other_grades(name, script, checkpoint, grade):
    """Nor in the fallback, except for what it says that it cannot do."""
    if why := skipped(script, name):
        pytest.skip(why)
    with open_box(name, grade) as sandbox:
        harm, _ = attack(script, sandbox, checkpoint)
    assert not harm


HONEST = {
    "threads": "from threading import Thread\nts = [Thread(target=print) for i in range(8)]\n"
    "[t.start() for t in ts]; [t.join() for t in ts]",
    "thread pool": "from concurrent.futures import ThreadPoolExecutor as P\n"
    "with P(4) as p: print(sum(p.map(abs, range(9))))",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\nasyncio.run(f())",
    "processes with pipes": "import multiprocessing as m\na, b = m.Pipe()\n"
    "p = m.Process(target=lambda: b.send(4)); p.start(); assert a.recv() == 4; p.join()",
    "shared memory in a file": "import mmap\nf = open('f', 'w+b'); f.truncate(1 << 20)\n"
    "m = mmap.mmap(f.fileno(), 1 << 20); m[:3] = b'abc'; m.flush()",
    "private anonymous memory": "import mmap\n"
    "m = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); m[:3] = b'abc'",
    "subprocess": "import subprocess, sys\n"
    "print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout)",
    "big list": "x = list(range(8_000_000)); x += x[:1_000_000]; print(len(x))",
    "big bytes": "x = bytearray(350 << 20); x[::4096] = b'x' * len(x[::4096]); print(len(x))",
    "growing bytes": "x = bytearray()\nfor _ in range(200): x += bytes(1 << 20)\nprint(len(x))",
    "regular expressions": "import re\nprint(len(re.findall(r'(a+)(b?)', 'aab' * 10000)))",
    "temporary files": "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x' * 9)",
    "database in memory": "import sqlite3\nsqlite3.connect(':memory:').execute('select 1')",
    "timer signal": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: print(1))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()",
    "recursion": "import sys\nsys.setrecursionlimit(50000)\nf = lambda n: n and f(n - 1)\nf(9000)",
    "limits of its own": "import resource as r\nr.setrlimit(r.RLIMIT_STACK, (1 << 20, 1 << 20))",
    "epoll, timers and events": "import select, os\ne = select.epoll(); r, w = os.pipe()\n"
    "e.register(r); os.write(w, b'x'); print(e.poll(1))",
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_works(box, name):
    found = box.run(HONEST[name], within(LONG_S))
    assert (found.code, found.why) == (0, ""), found.stderr.decode()


def test_a_row_of_numpy_works_where_packages_are_allowed(grade):
    numpy = pytest.importorskip("numpy")
    folder = str(Path(numpy.__file__).parents[1])
    source = "import numpy as np\na = np.ones((400, 400))\nprint((a @ a).sum())"
    with Sandbox(grade.name, (folder,)) as sandbox:
        assert sandbox.run(source, within(LONG_S)).stdout == b"64000000.0\n"


def test_a_listener_on_the_host_is_out_of_reach(grade):
    """Beside the filter there is a network namespace: this is about the namespace."""
    with open_box("namespaces", grade) as sandbox:
        ns = Path(f"/proc/{sandbox.pid}/ns/net").readlink()
        inner = [
            Path(f"/proc/{p}/ns/net").readlink()
            for p in Path(f"/proc/{sandbox.pid}/task/{sandbox.pid}/children").read_text().split()
        ]
    assert inner and all(other != ns for other in inner)


# ---- what a machine allows


def test_without_bubblewrap_it_says_so_or_refuses(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "WEAK" in isolation.grade().sentence and "bubblewrap" in isolation.grade().sentence
    with Sandbox("fallback") as sandbox:
        found = sandbox.test("def f(): return 1", ["assert f() == 1"], within(LONG_S))
        assert found.passed == (True,)
    for required in ("namespaces", "cgroup"):
        with pytest.raises(RuntimeError, match="bubblewrap is not installed.*require_isolation"):
            isolation.grade(required)


def test_where_namespaces_are_forbidden_bubblewraps_own_words_are_told(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="No permissions to create new namespace"):
        isolation.grade("namespaces")


def test_the_readme_has_every_attempt():
    text = README.read_text()
    missing = [a.name for a in (*SCRIPTS, *FORGERS) if f"| {a.name} | {a.outcome} |" not in text]
    assert not missing
