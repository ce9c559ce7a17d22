"""Faults of the disk in the middle of a run, for `Job.within`: at an entry of a phase."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlcore.utils.spans import Spans


@contextmanager
def at_phase(phase: str, nth: int, how: str, folder: str) -> Iterator[None]:
    """At the n-th entry of a phase, `full` fills the disk that `folder` is on, and `removed`
    deletes the folder."""
    seen, tell = 0, Spans._tell

    def changed(self: Spans) -> None:
        nonlocal seen
        tell(self)
        if self.current == phase:
            seen += 1
            if seen == nth:
                {"full": fill, "removed": shutil.rmtree}[how](Path(folder))

    Spans._tell = changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Spans._tell = tell  # type: ignore[method-assign]
        (Path(folder) / "filler").unlink(missing_ok=True)


def fill(folder: Path) -> None:
    """Leave no byte of the disk."""
    with open(folder / "filler", "wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while True:
                    os.write(file.fileno(), bytes(size))
