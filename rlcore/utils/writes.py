"""Handle failed writes to the log files of a run as --checkpoint.on_error says.

Log files are those that a run appends to between two checkpoints: metrics, samples, rounds, traces.
They hold no state, so that a run can continue without them.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcore.utils.log import log


class LogWrites:
    """Handler of one rank's failed writes to log files. With `continues`, a failed write is counted
    and logged once per file, and the run continues without these lines. Else it ends the run."""

    def __init__(self, continues: bool = False) -> None:
        self.num_failed = 0
        """Number of writes that have failed so far."""
        self._continues = continues
        self._told: set[Path] = set()

    @contextmanager
    def to(self, file: Path) -> Iterator[None]:
        """Run the `with` block, which writes to `file`.

        Raises:
            OSError: the write failed and the run does not continue without it.
        """
        try:
            yield
        except OSError as error:
            if not self._continues:
                raise OSError(
                    f"cannot write {file} ({reason(error)}); checkpoints are kept. Correct this "
                    "and start again to resume from the last one, or set --checkpoint.on_error "
                    "continue to run without such files"
                ) from error
            self.num_failed += 1
            if file not in self._told:
                self._told.add(file)
                log.error(
                    "cannot write %s (%s); the run continues, and this file misses lines",
                    file,
                    reason(error),
                )


def reason(error: OSError) -> str:
    """Return the cause of a failed write."""
    return "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
