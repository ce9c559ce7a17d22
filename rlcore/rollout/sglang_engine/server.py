"""Start, call and monitor SGLang's processes and event loop.

`sglang.Engine` uses asyncio, so it runs in its own thread. Other threads submit coroutines to this
thread and wait for the results with a deadline. SGLang's schedulers are processes; if a scheduler
exits, `check` raises an error.

Each server has a folder for SGLang's sockets and locks a file in this folder. A later server
removes folders without a lock, because their owners were killed. Unlike a process id, a lock shows
in every container whether the owner is running.
"""

import asyncio
import concurrent.futures
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from rlcore.rollout.errors import EngineFailedError
from rlcore.rollout.sglang_engine import cuda, names
from rlcore.utils.errors import ConfigError
from rlcore.utils.process_tree import StopMonitor

T = TypeVar("T")

_FOLDER = "rlcore-sglang-"
_OWNER = "owner"  # name of the file that a running server locks
_LOADS = Path("/dev/shm")  # noqa: S108 - SGLang writes its load statistics here
_MOST_PATH = 107  # longest path that Linux allows for a socket, in bytes
_WATCH_S = 0.2  # interval between checks of the processes
_ANSWER_S = 0.001
_START_S = 3600.0  # upper limit; `ChildEngine` has a shorter deadline for the start
_HERE = Path(__file__).parent


class Server:
    """One `sglang.Engine` and its processes. `manager` accepts requests and control messages; None
    on a rank that only adds schedulers to an engine led by another rank."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        config: Mapping[str, Any],
        deadline_s: float,
        shares: int = 1,
    ):
        """Start SGLang. `shares`: number of servers that each start their share of one engine's
        ranks; the argument `node_rank` is the number of this server."""
        self._deadline_s = deadline_s
        self._shares = shares
        self._failed = ""
        self._closed = False
        self._watched = 0.0
        self.manager: Any = None
        self.cache_tokens = 0
        """Size of the KV cache in tokens; 0 if `manager` is None."""
        self._engine: Any = None
        self._processes: list[Any] = []
        self._monitors: list[StopMonitor] = []
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
            self._monitors = [StopMonitor(p.pid) for p in self._processes if p.pid is not None]
        except BaseException:
            self._processes = multiprocessing.active_children()
            self.close()
            raise

    def call(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Run a coroutine on SGLang's event loop and return its result.

        Raises:
            TimeoutError: the coroutine has not ended within the deadline.
            EngineFailedError: a process of SGLang has exited.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return self._wait(future, what, self._deadline_s)
        except EngineFailedError:
            raise
        except Exception:
            future.cancel()
            self.check(now=True)  # a process that has exited may be the cause of the error
            raise

    def soon(self, function: Callable[[], None]) -> None:
        """Schedule a function on SGLang's event loop and return without waiting for it."""
        self.loop.call_soon_threadsafe(function)

    @property
    def folder(self) -> str:
        """Folder with the files of this engine. The schedulers get its path as the model path."""
        return self._folder

    async def everywhere(self, method: str, **parameters: Any) -> None:
        """Call a method of the scheduler on every rank, with plain values as arguments. Call this
        on SGLang's event loop.

        Raises:
            RuntimeError: the call failed on the first rank.
        """
        from sglang.srt.managers.io_struct import RpcReqInput, sock_recv, sock_send

        socket = self._engine.send_to_rpc
        while socket.poll(0):  # discard the answer to an earlier call that timed out
            sock_recv(socket)
        sock_send(socket, RpcReqInput(method=method, parameters=parameters))
        while not socket.poll(0):  # SGLang's own method would block the event loop
            await asyncio.sleep(_ANSWER_S)
        answer = sock_recv(socket)
        if not answer.success:
            raise RuntimeError(f"SGLang's scheduler, {method}: {answer.message}")

    def fail(self, reason: str) -> None:
        """Record a failure. The next `check` raises EngineFailedError with the first reason."""
        self._failed = self._failed or reason

    def check(self, now: bool = False) -> None:
        """Raise EngineFailedError if SGLang has failed or one of its processes has exited or stays
        stopped. Check the processes at most every `_WATCH_S` seconds; with `now`, at every call."""
        if self._failed:
            raise EngineFailedError(self._failed)
        if not now and time.monotonic() - self._watched < _WATCH_S:
            return
        self._watched = time.monotonic()
        for process in self._processes:
            if not process.is_alive():
                code = process.exitcode or 0
                how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
                self.fail(f"process {process.pid} of SGLang {how}")
                raise EngineFailedError(self._failed)
        for monitor in self._monitors:
            if monitor.is_stuck():
                self.fail(f"process {monitor.pid} of SGLang was stopped by a signal")
                raise EngineFailedError(self._failed)

    def close(self) -> None:
        """Kill SGLang's processes and remove their files."""
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
                if future.done():  # the coroutine itself raised TimeoutError, or has just ended
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
            if self._shares > 1:
                _start_share(self._shares)

            class BareEngine(engine.Engine):
                """SGLang's engine without the detokenizer process."""

                @classmethod
                def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list, list]:
                    return [], []

            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
            self._engine = BareEngine(**arguments)
            self.manager = self._engine.tokenizer_manager
            if self.manager is not None:
                (info, *_) = self._engine._scheduler_init_result.scheduler_infos
                self.cache_tokens = info["max_total_num_tokens"]
                self.manager._subprocess_watchdog.stop()  # the watchdog would kill this process
            _unlink_loads(Path(self._folder))  # no process reads the load statistics
        except BaseException as error:
            ready.set_exception(RuntimeError(f"SGLang did not start: {error}"))
            return
        ready.set_result(None)
        self.loop.run_forever()

    def _watch_signal(self) -> None:
        """Handle SIGQUIT as a failure: a failed scheduler sends this signal to its parent."""

        def quit_handler(number: int, frame: Any) -> None:
            self.fail("a scheduler of SGLang failed; its trace is in the log")

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, quit_handler)


