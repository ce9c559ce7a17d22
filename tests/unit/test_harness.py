"""Harnesses as processes: how they start, what they are told, how they end."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore.envs.chat_api import ChatAnswer
from rlcore.envs.harness import (
    EpisodeScore,
    Harness,
    HarnessLog,
    HarnessResult,
    HarnessRun,
    parse_score,
)
from tests.endpoints import WAIT_S, Played, serve, wait_until

TASK = {"prompt": "Say hello.", "answer": "hello", "level": 3}
PYTHON = sys.executable


class Outcome:
    """A harness that has ended, and what it printed."""

    def __init__(self, result: HarnessResult, printed: bytes) -> None:
        self.score, self.numbers, self.error = result
        self.result, self.printed = result, printed.decode("utf-8", "replace")


def play(
    folder: Path, command: str | tuple[str, ...] = "", *, task: Any = TASK, **fields: Any
) -> Outcome:
    """Run a harness without an endpoint. Its folder is in `folder`, and is empty afterwards."""
    printed = bytearray()
    posted, heard = fields.pop("posted", lambda: None), fields.pop("heard", lambda data: None)

    def sink(data: bytes) -> None:
        printed.extend(data)
        heard(data)

    run = HarnessRun(
        Harness(command=command, **fields),
        "t1.0",
        task,
        root_url="http://127.0.0.1:9",
        key="secret-key",
        sink=sink,
        posted=posted,
        parent_folder=folder,
    )
    result = run.run()
    left = [p.name for p in folder.iterdir() if p.name.startswith("rlcore-harness-")]
    assert not left, "the folder is removed"
    return Outcome(result, bytes(printed))


class Clock:
    """Clock of harnesses that passes every deadline once a harness has printed `ready`."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self._shift = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._shift

    def heard(self, data: bytes) -> None:
        if b"ready" in data:
            self._shift += 1e6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("rlcore.envs.harness.time", found)
    return found


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- what a harness is told


def test_a_command_gets_the_endpoint_the_task_and_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("OPENAI_API_KEY", "the rank's own")
    monkeypatch.setenv("NO_PROXY", "internal")
    monkeypatch.setenv("PYTHONPATH", "kept")
    program = "import json, os; print(json.dumps([dict(os.environ), os.listdir(), os.getcwd()]))"
    outcome = play(tmp_path, (PYTHON, "-c", program))
    env, listed, folder = json.loads(outcome.printed)
    assert outcome.result == (None, {}, "")
    assert env["OPENAI_BASE_URL"] == "http://127.0.0.1:9/v1"
    assert env["OPENAI_API_KEY"] == "secret-key"
    assert env["RLCORE_EPISODE"] == "t1.0"
    assert env["RLCORE_SCORE_URL"] == "http://127.0.0.1:9/v1/episodes/t1.0/score"
    assert env["NO_PROXY"] == "internal,127.0.0.1,localhost"
    assert env["PYTHONPATH"] == "kept" and "RANK" not in env
    assert listed == [] and Path(folder).parent.parent == tmp_path
    assert Path(env["TMPDIR"]).parent == Path(folder).parent


@pytest.mark.parametrize("command", ["cat {task}", ("cat", "{task}"), 'cat "$RLCORE_TASK"'])
def test_the_task_is_a_file(tmp_path: Path, command: Any) -> None:
    assert json.loads(play(tmp_path, command).printed) == TASK


def test_nothing_of_a_task_is_read_as_shell(tmp_path: Path) -> None:
    folder = tmp_path / "with 'quotes' $(touch pwned)"
    folder.mkdir()
    task = {"prompt": "'; touch pwned; echo $(touch pwned) `touch pwned` {task}"}
    outcome = play(folder, "cat {task}; echo; ls", task=task)
    first, *rest = outcome.printed.splitlines()
    assert json.loads(first) == task and not rest


def test_a_command_is_no_child_of_an_interpreter_and_cannot_signal_the_trainer(
    tmp_path: Path,
) -> None:
    outcome = play(tmp_path, "echo $PPID; kill -0 $PPID; kill -0 -1")
    assert outcome.printed.split()[0] == str(os.getpid())
    assert outcome.printed.count("not permitted") == 2, outcome.printed


# ---- scores


