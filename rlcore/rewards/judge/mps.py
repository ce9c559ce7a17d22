"""CUDA MPS: one control daemon per node lets several processes compute on a GPU at once.

Without MPS, judge and engines take turns on the GPU; with MPS, their kernels run concurrently. The
first rank of a run on a node starts `mps_keeper.py`, which runs the daemon until the last rank of
the node has exited. Other ranks join. A daemon started outside of the run is used but never
stopped. The daemon must run before the first CUDA call of every participating process.

The daemon gets no CUDA_VISIBLE_DEVICES, because it would renumber the GPUs of its mask: clients
with the mask 4,5,6,7 would then find no GPU 4. Without a mask, it has all GPUs under the node's
numbers. A client therefore keeps its own mask: 4,5,6,7 for all ranks, as with torchrun, or one GPU
for each rank, as with Slurm. Apart from that, a client needs only CUDA_MPS_PIPE_DIRECTORY.

A daemon that you start yourself must have no mask either, or a mask of UUIDs; then set UUIDs in the
CUDA_VISIBLE_DEVICES of the run, too.
"""

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rlcore.config.schema import RewardConfig, RewardSum, reward_sections
from rlcore.rewards.judge import mps_keeper
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.judge.mps_keeper import CONTROL, PIPES
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import announce, log
from rlcore.utils.nvidia import gpu_files, has_gpu

LOGS = "CUDA_MPS_LOG_DIRECTORY"
PERCENT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_PING = "get_server_list"
_PING_S = 5.0
_STEP_S = 0.05
_MASK = "CUDA_VISIBLE_DEVICES"


class MPSError(RuntimeError):
    """Raised if MPS cannot be used; the message gives the reason."""


class Daemon:
    """MPS daemon of this node, started by this or another process. `environment` has the
    environment variables that clients of the daemon need."""

    def __init__(self, environment: Mapping[str, str], clients: int | None = None) -> None:
        """`clients`: descriptor with the shared lock that keeps the daemon running."""
        self.environment = dict(environment)
        self._clients = clients

    def close(self) -> None:
        """Release the daemon, which stops after its last release. A process with CUDA must not call
        this; it releases the daemon by its exit. Idempotent."""
        if self._clients is not None:
            os.close(self._clients)
            self._clients = None


def wanted(reward: RewardConfig | RewardSum) -> tuple[str, bool]:
    """Return the config key of a local judge that may use MPS ("" if none), and whether its `mps`
    is `on`. Raises ConfigError if `mps` is `on` and there is no GPU."""
    judges = [
        (key, section)
        for key, section in reward_sections(reward).items()
        if isinstance(section, JudgeRewardConfig) and not section.url and section.mps != "off"
    ]
    if not judges:
        return "", False
    key, is_asked = next(((k, True) for k, s in judges if s.mps == "on"), (judges[0][0], False))
    if is_asked and not has_gpu():
        raise ConfigError(f"--{key}.mps on: this machine has no NVIDIA GPU; set it to auto")
    return key, is_asked


def of_run(reward: RewardConfig | RewardSum) -> Daemon | None:
    """Join or start the MPS daemon of a run with a local judge. Return None if the run uses no MPS.

    Sets the daemon's environment variables for this process and its children, so call it before any
    CUDA call. The daemon stays until this process exits. Ranks share a daemon only if they may open
    the same GPUs, because Slurm can confine each rank to its own GPU.

    Raises:
        ConfigError: MPS is `on` and cannot be used.
    """
    key, is_asked = wanted(reward)
    if not key or not has_gpu():
        return None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    run = [os.environ.get(name, "") for name in names]
    if "WORLD_SIZE" not in os.environ:
        run = [str(os.getpid())]
    text = "-".join((*run, *gpu_files()))
    try:
        daemon = join(folder_of(hashlib.blake2b(text.encode(), digest_size=6).hexdigest()))
    except MPSError as error:
        if is_asked:
            raise ConfigError(f"--{key}.mps on: {error}") from error
        announce("MPS", f"none ({error}); judge and engines share the GPU by time slices")
        return None
    os.environ.update(daemon.environment)
    return daemon


def limits(percent: int, memory_gb: float, device: int = 0) -> dict[str, str]:
    """Return the environment variables that limit a client of MPS: percentage of the GPU's
    multiprocessors, and GB (10^9 bytes) of GPU memory. 0 means no limit."""
    found = {}
    if percent:
        found[PERCENT] = str(percent)
    if memory_gb:
        found[MEMORY] = f"{device}={int(memory_gb * 1e9) >> 20}M"
    return found


def folder_of(run: str) -> Path:
    """Return the folder for the daemon's pipes, separate for each user and run. Its path is short,
    because the length of socket paths is limited."""
    return Path(tempfile.gettempdir()) / f"rlcore-mps-{os.getuid()}-{run}"


