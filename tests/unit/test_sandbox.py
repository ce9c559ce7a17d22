"""The sandbox: what programs get, what hostile ones get (tests/hostile.py), what tests say of them.

Not covered: kernels without seccomp or Landlock, processors other than this one.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlcore.sandbox import box as box_module
from rlcore.sandbox import isolation
from rlcore.sandbox.box import Broken, ProgramLimits, Sandbox
from tests.hostile import FORGED_TESTS, FORGERS, SCRIPTS, SECRET

ROOT = Path(__file__).resolve().parents[2]
README = Path(isolation.__file__).with_name("README.md")
LIMITS = ProgramLimits()
LONG_S = 60.0


def within(seconds: float):
    """A deadline from now."""
    end = time.monotonic() + seconds
    return lambda: end


@pytest.fixture(scope="module")
def is_isolated():
    """Whether this machine has namespaces."""
    return isolation.grade().isolated


def open_box(isolated: bool, is_isolated: bool) -> Sandbox:
    if isolated and not is_isolated:
        pytest.skip(f"no namespaces here: {isolation.grade().sentence}")
    return Sandbox(isolated)


GRADES = ["namespaces", pytest.param("fallback", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=GRADES)
def box(request, is_isolated):
    with open_box(request.param == "namespaces", is_isolated) as sandbox:
        yield sandbox


def descendants(root: int) -> int:
    """Living processes below this one."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(name)] = int(fields[1])
    family = {root}
    for _ in parents:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        if not more:
            break
        family |= more
    return len(family) - 1


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


def test_a_sandbox_that_dies_says_so_and_comes_back(is_isolated):
    with open_box(True, is_isolated) as sandbox:
        sandbox._walls._process.kill()
        with pytest.raises(Broken, match="the sandbox"):
            for _ in range(100):  # its end takes a moment
                sandbox.run("print(1)", within(LONG_S))
        assert sandbox.run("print(1)", within(LONG_S)).stdout == b"1\n"


def test_a_sandbox_that_cannot_be_emptied_or_come_back_at_once_costs_one_program(monkeypatch):
    with Sandbox(False) as sandbox:

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

    with Sandbox(False) as sandbox:
        sandbox.close()
        monkeypatch.setattr(box_module, "_PAUSES_S", (0.0, 0.0))
        monkeypatch.setattr(box_module, "SandboxProcess", in_vain)
        with pytest.raises(RuntimeError, match="did not restart in 3 tries: .*No space"):
            sandbox.run("print(1)", within(LONG_S))


def test_closing_a_sandbox_whose_folder_stays_raises_nothing(monkeypatch, caplog):
    remove, folders = isolation._remove, []

    def in_vain(folder: str) -> None:
        folders.append(folder)
        raise subprocess.TimeoutExpired("rm", 30)

    monkeypatch.setattr(isolation, "_remove", in_vain)
    Sandbox(False).close()
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

    with Sandbox(False) as sandbox:
        with pytest.raises((KeyError, Broken)):
            sandbox.run(SLEEPER.format(seconds), deadline)
        assert time.monotonic() < end, "the program did not start"
        sandbox.close()
        assert pids_of(seconds) == []


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
        isolation._remove(folder)
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
        ("f = lambda x: None", "assert f(1) is None", True),
        ("class E:\n def __bool__(s): return False\nf = E", "assert not f()", True),
        ("class E:\n def __len__(s): return 0\nf = E", "assert f()", False),
    ],
)
def test_a_test_means_what_it_means_in_python(box, program, test, passes):
    assert box.test(program, [test], within(LONG_S)).passed == (passes,)


def test_each_test_stands_alone_and_a_dead_program_passes_none_of_the_rest(box):
    program = "import os\ndef f(x):\n if x == 3: os._exit(0)\n return x"
    tests = [f"assert f({i}) == {i}" for i in (1, 3, 1)]
    assert box.test(program, tests, within(LONG_S)).passed == (True, False, False)
    wrong_first = ["assert f(1) == 2", "assert f(1) == 1"]
    assert box.test(program, wrong_first, within(LONG_S)).passed == (False, True)
    endless = "def f(x):\n while x: pass\n return 0"
    found = box.test(endless, ["assert f(0) == 0", "assert f(1) == 0"], within(0.6))
    assert found.passed == (True, False) and found.outcome.why == "timeout"


@pytest.mark.parametrize("forger", FORGERS, ids=lambda f: f.name)
def test_no_verdict_is_forged(box, forger):
    assert box.test(forger.source, FORGED_TESTS, within(LONG_S)).passed == (False, False, False)


def test_the_forged_tests_can_be_passed(box):
    honest = f"def f(x): return [{SECRET}] if x == 4 else {SECRET}"
    assert box.test(honest, FORGED_TESTS, within(LONG_S)).passed == (True, True, True)


# ---- hostile programs


def attack(script, sandbox: Sandbox, checkpoint: Path) -> None:
    """Run it, and look at what it has done."""
    checkpoint.write_text("weights")
    source = f"CHECKPOINT = {str(checkpoint)!r}\n{script.source}"
    found = sandbox.run(source, within(script.seconds), limits=LIMITS)
    assert b"ESCAPED" not in found.stdout, found.stdout[:2000]
    assert found.why == script.ends, found
    if not found.why:
        assert found.code in (0, -9), found.stderr[-2000:]
    assert checkpoint.read_text() == "weights"
    assert found.peak_bytes < 3 * LIMITS.memory_mb << 20
    assert sandbox.run("import os; print(os.listdir('.'))", within(LONG_S)).stdout == b"[]\n"
    assert descendants(sandbox.pid) <= 2  # bubblewrap's init and the interpreter that waits


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("HOSTILE_SECRET", "1")


CASES = [pytest.param(s, marks=[] if s.quick else pytest.mark.slow, id=s.name) for s in SCRIPTS]


@pytest.mark.parametrize("script", CASES)
def test_a_hostile_program_gets_nothing(script, secret, is_isolated, tmp_path):
    with open_box(True, is_isolated) as sandbox:
        attack(script, sandbox, tmp_path / "model.bin")


@pytest.mark.slow
@pytest.mark.parametrize("script", [s for s in SCRIPTS if not s.walls_only], ids=lambda s: s.name)
def test_without_namespaces_most_of_it_holds(script, secret, tmp_path):
    tmp_path.chmod(0o700)
    with Sandbox(False) as sandbox:
        attack(script, sandbox, tmp_path / "model.bin")


def test_a_listener_on_the_host_is_out_of_reach(is_isolated):
    """Beside the filter there is a network namespace: this is about the namespace."""
    with open_box(True, is_isolated) as sandbox:
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
    with Sandbox(False) as sandbox:
        found = sandbox.test("def f(): return 1", ["assert f() == 1"], within(LONG_S))
        assert found.passed == (True,)
    with pytest.raises(RuntimeError, match="bubblewrap is not installed.*require_isolation"):
        isolation.grade(require_isolation=True)


def test_where_namespaces_are_forbidden_bubblewraps_own_words_are_told(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="No permissions to create new namespace"):
        isolation.grade(require_isolation=True)


def test_the_readme_has_every_attempt():
    text = README.read_text()
    missing = [a.name for a in (*SCRIPTS, *FORGERS) if f"| {a.name} | {a.outcome} |" not in text]
    assert not missing