@pytest.mark.parametrize(
    ("data", "score"),
    [
        (b"1", EpisodeScore(1.0, {})),
        (b" -0.25\n", EpisodeScore(-0.25, {})),
        (b".5", EpisodeScore(0.5, {})),
        (b"true", EpisodeScore(1.0, {})),
        (b'{"score": 2}', EpisodeScore(2.0, {})),
        (
            b'{"score": 0, "numbers": {"tests/passed": 3, "name": "x"}}',
            EpisodeScore(0.0, {"tests_passed": 3.0}),
        ),
    ],
)
def test_a_score_is_a_number_or_json(data: bytes, score: EpisodeScore) -> None:
    assert parse_score(data) == score


@pytest.mark.parametrize(
    "data",
    [b"", b"good", b"nan", b"inf", b"1e400", b'"1"', b"[1]", b"null", b"{}", b'{"score": null}',
     b'{"score": 1, "numbers": [1]}', b"\xff", b"[" * 60_000, b"9" * 5000],
)  # fmt: skip
def test_another_score_is_an_error(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError), match="score|info|number"):
        parse_score(data)


def test_a_score_is_given_by_file(tmp_path: Path) -> None:
    command = """echo '{"score": 0.5, "numbers": {"steps": 2}}' > "$RLCORE_SCORE" """
    assert play(tmp_path, command).result == (0.5, {"steps": 2.0}, "")


def test_a_score_counts_however_the_harness_ends(tmp_path: Path, clock: Clock) -> None:
    assert play(tmp_path, 'echo 0 > "$RLCORE_SCORE"; exit 3').result == (0.0, {}, "")
    late = 'echo 0.25 > "$RLCORE_SCORE"; echo ready; sleep 1000'
    assert play(tmp_path, late, grace_s=0.1, heard=clock.heard).result == (0.25, {}, "")


def test_a_posted_score_comes_before_the_file(tmp_path: Path) -> None:
    posted = EpisodeScore(0.75, {})
    outcome = play(tmp_path, 'echo 0 > "$RLCORE_SCORE"', posted=lambda: posted)
    assert outcome.result == (0.75, {}, "")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ('mkfifo "$RLCORE_SCORE"', "not a regular file"),
        ('mkdir "$RLCORE_SCORE"', "not a regular file"),
        ('echo 1 > x; ln -s "$PWD/x" "$RLCORE_SCORE"', "symbolic links"),
        ('head -c 70000 /dev/zero > "$RLCORE_SCORE"', "larger than 65536 bytes"),
        ('echo well > "$RLCORE_SCORE"', "is not a number"),
    ],
)
def test_a_score_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, command: str, why: str
) -> None:
    outcome = play(tmp_path, command)
    assert outcome.score is None and why in outcome.error
    assert outcome.error.startswith("the harness's score: ")


def test_a_harness_plays_through_the_endpoint_and_posts_its_score(tmp_path: Path) -> None:
    program = """
import json, os, urllib.request
def post(url, body):
    head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head))
task = json.load(open(os.environ["RLCORE_TASK"]))
chat = {"messages": [{"role": "user", "content": task["prompt"]}]}
reply = json.load(post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", chat))
right = reply["choices"][0]["message"]["content"] == task["answer"]
post(os.environ["RLCORE_SCORE_URL"], {"score": float(right)})
"""
    with serve() as served:
        episode = Played(ChatAnswer(content="hello"))
        run = HarnessRun(
            Harness(command=(PYTHON, "-c", program)),
            "t1.0",
            TASK,
            root_url=served.server.root_url,
            key=served.endpoint.open("t1.0", episode.complete),
            sink=lambda data: None,
            posted=lambda: served.endpoint.score("t1.0"),
            parent_folder=tmp_path,
        )
        assert run.run() == (1.0, {}, "")
        assert episode.turns[0].messages[0]["content"] == TASK["prompt"]


# ---- functions


def plays(task: dict[str, Any]) -> dict[str, Any]:
    print("key", os.environ["OPENAI_API_KEY"], "in", os.listdir())
    return {"score": task["level"], "numbers": {"steps": 1}}


async def plays_later(task: dict[str, Any]) -> float:
    return 0.5


def plays_without_score(task: dict[str, Any]) -> None:
    assert not os.path.exists(os.environ["RLCORE_SCORE"])


def fails(task: dict[str, Any]) -> None:
    raise ZeroDivisionError("on purpose")


