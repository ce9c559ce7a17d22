"""torchrun whose end is one line: a rank that failed has said why, and torchrun's own traceback
would push that off the screen.

    python recipes/torch_run.py ARGUMENTS OF TORCHRUN        # common.sh does this
"""

import logging
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> int:
    """0, or the exit code of the rank that failed first; 128 and the number for a signal."""
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(
        lambda record: not record.getMessage().startswith("failed (exitcode")
    )
    try:
        run.main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        print(f"rlcore: rank {rank} {how}, and so did the run", file=sys.stderr)
        return 128 - code if code < 0 else code
    return 0


if __name__ == "__main__":
    sys.exit(main())
