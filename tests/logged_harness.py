"""A harness for tests of `--env endpoint` that logs the processes it starts and how they end.

The task has the fields `log` (a file), `wanted` (responses of a group that come in time; further
ones are late) and `late` (whether all responses to the prompt are late). Only the standard library
is imported, since many of these start.
"""

import http.client
import json
import os
import signal
import subprocess
import time
from typing import Any
from urllib.parse import urlsplit


def note(task: dict[str, Any], what: str, pid: int) -> None:
    """Append a line: what, episode, process, time."""
    line = f"{what} {os.environ['RLCORE_EPISODE']} {pid} {time.monotonic()}\n"
    file = os.open(task["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


def ask(messages: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    """The message that the policy answers with."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.netloc, timeout=120)
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": max_tokens})
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    connection.request("POST", url.path + "/chat/completions", body, headers)
    answer = connection.getresponse()
    data = answer.read()
    assert answer.status == 200, data
    return json.loads(data)["choices"][0]["message"]


def play(task: dict[str, Any]) -> float:
    """Two turns of a conversation and one of a sub-agent. A late response waits after its first
    turn beside a process of its own: those with an odd number do nothing, others ask for a long
    turn."""
    note(task, "start", os.getpid())

    def end(*_: Any) -> None:
        note(task, "ended", os.getpid())
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    response = int(os.environ["RLCORE_EPISODE"].partition(".again")[0].rpartition(".")[2])
    asked = [{"role": "user", "content": task["prompt"]}]
    first = ask(asked, 4)
    if task.get("late") or response >= task["wanted"]:
        helper = subprocess.Popen(["sleep", "600"])
        note(task, "helper", helper.pid)
        if response % 2:
            time.sleep(600)
        ask(asked, 300)
    second = ask([*asked, first, {"role": "user", "content": "Again."}], 4)
    third = ask([{"role": "user", "content": "What else?"}], 2)
    note(task, "done", os.getpid())
    return float(sum(len(m["content"]) for m in (first, second, third)) % 5)


def read(file: str | os.PathLike[str]) -> list[tuple[str, str, int, float]]:
    """The lines of a log so far."""
    lines = open(file).read().splitlines() if os.path.exists(file) else []  # noqa: SIM115
    words = [line.split() for line in lines]
    return [(what, episode, int(pid), float(at)) for what, episode, pid, at in words]


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that ended and waits for its parent is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
