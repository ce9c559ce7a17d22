"""torchrun whose end is one line: a rank that failed has said why, and torchrun's own traceback
would push that off the screen. And whose SIGTERM lets the ranks finish: they save and leave by
themselves within --checkpoint.grace_s, and the run's exit code is 0.

    python recipes/torch_run.py ARGUMENTS OF TORCHRUN        # common.sh does this
"""

import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

ROOT = Path(__file__).resolve().parents[1]
if (ROOT / "rlcore" / "__init__.py").is_file():  # of a checkout; a copy uses the installed rlcore
    sys.path.insert(0, str(ROOT))

from rlcore.utils import listen  # noqa: E402

INTERFACE = "RLCORE_INTERFACE"
"""Environment, from common.sh: the value of --cluster.interface."""
UNFINISHED = "RLCORE_UNFINISHED"
"""Environment, from job.sbatch: beside this file goes NAME.failed where a run fails by itself."""
GRACE_S = 660.0
"""Longer than any --checkpoint.grace_s and what a flight record takes: the ranks end themselves."""


def main() -> int:
    """0, or the exit code of the rank that failed first; 128 and the number for a signal."""
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(
        lambda record: not record.getMessage().startswith(("failed (exitcode", "Sending process"))
    )
    signal.signal(signal.SIGTERM, pass_on)
    try:
        listen.bind_stores(os.environ.get(INTERFACE, ""))
        # Without a log folder torchrun makes one that it never removes; ranks write no logs to it.
        own = ["--log-dir", os.devnull, "--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"]
        run.main([*own, *sys.argv[1:]])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        print(f"rlcore: rank {rank} {how}; the run has ended", file=sys.stderr)
        code = 128 - code if code < 0 else code
        if code != 128 + signal.SIGTERM:
            failed()
        return code
    except Exception:  # such as a node that has not come
        failed()
        raise
    return 0


def failed() -> None:
    """Tell job.sbatch that the run failed by itself and would fail again."""
    if file := os.environ.get(UNFINISHED):
        with suppress(OSError):  # the exit code matters more
            Path(f"{file}.failed").touch()


def pass_on(*_: object) -> None:
    """SIGTERM: the ranks hear it, and are waited for. Where all have left in order torchrun finds
    that out by itself; else nothing is started again."""
    ranks = psutil.Process().children()
    for process in ranks:
        process.terminate()
    end = time.monotonic() + GRACE_S
    if not ranks or not all(left_in_order(process.pid, end) for process in ranks):
        sys.exit(128 + signal.SIGTERM)


def left_in_order(pid: int, end: float) -> bool:
    """Wait until a child has ended, and leave its exit code to torchrun."""
    while time.monotonic() < end:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            return found.si_code == os.CLD_EXITED and found.si_status == 0
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    sys.exit(main())
