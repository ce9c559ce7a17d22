"""Reward functions that loop, raise, exit, fork, print, leak: each costs its own sample and no
other.

Not covered: a process that escapes by a new session, an emptied environment and a dead parent at
once.
"""

import logging
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rlcore.config.schema import RewardConfig
from rlcore.records import RewardResult
from rlcore.rewards.registry import config_class
from rlcore.rewards.service import RewardService
from rlcore.rewards.wire import SampleInfo, ScoreJob
from rlcore.sched.reward_timeout import AdaptiveTimeout, reasons_of
from tests.contracts.reward_contract import prompt_of, sample_of, score_all

USER_CODE = '''
import ctypes, os, random, subprocess, sys, time
from rlcore.records import RewardResult

LEAK = []

def run_away(path, session):
    """A grandchild that writes its pid and sleeps."""
    code = f"import os,time; open({path!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=session)
    while not (os.path.exists(path) and open(path).read()):
        time.sleep(0.005)

def score(sample, prompt, text):
    kind, _, arg = text.partition(" ")
    if kind == "loop":
        while True: pass
    if kind == "sleep": time.sleep(float(arg))
    if kind == "raise": return 1 / 0
    if kind == "exit": os._exit(3)
    if kind == "sys.exit": sys.exit("enough")
    if kind == "segfault": ctypes.string_at(0)
    if kind == "print":
        piece = "x" * (1 << 20)
        for _ in range(int(arg)): print(piece)
    if kind == "say":
        print(arg)
        print(arg, file=sys.stderr)
    if kind == "nan": return float("nan")
    if kind == "none": return None
    if kind == "str": return "1.0"
    if kind == "details": return RewardResult(score=1, details={"a": 2})
    if kind == "bad_details": return RewardResult(score=1.0, details={"a": "b"})
    if kind == "fork": os.fork()
    if kind == "leave": run_away(arg, False)
    if kind == "leave_session": run_away(arg, True)
    if kind == "hang_with": run_away(arg, True); time.sleep(300)
    if kind == "exit_with": run_away(arg, True); os._exit(4)
    if kind == "leak":
        while True:
            LEAK.append(bytearray(8 << 20))
            time.sleep(0.01)
    if kind == "memory_error": raise MemoryError
    if kind == "half": return 0.5
    if kind == "pid": return os.getpid()
    if kind == "random": return random.random()
    if kind == "junk":
        for fd in range(3, 4096):  # as far as a long test run may push the number
            try: os.write(fd, b"\\xff" * 64)
            except OSError: pass
    if kind == "close": os.closerange(3, 4096)
    return 1.0
'''
WAIT_S = 30.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A service around USER_CODE; keyword arguments go to its section or to it."""
    (tmp_path / "hostile.py").write_text(textwrap.dedent(USER_CODE))
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("hostile", None)
    made = []

    def build(**settings):
        settings = {"timeout_s": 10.0, "on_error": -1.0} | settings
        settings["adaptive_timeout"] = "deadlines" in settings
        of_section = {k: settings.pop(k) for k in list(settings) if hasattr(RewardConfig, k)}
        config = RewardConfig(**of_section)
        made.append(RewardService("hostile.score", config=config, **settings))
        return made[-1]

    yield build
    for service in made:
        service.close()
    assert not _children_of(os.getpid(), "rlcore.rewards.child"), "children survive close()"


def _children_of(pid, command):
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_bytes().rpartition(b") ")[2].split()
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat[1]) == pid and stat[0] != b"Z" and command.encode() in words:
                out.append(int(entry.name))
    return out


def _score(service, *texts):
    """Results of these texts, in their order."""
    ids = [f"t{i}.0" for i in range(len(texts))]
    for id, text in zip(ids, texts, strict=True):
        service.submit(id, sample_of(id), prompt_of("7"), text)
    got = score_all(service, WAIT_S)
    assert sorted(got) == sorted(ids)
    return [got[id] for id in ids]


def _gone(path):
    """Whether the process that wrote its pid there has ended."""
    pid = int(path.read_text())
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == b"Z":
            return True
        time.sleep(0.01)
    return False


def test_a_loop_times_out_alone_and_those_behind_it_are_scored(make, caplog):
    texts = ["ok"] * 40 + ["loop"] + ["ok"] * 40
    results = _score(make(timeout_s=1.0), *texts)
    assert [r.score for r in results] == [1.0] * 40 + [-1.0] + [1.0] * 40
    assert results[40].error == "timeout after 1 s"
    assert all(r.error == "" for i, r in enumerate(results) if i != 40)
    assert 1 <= results[40].latency_s < 5
    (said,) = [m for m in caplog.messages if "t40.0" in m]
    assert 'hostile.py", line' in said, "the log says where it hung"


def test_the_deadline_counts_from_a_samples_own_start_not_from_its_submission(make):
    results = _score(make(timeout_s=1.0), *["sleep 0.3"] * 4)
    assert [r.score for r in results] == [1.0] * 4, "1.2 s of work in all, 0.3 s each"
    assert all(0.3 <= r.latency_s < 1 for r in results)


def test_a_right_answer_shortens_the_deadline_of_its_own_prompt_alone(make):
    """0.8 s instead of 60."""
    deadlines = AdaptiveTimeout(least_s=0.8, most_s=60.0, factor=1.5)
    service = make(timeout_s=60.0, deadlines=deadlines)
    known, other = prompt_of("7", index=1), prompt_of("7", index=2)
    for id, prompt, text in (
        ("t0.0", known, "ok"),
        ("t0.1", known, "sleep 100"),
        ("t1.0", other, "sleep 1.0"),
        ("t0.2", known, "half"),
    ):
        service.submit(id, sample_of(id), prompt, text)
    found = score_all(service, WAIT_S)
    assert {i: (r.score, r.error) for i, r in found.items()} == {
        "t0.0": (1.0, ""),
        "t0.1": (-1.0, "timeout after 0.8 s"),
        "t1.0": (1.0, ""),
        "t0.2": (0.5, ""),
    }
    assert [found[i].timeout_s for i in ("t0.0", "t0.1", "t1.0")] == [60.0, 0.8, 60.0]
    assert found["t0.0"].reference_latency_s == found["t0.0"].latency_s > 0
    assert found["t0.1"].reference_latency_s == found["t0.2"].reference_latency_s == 0.0, (
        "no right answers"
    )
    assert list(deadlines.state()["reference_latency"]) == ["test/1", "test/2"]


def test_a_right_answer_ends_one_that_already_runs_and_other_ranks_are_listened_to(make):
    deadlines = AdaptiveTimeout(least_s=0.8, most_s=60.0, factor=2.0)
    service = make(timeout_s=60.0, workers=2, deadlines=deadlines)
    service.submit("t0.0", sample_of("t0.0"), prompt_of("7"), "sleep 100")
    service.submit("t0.1", sample_of("t0.1"), prompt_of("7"), "ok")
    assert score_all(service, WAIT_S)["t0.0"].error == "timeout after 0.8 s"
    service.learn({"test/0": 5.0, "test/5": 20.0})
    assert deadlines.timeout_s("test/0") == 10.0 and deadlines.timeout_s("test/5") == 40.0
    make().learn({"test/0": 1.0})  # without deadlines that adapt there is nothing to learn


def test_other_workers_go_on_while_one_hangs(make):
    service = make(timeout_s=3600.0, workers=2)
    _score(service, *["sleep 0.05"] * 8)
    service.submit("t9.0", sample_of("t9.0"), prompt_of("7"), "loop")
    for i in range(6):
        service.submit(f"t8.{i}", sample_of("x"), prompt_of("7"), "sleep 0.05")
    early: list[tuple] = []
    end = time.monotonic() + WAIT_S
    while len(early) < 6 and time.monotonic() < end:
        early += service.poll(1.0)
    assert sorted(dict(early)) == [f"t8.{i}" for i in range(6)]


def test_what_a_function_raises_or_wrongly_returns_is_named_and_scores_on_error(make, caplog):
    texts = ["raise", "sys.exit", "nan", "none", "str", "bad_details", "ok", "details"]
    with caplog.at_level(logging.WARNING, logger="rlcore"):
        results = _score(make(), *texts)
    assert [r.error for r in results] == [
        "ZeroDivisionError: division by zero",
        "SystemExit: enough",
        "ValueError: score is nan; return a finite number",
        "TypeError: score is a NoneType; return a number or a RewardResult",
        "TypeError: score is a str; return a number or a RewardResult",
        "TypeError: details['a'] is a str; return a number",
        "",
        "",
    ]
    assert [r.score for r in results] == [-1.0] * 6 + [1.0, 1.0]
    assert results[7].details == {"a": 2.0}
    for i in range(6):
        said = [m for m in caplog.messages if f"sample t{i}.0 scores -1: {results[i].error}" in m]
        assert len(said) == 1, "each failure is logged once, with its id"
    assert "line" in caplog.messages[0] and "hostile.py" in caplog.messages[0], "with a traceback"


def test_time_limits_that_differ_are_one_kind_of_failure(monkeypatch, caplog):
    """With adaptive_timeout each prompt has a limit of its own, and so a text of its own."""
    runner = SimpleNamespace(submit=lambda job: None, cancel=lambda ids: None, close=lambda: None)
    monkeypatch.setattr("rlcore.rewards.service._runner", lambda *_: runner)
    service = RewardService("exact", config=RewardConfig(max_pending=300))
    for i in range(256):
        id = f"t{i}.0"
        service.submit(id, sample_of(id), prompt_of("1"), "")
        info = SampleInfo(id=id, num_tokens=1, num_prompt_tokens=1, finish="stop")
        job = ScoreJob(i, info, prompt_of("1"), "")
        error = f"timeout after {1 + i / 1000:g} s"
        service._scored(0, job, RewardResult(score=0.0, error=error), "")
    assert len(service._errors) == 1
    assert len(caplog.messages) == 5 + 6, "the first five, then the 8th, 16th, ... 256th"


def test_a_crash_costs_its_own_sample(make):
    results = _score(make(), "ok", "exit", "ok", "segfault", "ok")
    assert [r.score for r in results] == [1.0, -1.0, 1.0, -1.0, 1.0]
    assert results[1].error == "crash: exit code 3"
    assert results[3].error == "crash: signal SIGSEGV"


def test_a_hundred_megabytes_of_print_change_nothing_but_a_bounded_log(make, tmp_path):
    log = tmp_path / "logs" / "rewards.log"
    results = _score(make(log_file=log), "say first words", "print 100", "ok")
    assert [(r.score, r.error) for r in results] == [(1.0, "")] * 3
    assert log.read_text().startswith("first words\nfirst words\n")
    assert 4 << 20 <= log.stat().st_size < 5 << 20


def test_a_fork_that_returns_does_not_score_twice(make):
    results = _score(make(), "fork", "ok", "fork", "ok")
    assert [(r.score, r.error) for r in results] == [(1.0, "")] * 4


@pytest.mark.parametrize("kind", ["leave", "leave_session", "hang_with", "exit_with"])
def test_processes_that_a_sample_leaves_behind_are_killed(make, tmp_path, kind):
    path = tmp_path / "pid"
    result, after = _score(make(timeout_s=1.5), f"{kind} {path}", "ok")
    errors = {"hang_with": "timeout after 1.5 s", "exit_with": "crash: exit code 4"}
    assert result.error == errors.get(kind, "")
    assert _gone(path)
    assert after.score == 1.0


def test_a_child_that_eats_memory_is_replaced(make):
    leak, after = _score(make(memory_limit_gb=0.2), "leak", "ok")
    assert leak.error.startswith("memory: the child grew by 0.")
    assert after.score == 1.0


def test_a_child_out_of_memory_answers_and_is_replaced(make):
    first, error, second = _score(make(), "pid", "memory_error", "pid")
    assert error.error == "MemoryError"
    assert first.score != second.score


def test_a_function_that_writes_to_or_closes_the_channel_costs_its_own_sample(make):
    results = _score(make(), "ok", "junk", "ok", "close", "ok")
    assert [r.score for r in results] == [1.0, -1.0, 1.0, -1.0, 1.0]
    assert all(r.error.startswith("crash: ") for r in (results[1], results[3]))


def test_random_numbers_depend_on_seed_and_sample_not_on_worker_or_order(make):
    texts = ["random"] * 12
    one, two = (_score(make(seed=5, workers=w), *texts) for w in (1, 2))
    other = _score(make(seed=6), *texts)
    assert [r.score for r in one] == [r.score for r in two]
    assert len({r.score for r in one}) == 12
    assert [r.score for r in one] != [r.score for r in other]


def test_a_text_that_is_no_utf8_is_scored_and_a_row_that_cannot_travel_is_refused(make):
    service = make()
    (result,) = _score(service, "ok \ud800")
    assert result.score == 1.0
    row = prompt_of("7")
    bad = type(row)(**{f: getattr(row, f) for f in row.__struct_fields__} | {"fields": {"a": {1j}}})
    with pytest.raises(ValueError, match="row 0 of test cannot be sent to the reward"):
        service.submit("t1.0", sample_of("t1.0"), bad, "ok")
    assert service.num_pending == 0


def test_misuse_is_refused(make):
    service = make(max_pending=2)
    service.submit("t0.0", sample_of("t0.0"), prompt_of("7"), "sleep 0.2")
    with pytest.raises(ValueError, match="sample t0.0 is already pending"):
        service.submit("t0.0", sample_of("t0.0"), prompt_of("7"), "ok")
    service.submit("t0.1", sample_of("t0.1"), prompt_of("7"), "ok")
    with pytest.raises(RuntimeError, match="2 samples are pending; poll first"):
        service.submit("t0.2", sample_of("t0.2"), prompt_of("7"), "ok")
    service.close()
    service.close()
    with pytest.raises(RuntimeError, match="closed"):
        service.submit("t0.3", sample_of("t0.3"), prompt_of("7"), "ok")
    with pytest.raises(ValueError, match="--reward nothing: allowed are"):
        RewardService("nothing", config=RewardConfig())


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("raise OSError('no model here')", "cannot start in a child process: .*no model here"),
        ("os._exit(9)", "failed before scoring: crash: exit code 9, 3 times in a row"),
    ],
)
def test_a_reward_that_cannot_start_in_the_child_ends_the_wait_with_a_sentence(
    tmp_path, monkeypatch, source, sentence
):
    module = f"only_here_{len(source)}"
    (tmp_path / f"{module}.py").write_text(
        "import os, sys\n"
        "if 'rlcore.rewards.child' in sys.orig_argv:\n"
        f"    {source}\n"
        "def score(sample, prompt, text): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with RewardService(f"{module}.score", config=RewardConfig()) as service:
        service.submit("t0.0", sample_of("t0.0"), prompt_of("7"), "x")
        with pytest.raises(RuntimeError, match=sentence):
            service.poll(WAIT_S)


def test_children_that_are_killed_together_while_they_start_are_one_failure(tmp_path, monkeypatch):
    """As by whoever frees memory: the next ones score."""
    (tmp_path / "slow_start.py").write_text(
        "import sys, time\n"
        "if 'rlcore.rewards.child' in sys.orig_argv:\n"
        "    time.sleep(1)\n"
        "def score(sample, prompt, text): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = RewardConfig(workers=4)
    with RewardService("slow_start.score", config=config) as service:
        for k in range(4):
            service.submit(f"t{k}.0", sample_of(f"t{k}.0"), prompt_of("7"), "x")
        end, victims = time.monotonic() + WAIT_S, []
        while len(victims) < 4:
            assert time.monotonic() < end, victims
            children = psutil.Process().children()
            victims = [c for c in children if "rlcore.rewards.child" in c.cmdline()]
        for victim in victims:
            victim.kill()
        found = []
        while len(found) < 4:
            found += service.poll(WAIT_S)
    assert all(result.score == 1 and not result.error for _, result in found)


@pytest.mark.usefixtures("make")
def test_children_die_with_their_parent_even_in_a_loop(tmp_path):
    code = """
    import sys, time
    sys.path.insert(0, {folder!r})
    from rlcore.config.schema import RewardConfig
    from rlcore.rewards.service import RewardService
    from tests.contracts.reward_contract import prompt_of, sample_of
    service = RewardService("hostile.score", config=RewardConfig(timeout_s=600, workers=2))
    for i in range(2):
        service.submit(f"t{{i}}.0", sample_of("x"), prompt_of("7"), "loop")
    workers = service._runners[0]._workers
    while not all(w.inflight for w in workers) or len(workers) < 2:
        time.sleep(0.01)
    print("looping", flush=True)
    time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code.format(folder=str(tmp_path)))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout.readline() == "looping\n"
        children = _children_of(parent.pid, "rlcore.rewards.child")
        assert len(children) == 2
    finally:
        parent.kill()
        parent.wait(WAIT_S)
    for _ in range(500):
        if not any(Path(f"/proc/{c}").exists() for c in children):
            return
        time.sleep(0.01)
    pytest.fail(f"children {children} outlive their parent")