def waits(task: dict[str, Any]) -> None:
    print("ready")
    time.sleep(1000)


def returns_a_set(task: dict[str, Any]) -> set[object]:
    return {object()}


def test_a_function_takes_the_task_and_returns_the_score(tmp_path: Path) -> None:
    outcome = play(tmp_path, function=f"{__name__}.plays")
    assert outcome.result == (3.0, {"steps": 1.0}, "")
    assert outcome.printed.strip() == "key secret-key in []"
    assert play(tmp_path, function=f"{__name__}.plays_later").score == 0.5
    assert play(tmp_path, function=f"{__name__}.plays_without_score").result == (None, {}, "")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fails", "ZeroDivisionError: on purpose"),
        ("returns_a_set", "Encoding objects of type"),
        ("missing", "has no missing"),
    ],
)
def test_a_function_that_fails_is_an_error_with_its_last_lines(
    tmp_path: Path, name: str, why: str
) -> None:
    outcome = play(tmp_path, function=f"{__name__}.{name}")
    assert outcome.score is None and "exit code 1" in outcome.error and why in outcome.error


@pytest.mark.parametrize(
    "fields", [{}, {"command": "a", "function": "b"}, {"function": "a", "image": "b"}]
)
def test_a_harness_is_a_command_or_a_function(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="command"):
        Harness(**fields)


# ---- ends


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("echo before; exit 3", "exit code 3; it printed:\n    before"),
        ("kill -9 $$", "signal SIGKILL; it printed: nothing"),
        (("not-a-program-of-ours",), "exit code 127; it printed:\n    not-a-program-of-ours: No"),
        (("/etc/passwd",), "exit code 127; it printed:\n    /etc/passwd: Permission denied"),
    ],
)
def test_a_harness_that_fails_without_a_score_is_an_error(
    tmp_path: Path, command: Any, why: str
) -> None:
    outcome = play(tmp_path, command)
    assert outcome.score is None and outcome.error.startswith(f"the harness ended: {why}")


def test_a_harness_that_never_ends_is_ended_at_its_deadline(tmp_path: Path, clock: Clock) -> None:
    command = "trap '' TERM; echo $$; echo ready; while :; do sleep 0.05; done"
    outcome = play(tmp_path, command, timeout_s=900.0, grace_s=0.1, heard=clock.heard)
    assert outcome.result == (None, {}, "the harness did not end within 900 s")
    assert not is_running(int(outcome.printed.split()[0]))


def test_a_harness_has_its_grace_to_end_itself(tmp_path: Path, clock: Clock) -> None:
    trap = """trap 'echo 0.5 > "$RLCORE_SCORE"; exit' TERM; echo ready"""
    command = f"{trap}; while :; do sleep 0.05; done"
    outcome = play(tmp_path, command, grace_s=1000.0, heard=clock.heard)
    assert outcome.result == (0.5, {}, "")
    outcome = play(tmp_path, function=f"{__name__}.waits", grace_s=1000.0, heard=clock.heard)
    assert "did not end within" in outcome.error


def test_processes_of_a_harness_end_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = f"setsid sleep 1000 & echo $! >> {pids}; (sleep 1000 & echo $! >> {pids}); exit 0"
    assert play(tmp_path, command).result == (None, {}, "")
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 2 and not any(map(is_running, found))


def test_a_thousand_forks_end_with_their_harness(tmp_path: Path) -> None:
    stranger = psutil.Popen(["sleep", "1000"])
    try:
        command = "for i in $(seq 1000); do sleep 1000 & done; echo started; exit 1"
        outcome = play(tmp_path, command, timeout_s=WAIT_S)
        assert "exit code 1" in outcome.error and "started" in outcome.printed
        left = [
            p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1000"]
        ]
        assert [p.pid for p in left if is_running(p.pid)] == [stranger.pid]
    finally:
        stranger.kill()
        stranger.wait()


def test_a_cancelled_harness_ends(tmp_path: Path) -> None:
    started = tmp_path / "started"
    run = HarnessRun(
        Harness(command=f'echo 1 > "$RLCORE_SCORE"; echo $$ > {started}; exec sleep 1000'),
        "t1.0",
        TASK,
        root_url="",
        key="",
        sink=lambda data: None,
        parent_folder=tmp_path,
    )
    results: list[HarnessResult] = []
    thread = threading.Thread(target=lambda: results.append(run.run()))
    thread.start()
    wait_until(lambda: started.exists() and started.read_text().strip() != "")
    run.cancel()
    run.cancel()
    thread.join(WAIT_S)
    assert results == [(None, {}, "the harness was cancelled")]
    assert not is_running(int(started.read_text()))
    run.cancel()  # after the end: without effect


