"""Processes that begin with torch, Megatron and rlcore imported: forks of a server that each worker
of pytest keeps. To import them takes six seconds of a core, and the suite starts some hundred.
"""

import atexit
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
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
        output: takes what the process writes on stdout and stderr.
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
    with open(output, "wb") as file:
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


@cache
def _context() -> ForkServerContext:
    """The server sees no GPU, has one thread, and finds this checkout first."""
    context = multiprocessing.get_context("forkserver")
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
