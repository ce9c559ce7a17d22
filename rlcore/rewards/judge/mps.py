"""CUDA MPS: one control daemon per node lets several processes compute on a GPU at once.

Without MPS, judge and engines take turns on the GPU; with MPS, their kernels run concurrently. The
first process of a run on a node starts the daemon in the foreground, as its own child, so that it
can stop the daemon. Other processes of the run join. A daemon started outside of the run is used
but never stopped. The daemon must run before the first CUDA call of every participating process.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rlcore.config.schema import RewardConfig, RewardSum, reward_sections
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import announce, log

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
PERCENT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_PING = "get_server_list"
_PING_S = 5.0
_STEP_S = 0.05
_PR_SET_PDEATHSIG = 1


class MPSError(RuntimeError):
    """Raised if MPS cannot be used; the message gives the reason."""


class Daemon:
    """MPS daemon of this node, started by this or another process. `environment` has the
    environment variables that clients of the daemon need."""

    def __init__(
        self,
        folder: Path,
        process: subprocess.Popen | None,
        lock: int | None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Store the daemon's data. By default, `environment` names pipes and logs in `folder`."""
        self.folder = folder
        self._process, self._lock = process, lock
        of_folder = {PIPES: str(folder / "pipe"), LOGS: str(folder / "log")}
        self.environment = of_folder if environment is None else dict(environment)

    @property
    def is_ours(self) -> bool:
        """Whether this process started the daemon."""
        return self._process is not None

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop the daemon if this process started it: first with the command quit, then with a
        signal. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                with contextlib.suppress(MPSError):
                    command(self.environment, "quit", timeout_s / 2)
                _end(process, timeout_s / 2)
            shutil.rmtree(self.folder / "pipe", ignore_errors=True)
            log.info("MPS: the daemon has exited")
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


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
    CUDA call. Raises ConfigError if MPS is `on` and cannot be used.
    """
    key, is_asked = wanted(reward)
    if not key or not has_gpu():
        return None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    run = "-".join(os.environ.get(name, "") for name in names)
    if "WORLD_SIZE" not in os.environ:
        run = str(os.getpid())
    try:
        daemon = join(folder_of(hashlib.blake2b(run.encode(), digest_size=6).hexdigest()))
    except MPSError as error:
        if is_asked:
            raise ConfigError(f"--{key}.mps on: {error}") from error
        announce("MPS", f"none ({error}); judge and engines share the GPU by time slices")
        return None
    os.environ.update(daemon.environment)
    return daemon


def has_gpu() -> bool:
    """Return whether this process may use an NVIDIA GPU. Makes no CUDA call."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(
        name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev")
    )


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


def join(folder: Path, timeout_s: float = 30.0) -> Daemon:
    """Join the daemon of this run on this node, or start it if no process of the run has done so.
    Removes pipes that a failed daemon left behind.

    Raises:
        MPSError: there is no control program, no permission, or the daemon does not answer.
    """
    if PIPES in os.environ and answers({PIPES: os.environ[PIPES]}):
        announce("MPS", f"uses the daemon at {os.environ[PIPES]}, which another program started")
        return Daemon(folder, None, None, {PIPES: os.environ[PIPES]})
    if shutil.which(CONTROL) is None:
        raise MPSError(f"{CONTROL} is not on PATH; it comes with the NVIDIA driver")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MPSError(f"its folder {folder} cannot be used ({error})") from error
    deadline = time.monotonic() + timeout_s
    environment = Daemon(folder, None, None).environment
    while True:  # the process that starts the daemon holds the lock until it stops the daemon
        if answers(environment):
            os.close(lock)
            announce("MPS", f"joined the daemon of this node at {folder}")
            return Daemon(folder, None, None)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        if time.monotonic() > deadline:
            os.close(lock)
            raise MPSError(
                f"the process of this node that holds {folder / 'lock'} has not started the "
                f"daemon within {timeout_s:g} s"
            )
        time.sleep(_STEP_S)
    try:
        process = _start(folder, environment, deadline)
    except BaseException:
        os.close(lock)
        raise
    announce("MPS", f"daemon started at {folder}, process {process.pid}")
    return Daemon(folder, process, lock)


def _start(folder: Path, environment: dict[str, str], deadline: float) -> subprocess.Popen:
    """Start an MPS daemon and wait until it answers. Existing pipes are removed as stale, because
    this process holds the lock of `folder` and no daemon answers."""
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
    libc = ctypes.CDLL(None)

    def tie() -> None:  # send SIGTERM when the parent exits, so that no daemon outlives its run
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    with output:
        try:
            process = subprocess.Popen(
                [CONTROL, "-f"],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=tie,
            )
        except OSError as error:
            raise MPSError(f"{CONTROL} cannot be started ({error})") from error
    while not answers(environment):
        if process.poll() is not None:
            raise MPSError(f"{CONTROL} exited with status {process.returncode}{_said(logs)}")
        if time.monotonic() > deadline:
            _end(process, 2.0)
            raise MPSError(f"{CONTROL} does not answer in time{_said(logs)}")
        time.sleep(_STEP_S)
    return process


def answers(environment: dict[str, str]) -> bool:
    """Return whether an MPS daemon answers at the pipes that `environment` names."""
    if not Path(environment[PIPES], "control").exists():
        return False
    try:
        command(environment, _PING, _PING_S)
    except MPSError:
        return False
    return True


def command(environment: dict[str, str], line: str, timeout_s: float) -> str:
    """Send a command to the MPS daemon that `environment` names, and return its output. Raises
    MPSError if the command fails."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=line + "\n",
            env=os.environ | environment,
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


def _end(process: subprocess.Popen, timeout_s: float) -> None:
    """Wait until a child process exits. If it does not, send SIGTERM, then SIGKILL, to its
    group."""
    for kill in (None, signal.SIGTERM, signal.SIGKILL):
        if kill is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, kill)
        try:
            process.wait(timeout_s / 2)
            return
        except subprocess.TimeoutExpired:
            continue
    log.error("MPS: process %d is still running after SIGKILL", process.pid)
