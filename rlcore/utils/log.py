"""Set up the logger `rlcore`: rank 0 writes to the terminal, and every rank to a separate file."""

import logging
import sys
from pathlib import Path

log = logging.getLogger("rlcore")


def setup(rank: int, folder: Path | None = None) -> None:
    """Log to the terminal: on rank 0 from level INFO, on other ranks only errors. With a folder,
    each rank also logs to `<folder>/rank<N>.log`."""
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.DEBUG)
    terminal = logging.StreamHandler(sys.stdout)
    terminal.setFormatter(logging.Formatter("%(message)s"))
    terminal.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    log.addHandler(terminal)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / f"rank{rank}.log")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(file)


def announce(what: str, choice: str) -> None:
    """Log which implementation was chosen for `what`, so that no backend is chosen silently."""
    log.info("%s: %s", what, choice)
