"""Harnesses: programs that play an episode through the endpoint and end with a score.

A harness is a command, a shell command, a Python function, or a command in a container. It runs in
a process of its own (`harness_child.py`) with these variables, in an empty folder that is removed
after it:

    OPENAI_BASE_URL, OPENAI_API_KEY   the endpoint, and the key of the episode; ANTHROPIC_* too
    RLCORE_EPISODE                    id of the episode
    RLCORE_TASK                       file with the task, JSON
    RLCORE_SCORE                      file that takes the score
    RLCORE_SCORE_URL                  address that takes the score by POST instead

A score is a number, or `{"score": number, "numbers": {name: number}}`. A score that was given
counts, however the harness ended. Without one, an exit code other than 0, a signal or the deadline
is an error. After every end, all processes that the harness started are killed.
"""

import contextlib
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from rlcore.envs.harness_child import SCORE, TASK, HarnessStart
from rlcore.envs.kind import checked
from rlcore.records import RequestId
from rlcore.sandbox.isolation import remove_folder
from rlcore.utils.children import (
    CappedLog,
    GuardedChild,
    exit_text,
    last_lines,
    sentence,
    without_launcher,
)
from rlcore.utils.log import log
from rlcore.utils.net import frame

_SCORE_BYTES = 1 << 16
_FLOOD_BYTES, _FLOOD_PAUSE_S = 4 << 20, 0.02
"""After so many bytes of output, each further read is followed by a pause."""
_DOCKER_S = 60.0
_PLACE = "{task}"
_CANCELLED = "the harness was cancelled"
_End = Literal["exit", "deadline", "cancel"]


class EpisodeScore(NamedTuple):
    """Score of an episode, with numbers that become metrics."""

    score: float
    numbers: dict[str, float]


