"""Processes that begin with torch, Megatron and rlcore imported: forks of a server that each worker
of pytest keeps. To import them takes six seconds of a core, and the suite starts some hundred.
"""

import atexit
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Fork:
    """`target(*args)` in a process of its own, with the methods of `subprocess.Popen`.

    Args:
        target: a function of a module.
        env: all variables of the environment.
        output: takes what the process writes on stdout and stderr, after what is in it already.
    """

    def __init__(
        self,
        target: Callable[..., None],
        args: tuple[Any, ...],
        env: Mapping[str, str],
        output: Path,
    ):
        self._process: BaseProcess = _context().Process(
            target=_child, args=(target, args, dict(env), str(output))
        )
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Negative: the signal that ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _child(
    target: Callable[..., None], args: tuple[Any, ...], env: dict[str, str], output: str
) -> None:
    assert "tests.preload" in sys.modules  # the server passes over what cannot be imported
    # The server that made this process makes those that it starts, too.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    try:
        target(*args)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
        sys.stdout.flush()
        sys.stderr.flush()


@contextmanager
def forked_engines() -> Iterator[None]:
    """Make engine children of this process forks, which start at once, and not programs of their
    own; SGLang's are more than a process. Their command line is that of a fork."""
    from rlcore.rollout import child
    from rlcore.utils.children import Child

    class ForkedChild(Child):
        _popen = staticmethod(_fork_engine)

    start = child.ChildEngine._start

    def start_fork(self: child.ChildEngine) -> None:
        child.Child = Child if "sglang" in self._factory else ForkedChild  # type: ignore[misc]
        try:
            start(self)
        finally:
            child.Child = Child  # type: ignore[misc]

    child.ChildEngine._start = start_fork  # type: ignore[method-assign]
    try:
        yield
    finally:
        child.ChildEngine._start = start  # type: ignore[method-assign]


def _fork_engine(
    command: list[str], *, pass_fds: tuple[int, ...], env: dict[str, str], **_: Any
) -> Fork:
    output = os.readlink("/proc/self/fd/1")  # a file in ranks, a pipe under pytest
    with socket.socket(fileno=os.dup(pass_fds[0])) as end:
        return Fork(_engine, (end,), env, Path(output if os.path.isfile(output) else os.devnull))


def _engine(end: socket.socket) -> None:
    from rlcore.rollout import process

    sys.argv = ["rlcore.rollout.process", str(end.detach()), str(os.getppid())]
    process.main()


@cache
def _context() -> ForkServerContext:
    """The server sees no GPU, has one thread, and finds this checkout first."""
    context = multiprocessing.get_context("forkserver")
    if "tests.preload" in sys.modules:  # a fork itself
        return context
    context.set_forkserver_preload(["tests.preload"])
    from tests import kit

    changed = {"PYTHONPATH": kit.python_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with _environment(changed):
        context.Process(target=time.monotonic).start()  # starts the server
    return context


@contextmanager
def _environment(changed: Mapping[str, str]) -> Any:
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
