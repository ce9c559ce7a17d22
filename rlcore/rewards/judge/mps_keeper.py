"""Run the MPS daemon of a node, and stop it when no rank of the run uses it any more.

    python -I -S mps_keeper.py CLIENTS TIMEOUT_S

Every rank holds a shared lock on the file CLIENTS until it exits. The kernel releases the lock also
if the rank is killed. No rank can stop the daemon itself, because a rank is a client of the daemon
until its own exit. `mps.join` starts this process, which imports only the standard library.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the daemon until the last rank exits, or until SIGINT. Return the daemon's status if the
    daemon exits earlier."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm also sends it to ranks, which still run
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under `nohup ... &`
    clients, timeout_s = os.open(sys.argv[1], os.O_RDWR), float(sys.argv[2])
    libc = ctypes.CDLL(None)

    def tie() -> None:  # send SIGTERM when this process exits, so that no daemon outlives it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    daemon = subprocess.Popen([CONTROL, "-f"], start_new_session=True, preexec_fn=tie)
    with contextlib.suppress(KeyboardInterrupt):
        while daemon.poll() is None and not is_unused(clients):
            time.sleep(_POLL_S)
    if daemon.returncode is not None:
        return max(daemon.returncode, 1)
    stop(daemon, timeout_s)  # while the lock is held, so that no new rank joins
    shutil.rmtree(os.environ[PIPES], ignore_errors=True)
    return 0


def is_unused(clients: int) -> bool:
    """Return whether no rank holds the file's lock. If so, lock the file until this process
    exits."""
    try:
        fcntl.flock(clients, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def stop(daemon: subprocess.Popen, timeout_s: float) -> None:
    """Stop the daemon with the command quit. If it stays, send SIGTERM, then SIGKILL, to its
    group."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([CONTROL], input=b"quit\n", timeout=timeout_s / 3)
    for kill in (None, signal.SIGTERM, signal.SIGKILL):
        if kill is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, kill)
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(timeout_s / 3)
            return


if __name__ == "__main__":
    sys.exit(main())