def parse_score(data: bytes) -> EpisodeScore:
    """Read a score: a number, or an object with `score` and perhaps `numbers`. Raises ValueError or
    TypeError if it is neither."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        try:
            value = float(data)
        except ValueError:
            raise ValueError(
                f"the score {data[:40]!r} is not a number, nor JSON with a score"
            ) from None
    numbers: Any = {}
    if isinstance(value, dict):
        if "score" not in value:
            raise ValueError("the JSON of the score has no key score")
        value, numbers = value["score"], value.get("numbers", {})
    _, score, found = checked("", value, numbers)
    return EpisodeScore(score, found)


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Program that plays episodes, and its limits."""

    command: str | tuple[str, ...] = ""
    """Words of a command, or text for a shell. `{task}` is the path of the task file; in the text
    it becomes a quoted variable, so nothing of a task is read as shell."""
    function: str = ""
    """Dotted path of a Python function, instead of a command. It takes the task as a dict and may
    return the score."""
    image: str = ""
    """Image of a container that runs the command; needs docker. The container uses the network of
    this machine, so that it reaches the loopback address."""
    docker_args: tuple[str, ...] = ("--memory=4g", "--pids-limit=512")
    """Further arguments of `docker run`."""
    timeout_s: float = 1800.0
    """Seconds after which the harness is ended."""
    grace_s: float = 5.0
    """Seconds between SIGTERM and SIGKILL at the deadline or a cancellation."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.function):
            raise ValueError("harness: give a command or a function, one of them")
        if self.image and self.function:
            raise ValueError(f"harness {self.function}: a container runs a command, no function")

    def words(self, task: Path) -> tuple[str, ...]:
        """Return the words of the command; empty if the harness is a function."""
        if not self.command:
            return ()
        if isinstance(self.command, str):
            return "bash", "-c", self.command.replace(_PLACE, f'"${TASK}"')
        return tuple(word.replace(_PLACE, str(task)) for word in self.command)


class HarnessResult(NamedTuple):
    """End of a harness."""

    score: float | None
    """None: the harness gave no score."""
    numbers: dict[str, float]
    error: str
    """Reason why the episode has failed; empty if it has not."""


class HarnessLog:
    """Output of all harnesses of a rank, at most 4 MiB. Any thread may write."""

    def __init__(self, file: Path | None) -> None:
        self._log, self._lock, self._last = CappedLog(file, "harness"), threading.Lock(), ""

    def sink(self, id: RequestId) -> Callable[[bytes], None]:
        """Return the function that writes output of one episode."""

        def write(data: bytes) -> None:
            with self._lock:
                head = b"" if self._last == id else f"\n--- {id}\n".encode()
                self._last = id
                self._log.write(head + data)

        return write


class _Selector(selectors.DefaultSelector):
    """Selector that may be told twice to forget an object."""

    def unregister(self, fileobj: Any) -> Any:
        with contextlib.suppress(KeyError):
            return super().unregister(fileobj)


class HarnessRun:
    """One episode's harness. `run` blocks a thread of the caller; any thread may `cancel`."""

    def __init__(
        self,
        harness: Harness,
        id: RequestId,
        task: Mapping[str, Any],
        *,
        root_url: str,
        key: str,
        sink: Callable[[bytes], None],
        posted: Callable[[], EpisodeScore | None] = lambda: None,
        parent_folder: Path | None = None,
    ) -> None:
        """Prepare the harness of the episode `id`.

        Args:
            root_url: address of the endpoint (`EndpointServer.root_url`).
            sink: function called with the harness's output.
            posted: returns the score that the harness posted (`Endpoint.score`).
            parent_folder: folder of the harness's folder; None: that of temporary files.
        """
        self._harness, self._id, self._task = harness, id, task
        self._root_url, self._key = root_url, key
        self._sink, self._posted, self._parent = sink, posted, parent_folder
        self._printed = 0
        self._lock = threading.Lock()
        self._wake, self._wake_end = -1, -1
        """Pipe that `cancel` writes to while the harness runs."""
        self._is_cancelled = False

    def cancel(self) -> None:
        """End the harness, with its grace. Idempotent; without effect after the end."""
        with self._lock:
            if not self._is_cancelled and self._wake_end >= 0:
                os.write(self._wake_end, b"x")
            self._is_cancelled = True

    def run(self) -> HarnessResult:
        """Run the harness to its end and return its result. Call once."""
        with self._lock:
            if self._is_cancelled:
                return HarnessResult(None, {}, _CANCELLED)
            self._wake, self._wake_end = os.pipe()
        folder = ""
        try:
            folder = tempfile.mkdtemp(prefix="rlcore-harness-", dir=self._parent)
            reason = self._play(Path(folder))
            return self._result(Path(folder) / "score", reason)
        except OSError as error:  # the machine has no room for a process or a file
            return HarnessResult(None, {}, f"the harness cannot run: {sentence(error)}")
        finally:
            with self._lock:
                os.close(self._wake)
                os.close(self._wake_end)
                self._wake_end = -1
            self._remove(folder)

    def _play(self, folder: Path) -> str:
        """Start the harness and wait for its end. Returns the reason if it failed, else ""."""
        for name in ("work", "tmp"):
            (folder / name).mkdir()
        (folder / "task.json").write_bytes(msgspec.json.encode(self._task))
        words, container = self._harness.words(folder / "task.json"), ""
        if self._harness.image:
            container = f"rlcore-{folder.name.rpartition('-')[2]}"
            words = _container(self._harness, words, folder, container, self._variables(folder))
        start = HarnessStart(
            words=words,
            function=self._harness.function,
            env=_environment() | self._variables(folder),
            folder=str(folder / "work"),
            sys_path=tuple(os.path.abspath(p) for p in sys.path),
        )
        ended: _End = "deadline"
        with _Selector() as selector:
            child = GuardedChild(selector, frame(start), self._take, "rlcore.envs.harness_child")
            try:
                ended = self._wait(child, selector)
            finally:
                status = child.end(exiting=ended == "exit")
                if container:
                    _remove_container(container)
        if ended == "cancel":
            return _CANCELLED
        if ended == "deadline":
            return f"the harness did not end within {self._harness.timeout_s:g} s"
        if not status:
            return ""
        return f"the harness ended: {exit_text(status)}; it printed:{last_lines(child.printed())}"

    def _variables(self, folder: Path) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": f"{self._root_url}/v1",
            "OPENAI_API_KEY": self._key,
            "ANTHROPIC_BASE_URL": self._root_url,
            "ANTHROPIC_API_KEY": self._key,
            "RLCORE_EPISODE": self._id,
            "RLCORE_SCORE_URL": f"{self._root_url}/v1/episodes/{self._id}/score",
            TASK: str(folder / "task.json"),
            SCORE: str(folder / "score"),
            "TMPDIR": str(folder / "tmp"),
        }

    def _wait(self, child: GuardedChild, selector: selectors.BaseSelector) -> _End:
        """Wait until the child exits, the deadline passes or `cancel` is called. In the latter
        cases, ask the child to end, and wait until it has or its grace is over."""
        exit_fd = os.pidfd_open(child.process.pid)
        try:
            selector.register(exit_fd, selectors.EVENT_READ, (child, "exit"))
            selector.register(self._wake, selectors.EVENT_READ, (child, "cancel"))
            ended = self._serve(child, selector, self._harness.timeout_s)
            if ended != "exit":
                selector.unregister(self._wake)
                # The child is not waited for yet, so its pid is that of no other process.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.process.pid, signal.SIGTERM)
                self._serve(child, selector, self._harness.grace_s)
            return ended
        finally:
            selector.unregister(exit_fd)
            os.close(exit_fd)

    def _serve(
        self, child: GuardedChild, selector: selectors.BaseSelector, timeout_s: float
    ) -> _End:
        """Read a child's output until it exits, the time is over or `cancel` is called."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            for ready, events in selector.select(left):
                what = ready.data[1]
                if what in ("exit", "cancel"):
                    return what
                if what == "output":
                    child.read_output()
                elif events & selectors.EVENT_WRITE:
                    child.flush()
                else:  # a command closes the channel at its start; a function has nothing to say
                    selector.unregister(child.channel)
            if self._printed > _FLOOD_BYTES:
                time.sleep(_FLOOD_PAUSE_S)
        return "deadline"

    def _take(self, data: bytes) -> None:
        self._printed += len(data)
        self._sink(data)

    def _remove(self, folder: str) -> None:
        try:
            if folder:
                remove_folder(folder)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("harness %s: cannot remove %s: %s", self._id, folder, error)

    def _result(self, file: Path, reason: str) -> HarnessResult:
        if self._is_cancelled:
            return HarnessResult(None, {}, reason)
        try:
            score = self._posted()
            if score is None:
                score = _read_score(file)
        except (OSError, ValueError, TypeError) as error:
            return HarnessResult(None, {}, f"the harness's score: {sentence(error)}")
        if score is None:
            return HarnessResult(None, {}, reason)
        return HarnessResult(score.score, score.numbers, "")


def _environment() -> dict[str, str]:
    """Return the rank's variables for a harness: without the launcher's, and with loopback
    addresses outside of any proxy."""
    env = without_launcher()
    for name in ("no_proxy", "NO_PROXY"):
        env[name] = ",".join(filter(None, [env.get(name, ""), "127.0.0.1", "localhost"]))
    return env


def _read_score(file: Path) -> EpisodeScore | None:
    """Return the score of the score file; None if there is none or it is empty."""
    try:
        # A harness may have put a pipe there, which would block, or a link to another file.
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("the score file is not a regular file")
        data = os.read(fd, _SCORE_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > _SCORE_BYTES:
        raise ValueError(f"the score file is larger than {_SCORE_BYTES} bytes")
    return parse_score(data) if data.strip() else None


def _container(
    harness: Harness,
    words: tuple[str, ...],
    folder: Path,
    name: str,
    variables: Mapping[str, str],
) -> tuple[str, ...]:
    """Return the command that runs `words` in a container. Values of variables are not among its
    words, which every user of the machine can read."""
    if shutil.which("docker") is None:
        raise RuntimeError("docker is not on PATH; install it, or run the harness without image")
    names = [word for variable in variables for word in ("--env", variable)]
    place = ("--volume", f"{folder}:{folder}", "--workdir", str(folder / "work"))
    run = ("docker", "run", "--rm", "--init", "--network=host", "--name", name)
    return (*run, *names, *place, *harness.docker_args, harness.image, *words)


def _remove_container(name: str) -> None:
    """Remove a container, if it still runs after its client was killed."""
    words = ["docker", "rm", "--force", name]
    try:
        subprocess.run(words, capture_output=True, timeout=_DOCKER_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("harness: cannot remove container %s: %s", name, error)