def test_a_harness_that_is_cancelled_before_its_start_never_runs(tmp_path: Path) -> None:
    run = HarnessRun(
        Harness(command=f"touch {tmp_path}/ran"), "t1.0", TASK,
        root_url="", key="", sink=lambda data: None, parent_folder=tmp_path,
    )  # fmt: skip
    run.cancel()
    assert run.run() == (None, {}, "the harness was cancelled")
    assert not list(tmp_path.iterdir())


def test_a_harness_that_cannot_run_is_an_error(tmp_path: Path) -> None:
    outcome = HarnessRun(
        Harness(command="true"), "t1.0", TASK,
        root_url="", key="", sink=lambda data: None, parent_folder=tmp_path / "missing",
    ).run()  # fmt: skip
    assert outcome.score is None
    assert outcome.error.startswith("the harness cannot run: FileNotFoundError")


def test_descriptors_are_closed(tmp_path: Path) -> None:
    play(tmp_path, "true")  # the first starts what later ones share
    before = len(os.listdir("/proc/self/fd"))
    play(tmp_path, "exit 1")
    play(tmp_path, "sleep 1000", timeout_s=0.1, grace_s=0.1)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- output and files


def test_a_flood_of_output_fills_no_log_and_holds_up_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "log" / "harness0.log"
    log = HarnessLog(file)
    outcome = play(tmp_path, 'head -c 6000000 /dev/zero; echo 1 > "$RLCORE_SCORE"')
    assert outcome.score == 1.0 and len(outcome.printed) >= 6_000_000
    for id in ("t1.0", "t1.1", "t1.1"):
        log.sink(id)(b"word\n")
    log.sink("t1.0")(b"x" * (5 << 20))
    written = file.read_bytes()
    assert len(written) < (4 << 20) + 100
    head = b"\n--- t1.0\nword\n\n--- t1.1\nword\nword\n\n--- t1.0\nxx"
    assert written.startswith(head)


def test_an_endless_flood_ends_at_the_deadline(tmp_path: Path) -> None:
    begin = time.process_time()
    outcome = play(tmp_path, "yes", timeout_s=1.0, grace_s=0.1)
    assert outcome.error == "the harness did not end within 1 s"
    # Above 4 MiB each 64 KiB are followed by a pause, whatever the machine's speed.
    assert len(outcome.printed) < (4 << 20) + 60 * (1 << 18), time.process_time() - begin


@pytest.mark.parametrize(
    "command",
    [
        f'{PYTHON} -c \'import os; [os.mkdir("d") or os.chdir("d") for _ in range(1100)]\'',
        "mkdir d; touch d/f; chmod 000 d; chmod 500 .",
        "cd ..; rm -rf work tmp task.json; ln -s / work",
    ],
)
def test_any_folder_is_removed(tmp_path: Path, command: str) -> None:
    assert play(tmp_path, command).error == ""


def test_a_container_runs_the_command_and_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for docker; rlcore has not run a harness in a real container."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    stub = programs / "docker"
    stub.write_text(f"""#!/bin/sh
echo "$@" >> {calls}
if [ "$1" = run ]; then
  while [ "$1" != image:1 ]; do shift; done
  shift
  exec "$@"
fi
""")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    command = 'echo 1 > "$RLCORE_SCORE"; echo "$OPENAI_API_KEY"'
    outcome = play(tmp_path, command, image="image:1", docker_args=("--memory=1g",))
    assert outcome.score == 1.0 and outcome.printed.strip() == "secret-key"
    ran, removed = calls.read_text().splitlines()
    words = ran.split()
    name = words[words.index("--name") + 1]
    assert removed == f"rm --force {name}"
    assert {"--network=host", "--rm", "--memory=1g"} <= set(words)
    assert "--env OPENAI_API_KEY" in ran and "secret-key" not in ran


def test_a_container_without_docker_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="docker is not on PATH"):
        play(tmp_path, "true", image="image:1")