def set_environment(
    device: str,
    ranks: int,
    store: str,
    nodes: int = 1,
    drafts: Mapping[str, Any] | None = None,
) -> None:
    """Set the environment of this process, which SGLang's processes inherit. Call this before
    importing sglang.

    Args:
        device: "cpu" or "cuda".
        ranks: number of tensor-parallel ranks of the engine.
        store: address host:port of the store at which the ranks meet. SGLang's own rendezvous would
            listen on a port that another process may have taken meanwhile.
        nodes: number of nodes with ranks of the engine.
        drafts: draft settings, which `worker.DraftWorker` reads; None turns drafting off.

    Raises:
        ConfigError: the plug-in is not installed, or a CUDA library or compiler is missing.
    """
    if not metadata.entry_points(group="sglang.srt.plugins", name="rlcore"):
        raise ConfigError(
            "SGLang does not find rlcore's plug-in; install rlcore again with bash "
            "tools/setup.sh --sglang"
        )
    env = os.environ
    env[names.OWNER] = str(os.getpid())
    env.pop(names.DRAFTS, None)
    if drafts is not None:
        env[names.DRAFTS] = json.dumps(drafts)
    env["MASTER_ADDR"], _, env["MASTER_PORT"] = store.rpartition(":")
    env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = "env://"
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # all ranks are clients of the store
    env["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "rlcore.rollout.sglang_engine.models"
    env["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    if nodes > 1:  # else ranks would unpickle what any host sends to a port
        env["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for extra context tokens
    if env.get("SGLANG_PLUGINS"):
        env["SGLANG_PLUGINS"] += ",rlcore"
    env.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
    # By default torch caches compiled code in TMPDIR, which becomes a folder that `close` removes.
    cache = Path(tempfile.gettempdir()) / f"torchinductor_uid_{os.getuid()}"
    if _is_ours(cache):
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    if device == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        env["TORCH_COMPILE_DISABLE"] = "1"  # needs Triton, for routers with sigmoids
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * ranks)  # ignored on CPUs without AMX
        folder = str(_HERE / "cpu")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, env.get("PYTHONPATH", ""))))
        if folder not in sys.path:
            sys.path.insert(0, folder)
    else:
        import torch

        cuda.prepare(env, torch.version.cuda or "")


def _is_ours(folder: Path) -> bool:
    """Make `folder` for this user alone if it is missing. Return whether it is a folder that no
    other user has made, who could put code into it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    is_open = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not is_open


def make_folder(config: Mapping[str, Any]) -> tuple[str, int]:
    """Make a folder for the model's config.json and SGLang's sockets. First remove the folders of
    killed engines.

    Returns:
        The folder, and the descriptor of its lock. The lock protects the folder from `sweep`.

    Raises:
        ConfigError: the sockets' paths would be too long.
    """
    base = Path(tempfile.gettempdir())
    room = _MOST_PATH - len(f"/{_FOLDER}01234567/tmp01234567")
    if len(os.fsencode(base)) > room:
        raise ConfigError(
            f"TMPDIR {base}: must have at most {room} bytes for SGLang sockets; set a shorter path"
        )
    sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=f"new-{_FOLDER}"))
    lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, f"{os.getpid()}\n".encode())
    config = {**config, "eos_token_id": None}  # each request has its own stop tokens
    (folder / "config.json").write_text(json.dumps(config))
    # Rename last: the `sweep` of another engine would remove a folder that is not locked yet.
    folder = folder.rename(folder.with_name(folder.name.removeprefix("new-")))
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    return str(folder), lock


def sweep(base: Path) -> None:
    """Remove the folders in `base` and the shared memory of killed engines."""
    for old in base.glob(f"{_FOLDER}*"):
        try:
            lock = os.open(old / _OWNER, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # the folder is being removed, or belongs to another user
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(old)
        except BlockingIOError:
            continue  # the engine of this folder is running
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    _unlink_loads(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _unlink_loads(folder: Path) -> None:
    """Remove SGLang's load statistics: shared memory that remains after an engine is killed."""
    for file in _LOADS.glob(f"sglang_loads_{folder.name}_*"):
        file.unlink(missing_ok=True)


def _name_loads(folder: str) -> None:
    """Make SGLang name its shared memory after the folder, so that `sweep` can find the memory."""
    from sglang.srt import server_args

    make = server_args.PortArgs.init_new

    def named(*args: Any, **kwargs: Any) -> Any:
        ports = make(*args, **kwargs)
        ports.instance_id = Path(folder).name
        return ports

    server_args.PortArgs.init_new = staticmethod(named)


def _start_share(shares: int) -> None:
    """Make SGLang start one share of an engine's ranks for each server. SGLang itself would start
    one share per node, and with `nnodes` above 1 it does without what needs a node, such as fused
    all-reduces."""
    from sglang.srt.entrypoints import engine
    from sglang.srt.runtime_context import get_parallel

    def ranges(node_rank: int) -> tuple[range, range, int, int]:
        count = get_parallel().tp_size // shares
        return range(1), range(node_rank * count, (node_rank + 1) * count), 1, count

    engine._calculate_rank_ranges = ranges
