"""Set up the logger `rlcore`: rank 0 writes to the terminal, and every rank to a separate file."""

import logging
import sys
from contextlib import suppress
from logging.handlers import WatchedFileHandler
from pathlib import Path

log = logging.getLogger("rlcore")


def setup(rank: int, folder: Path | None = None) -> None:
    """Log to the terminal: on rank 0 from level INFO, on other ranks only errors. With a folder,
    each rank also logs to `<folder>/rank<N>.log`."""
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.DEBUG)
    terminal = _Terminal(sys.stdout)
    terminal.setFormatter(logging.Formatter("%(message)s"))
    terminal.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    log.addHandler(terminal)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = _LogFile(folder / f"rank{rank}.log")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(file)


class _Terminal(logging.StreamHandler):
    """Terminal that drops what it cannot write, for example to a file on a full disk. Python's own
    handler would print a traceback for every line."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a failed write. Report other errors as Python does."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _LogFile(WatchedFileHandler):
    """Log file of a rank. If it was deleted, it is made again. The first failed write is reported
    on the terminal, further ones are ignored."""

    _has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Report the first failed write. Report other errors as Python does."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            with suppress(OSError):
                print(f"cannot write {self.baseFilename} ({error.strerror})", file=sys.stderr)


def announce(what: str, choice: str) -> None:
    """Log which implementation was chosen for `what`, so that no backend is chosen silently."""
    log.info("%s: %s", what, choice)