def test_a_child_imports_neither_torch_nor_transformers():
    code = (
        "import sys, rlcore.rewards.child, rlcore.rewards.exact\n"
        "heavy = {'torch', 'transformers', 'sympy', 'math_verify'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_random_mixture_gives_each_sample_its_own_result(make, tmp_path):
    expected = {
        "ok": "",
        "sleep 0.05": "",
        "loop": "timeout after 4 s",
        "raise": "ZeroDivisionError: division by zero",
        "exit": "crash: exit code 3",
        "print 3": "",
        "fork": "",
        "memory_error": "MemoryError",
        f"leave_session {tmp_path / 'pid'}": "",
    }
    for round in range(2):
        texts = random.Random(round).choices(list(expected), [30, 10, 1, 3, 2, 2, 2, 1, 1], k=200)
        results = _score(make(timeout_s=4.0, workers=3), *texts)
        got = [(text, r.error) for text, r in zip(texts, results, strict=True)]
        assert [(t, e) for t, e in got if e != expected[t]] == []


def test_cancelled_samples_are_not_scored_and_the_next_ones_are(make):
    service = make()
    service.submit("t0.0", sample_of("t0.0"), prompt_of("7"), "sleep 0.5")
    for i in range(1, 40):
        service.submit(f"t0.{i}", sample_of("x"), prompt_of("7"), "sleep 10")
    service.cancel({f"t0.{i}" for i in range(40)} | {"unknown"})
    assert service.num_pending == 0
    service.submit("t1.0", sample_of("t1.0"), prompt_of("7"), "say hello")
    found = []
    while service.num_pending:
        found += service.poll(5.0)
    assert [i for i, _ in found] == ["t1.0"]
    assert service.poll(0.1) == []


def test_a_score_that_has_come_and_was_not_fetched_can_be_cancelled(make):
    service = make()
    service.submit("t0.0", sample_of("t0.0"), prompt_of("7"), "say hello")
    end = time.monotonic() + 20
    while not service._done:
        assert time.monotonic() < end
        time.sleep(0.01)
    service.cancel(["t0.0"])
    assert service.poll(0.05) == [] and service.num_pending == 0
    assert not service._open


def test_a_weighted_sum_names_its_terms_and_the_one_that_failed(make, tmp_path):
    (tmp_path / "other.py").write_text("def score(sample, prompt, text): return len(text)\n")
    made = config_class("hostile.score:2,other.score:0.5")
    config = made(hostile=RewardConfig(on_error=-1.0), other=RewardConfig())
    with RewardService("hostile.score:2,other.score:0.5", config=config) as service:
        half, broken = _score(service, "half", "raise")
    assert half.score == 2 * 0.5 + 0.5 * 4
    assert half.details == {"hostile": 0.5, "other": 4.0} and half.error == ""
    assert half.terms == (0.5, 4.0) and broken.terms == (-1.0, 5.0)
    assert broken.score == 2 * -1.0 + 0.5 * 5
    assert broken.error == "ZeroDivisionError: division by zero (hostile)"
    assert reasons_of(broken.error + "; timeout after 2 s (b)") == ["exception", "timeout"]