def join(folder: Path, timeout_s: float = 30.0, stop_s: float = 15.0) -> Daemon:
    """Join the daemon of this run on this node, or start it if no process of the run has done so.
    Removes pipes that a failed daemon left behind.

    Args:
        timeout_s: maximum time until the daemon answers.
        stop_s: maximum time that the daemon gets to stop.

    Raises:
        MPSError: there is no control program, no permission, or the daemon does not answer.
    """
    if PIPES in os.environ and answers({PIPES: os.environ[PIPES]}):
        announce("MPS", f"uses the daemon at {os.environ[PIPES]}, which another program started")
        return Daemon({PIPES: os.environ[PIPES]})
    if shutil.which(CONTROL) is None:
        raise MPSError(f"{CONTROL} is not on PATH; it comes with the NVIDIA driver")
    deadline = time.monotonic() + timeout_s
    environment = {PIPES: str(folder / "pipe"), LOGS: str(folder / "log")}
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        clients = os.open(folder / "clients", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise MPSError(f"its folder {folder} cannot be used ({error})") from error
    try:
        while not _flock(clients, fcntl.LOCK_SH):  # an earlier daemon of the run is stopping
            _pause(deadline, f"the daemon at {folder} does not stop")
        if _join_or_start(folder, environment, deadline, stop_s):
            announce("MPS", f"daemon started at {folder}")
        else:
            announce("MPS", f"joined the daemon of this node at {folder}")
    except BaseException:
        os.close(clients)
        raise
    return Daemon(environment, clients)


def _join_or_start(
    folder: Path, environment: Mapping[str, str], deadline: float, stop_s: float
) -> bool:
    """Wait until the daemon answers, and start it if no keeper is running. Return whether it was
    started. The keeper inherits the lock of `folder`, and so holds it until its exit."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not answers(environment):
            if _flock(lock, fcntl.LOCK_EX):
                _start(folder, environment, lock, deadline, stop_s)
                return True
            _pause(deadline, f"the process that holds {folder / 'lock'} has not started the daemon")
        return False
    finally:
        os.close(lock)


def _flock(file: int, kind: int) -> bool:
    """Try to lock the file without waiting; return whether it is locked."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pause(deadline: float, why: str) -> None:
    """Wait a moment. After the deadline, raise MPSError with the sentence `why`."""
    if time.monotonic() > deadline:
        raise MPSError(why)
    time.sleep(_STEP_S)


def _start(
    folder: Path, environment: Mapping[str, str], lock: int, deadline: float, stop_s: float
) -> None:
    """Start keeper and daemon, and wait until the daemon answers. Existing pipes are removed as
    stale, because this process holds the lock and no daemon answers."""
    pipes, logs = folder / "pipe", folder / "log"
    if pipes.exists():
        log.warning("MPS: removing %s, left behind by a daemon that has failed", pipes)
    try:
        shutil.rmtree(pipes, ignore_errors=False) if pipes.exists() else None
        pipes.mkdir(mode=0o700)
        logs.mkdir(mode=0o700, exist_ok=True)
        output = (logs / "start.txt").open("wb")
    except OSError as error:
        raise MPSError(f"its folder {folder} cannot be used ({error})") from error
    arguments = (str(folder / "clients"), f"{stop_s:g}")
    with output:
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", mps_keeper.__file__, *arguments],
            env=_unmasked(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
            start_new_session=True,
        )
    while not answers(environment):
        if keeper.poll() is not None:
            raise MPSError(f"{CONTROL} exited with status {keeper.returncode}{_said(logs)}")
        if time.monotonic() > deadline:
            keeper.send_signal(signal.SIGINT)  # the keeper then stops the daemon
            keeper.wait()
            raise MPSError(f"{CONTROL} does not answer in time{_said(logs)}")
        time.sleep(_STEP_S)


def _unmasked(environment: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for the daemon: with `environment`, and with all GPUs."""
    return {k: v for k, v in os.environ.items() if k != _MASK} | dict(environment)


def answers(environment: Mapping[str, str]) -> bool:
    """Return whether an MPS daemon answers at the pipes that `environment` names."""
    if not Path(environment[PIPES], "control").exists():
        return False
    try:
        command(environment, _PING, _PING_S)
    except MPSError:
        return False
    return True


def command(environment: Mapping[str, str], line: str, timeout_s: float) -> str:
    """Send a command to the MPS daemon that `environment` names, and return its output. Raises
    MPSError if the command fails."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=line + "\n",
            env=_unmasked(environment),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MPSError(f"{CONTROL} {line}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise MPSError(f"{CONTROL} {line}: status {done.returncode}: {said[:200]}")
    return done.stdout


def _said(logs: Path) -> str:
    """Return the last line of the daemon's start-up output, for an error message."""
    text = (logs / "start.txt").read_text(errors="replace").strip()
    return f": {text.splitlines()[-1][:200]}" if text else ""
