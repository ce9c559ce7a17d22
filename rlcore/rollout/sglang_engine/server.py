"""SGLang's processes and its event loop: how they are started, called and watched.

`sglang.Engine` is driven by asyncio, so it lives in a thread of its own here; everything else hands
it coroutines and waits for them with a deadline. Its schedulers are processes; when one of them
dies, `check` says so.

Each server has a folder for SGLang's sockets and holds a lock on a file in it, so that whoever
starts next can tell the folders of the dead, also where process numbers say nothing.
"""

import asyncio
import concurrent.futures
import fcntl
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

from rlcore.rollout.gone import EngineGoneError
from rlcore.rollout.sglang_engine import cuda, names
from rlcore.utils.errors import ConfigError

T = TypeVar("T")

_FOLDER = "rlcore-sglang-"
_OWNER = "owner"  # the locked file
_LOADS = Path("/dev/shm")  # noqa: S108 - where SGLang has them
_MOST_PATH = 107  # bytes of a socket's path
_WATCH_S = 0.2  # between two looks at the processes
_ANSWER_S = 0.001
_START_S = 3600.0  # whoever starts us gives up earlier
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
        self.cache_tokens = 0
        """Of the KV cache; known where the manager is."""
        self._engine: Any = None
        self._processes: list[Any] = []
        self._folder, self._lock = make_folder(config)
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
        try:
            self._wait(ready, "start", _START_S)
            self._processes = multiprocessing.active_children()
        except BaseException:
            self._processes = multiprocessing.active_children()
            self.close()
            raise

    def call(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Run a coroutine on SGLang's loop. TimeoutError at the deadline, EngineGoneError when a
        process of SGLang has died."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return self._wait(future, what, self._deadline_s)
        except EngineGoneError:
            raise
        except Exception:
            future.cancel()
            self.check(now=True)  # an error may be the first sign of a death
            raise

    def soon(self, function: Callable[[], None]) -> None:
        """Run a function on the loop, without waiting."""
        self.loop.call_soon_threadsafe(function)

    @property
    def folder(self) -> str:
        """Files of this engine; the schedulers know it as the model's path."""
        return self._folder

    async def everywhere(self, method: str, **parameters: Any) -> None:
        """On the loop: call a method of every rank's scheduler, with plain values. RuntimeError
        with what went wrong on the first rank."""
        from sglang.srt.managers.io_struct import RpcReqInput, sock_recv, sock_send

        socket = self._engine.send_to_rpc
        while socket.poll(0):  # the answer to a call that was given up
            sock_recv(socket)
        sock_send(socket, RpcReqInput(method=method, parameters=parameters))
        while not socket.poll(0):  # SGLang's own call would hold up the loop
            await asyncio.sleep(_ANSWER_S)
        answer = sock_recv(socket)
        if not answer.success:
            raise RuntimeError(f"SGLang's scheduler, {method}: {answer.message}")

    def fail(self, reason: str) -> None:
        """What went wrong on the loop: the next `check` raises it."""
        self._failed = self._failed or reason

    def check(self, now: bool = False) -> None:
        """EngineGoneError when SGLang has failed or one of its processes is gone; looks at them
        now and then, or `now`."""
        if self._failed:
            raise EngineGoneError(self._failed)
        if not now and time.monotonic() - self._watched < _WATCH_S:
            return
        self._watched = time.monotonic()
        for process in self._processes:
            if not process.is_alive():
                code = process.exitcode or 0
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                self.fail(f"process {process.pid} of SGLang {how}")
                raise EngineGoneError(self._failed)

    def close(self) -> None:
        """End the processes and remove the files."""
        if self._closed:
            return
        self._closed = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(1.0)
        _remove(Path(self._folder))
        os.close(self._lock)

    def _wait(self, future: "concurrent.futures.Future[T]", what: str, deadline_s: float) -> T:
        end = time.monotonic() + deadline_s
        while True:
            try:
                return future.result(_WATCH_S)
            except concurrent.futures.TimeoutError:
                if future.done():  # it has timed out itself, or has ended just now
                    return future.result()
            self.check()
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: SGLang has not answered for {deadline_s:g} s")

    def _run(self, arguments: dict[str, Any], ready: "concurrent.futures.Future[None]") -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from sglang.srt.entrypoints import engine

            _name_loads(self._folder)

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
                (info, *_) = self._engine._scheduler_init_result.scheduler_infos
                self.cache_tokens = info["max_total_num_tokens"]
                self.manager._subprocess_watchdog.stop()  # it would end this process unheard
            _unlink_loads(Path(self._folder))  # nobody reads them
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


def set_environment(device: str, ranks: int, drafts: Mapping[str, Any] | None = None) -> None:
    """Of this process and those that SGLang starts from it. Call it before importing sglang.
    `drafts` is what `worker.Worker` reads; without it there are none. ConfigError where CUDA lacks
    what they need."""
    if not metadata.entry_points(group="sglang.srt.plugins", name="rlcore"):
        raise ConfigError(
            "SGLang does not find rlcore's plug-in: rlcore was installed before it had one, or not "
            "at all; run bash tools/setup.sh --sglang"
        )
    env = os.environ
    env[names.OWNER] = str(os.getpid())
    env.pop(names.DRAFTS, None)
    if drafts is not None:
        env[names.DRAFTS] = json.dumps(drafts)
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
    else:
        import torch

        cuda.prepare(env, torch.version.cuda or "")


def make_folder(config: Mapping[str, Any]) -> tuple[str, int]:
    """A folder for the model's config.json and SGLang's sockets, and the descriptor that keeps it
    from being removed as one of a dead engine, which those are that are found here. ConfigError
    where the sockets' paths would be too long."""
    base = Path(tempfile.gettempdir())
    room = _MOST_PATH - len(f"/{_FOLDER}01234567/tmp01234567")
    if len(os.fsencode(base)) > room:
        raise ConfigError(
            f"TMPDIR {base}: SGLang's sockets need one of at most {room} bytes; set a shorter one"
        )
    sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=f"new-{_FOLDER}"))
    lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, f"{os.getpid()}\n".encode())
    config = {**config, "eos_token_id": None}  # requests say themselves where they stop
    (folder / "config.json").write_text(json.dumps(config))
    # Only now can it be found: one without a lock would be taken for one of the dead.
    folder = folder.rename(folder.with_name(folder.name.removeprefix("new-")))
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    return str(folder), lock


def sweep(base: Path) -> None:
    """Remove what engines that were killed have left in `base`, and their shared memory."""
    for old in base.glob(f"{_FOLDER}*"):
        try:
            lock = os.open(old / _OWNER, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it is being removed, or is another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(old)
        except BlockingIOError:
            continue  # it lives
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    _unlink_loads(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _unlink_loads(folder: Path) -> None:
    """SGLang's load statistics: shared memory that would outlive a killed engine."""
    for file in _LOADS.glob(f"sglang_loads_{folder.name}_*"):
        file.unlink(missing_ok=True)


def _name_loads(folder: str) -> None:
    """Let SGLang name its shared memory after the folder: by the name alone nobody could tell whose
    it is."""
    from sglang.srt import server_args

    make = server_args.PortArgs.init_new

    def named(*args: Any, **kwargs: Any) -> Any:
        ports = make(*args, **kwargs)
        ports.instance_id = Path(folder).name
        return ports

    server_args.PortArgs.init_new = staticmethod(named)
