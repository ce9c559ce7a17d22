"""SGLang's processes and its event loop: how they are started, called and watched.

`sglang.Engine` is driven by asyncio, so it lives in a thread of its own here; everything else hands
it coroutines and waits for them with a deadline. Its schedulers are processes; when one of them
dies, `check` says so.
"""

import asyncio
import concurrent.futures
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from rlcore.rollout.sglang_engine import plugin

T = TypeVar("T")

_FOLDER = "rlcore-sglang-"
_WATCH_S = 0.2  # between two looks at the processes
_HERE = Path(__file__).parent


class Server:
    """One `sglang.Engine` and its processes. `manager` takes requests and control messages; it is
    None where another rank of the engine does that."""

    def __init__(self, arguments: Mapping[str, Any], config: Mapping[str, Any], deadline_s: float):
        self._deadline_s = deadline_s
        self._failed = ""
        self._closed = False
        self._watched = 0.0
        self.manager: Any = None
        self._engine: Any = None
        self._folder = _make_folder(config)
        self._watch_signal()
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.loop: asyncio.AbstractEventLoop
        thread = threading.Thread(
            target=self._run,
            args=({"model_path": self._folder, **arguments}, ready),
            name="sglang",
            daemon=True,
        )
        thread.start()
        self._wait(ready, "start", deadline_s)
        self._processes = multiprocessing.active_children()

    def call(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Run a coroutine on SGLang's loop. TimeoutError at the deadline, RuntimeError when a
        process of SGLang has died."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return self._wait(future, what, self._deadline_s)
        except TimeoutError:
            future.cancel()
            raise

    def soon(self, function: Callable[[], None]) -> None:
        """Run a function on the loop, without waiting."""
        self.loop.call_soon_threadsafe(function)

    def fail(self, reason: str) -> None:
        """What went wrong on the loop: the next `check` raises it."""
        self._failed = self._failed or reason

    def check(self) -> None:
        """RuntimeError when SGLang has failed or one of its processes is gone."""
        if self._failed:
            raise RuntimeError(self._failed)
        if time.monotonic() - self._watched < _WATCH_S:
            return
        self._watched = time.monotonic()
        for process in self._processes:
            if not process.is_alive():
                code = process.exitcode or 0
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                self.fail(f"process {process.pid} of SGLang {how}")
                raise RuntimeError(self._failed)

    def close(self) -> None:
        """End the processes and remove the files."""
        if self._closed:
            return
        self._closed = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(5.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, future: "concurrent.futures.Future[T]", what: str, deadline_s: float) -> T:
        end = time.monotonic() + deadline_s
        while True:
            try:
                return future.result(_WATCH_S)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
            if what != "start":
                self.check()
            elif self._failed:
                raise RuntimeError(self._failed)
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: SGLang has not answered for {deadline_s:g} s")

    def _run(self, arguments: dict[str, Any], ready: "concurrent.futures.Future[None]") -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from sglang.srt.entrypoints import engine

            class Engine(engine.Engine):
                """Without the process that turns tokens into text."""

                @classmethod
                def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list, list]:
                    return [], []

            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
            self._engine = Engine(**arguments)
            self.manager = self._engine.tokenizer_manager
            if self.manager is not None:
                self.manager._subprocess_watchdog.stop()  # it would end this process unheard
            _unlink_loads(self._engine.port_args)
        except BaseException as error:
            ready.set_exception(RuntimeError(f"SGLang did not start: {error}"))
            return
        ready.set_result(None)
        self.loop.run_forever()

    def _watch_signal(self) -> None:
        """A scheduler that raises sends SIGQUIT to its parent."""

        def quit_handler(number: int, frame: Any) -> None:
            self.fail("a scheduler of SGLang failed; its trace is in the log")

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, quit_handler)


def set_environment(device: str, ranks: int) -> None:
    """Of this process and those that SGLang starts from it. Call it before importing sglang."""
    if not metadata.entry_points(group="sglang.srt.plugins", name="rlcore"):
        raise RuntimeError(
            "SGLang does not find rlcore's plug-in: rlcore was installed before it had one, or not "
            "at all; run bash tools/setup.sh --sglang"
        )
    env = os.environ
    env[plugin.OWNER] = str(os.getpid())
    env["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "rlcore.rollout.sglang_engine.models"
    env["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # ours has room for its own checks
    if env.get("SGLANG_PLUGINS"):
        env["SGLANG_PLUGINS"] += ",rlcore"
    env.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
    if device == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * ranks)  # it binds only with AMX
        folder = str(_HERE / "cpu")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, env.get("PYTHONPATH", ""))))
        if folder not in sys.path:
            sys.path.insert(0, folder)


def _make_folder(config: Mapping[str, Any]) -> str:
    """A folder for the model's config.json and SGLang's sockets. Those of engines that were killed
    are removed."""
    base = Path(tempfile.gettempdir())
    for old in base.glob(f"{_FOLDER}*"):
        pid = old.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(old, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-")
    config = {**config, "eos_token_id": None}  # requests say themselves where they stop
    (Path(folder) / "config.json").write_text(json.dumps(config))
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    return folder


def _unlink_loads(ports: Any) -> None:
    """SGLang's load statistics, which nobody reads: their file would outlive a killed engine."""
    from sglang.srt.managers.load_snapshot import shm_path_for

    Path(shm_path_for(ports.instance_id)).unlink(missing_ok=True)
