"""Write and read log files of one JSON object per line, with only whole lines after a kill.

Own code instead of the package jsonlines: a resumed run truncates the file.
"""

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.utils.errors import ConfigError
from rlcore.utils.files import fault
from rlcore.utils.log import log
from rlcore.utils.writes import LogWrites


class JsonLines:
    """A file of JSON objects with a `step` that never decreases. After a kill, each line is in
    the file either whole or not at all; `sync` also protects the lines against a power failure.

    Opening with `next_step` deletes the lines of this and later steps, which an interrupted run
    wrote. So no step occurs twice after a resume.
    """

    def __init__(self, path: Path, next_step: int, writes: LogWrites | None = None):
        """`writes`: what to do if a write fails; None: raise."""
        self._writes = writes or LogWrites()
        self.path, self._file = path, AppendFile(path)
        self._file.truncate(_end_before(path, next_step))
        self._last = next_step - 1

    def append(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows of one step. If the disk is full, remove these rows again. A failed write
        raises OSError with the path, unless `writes` continues without these rows."""
        if step < self._last:
            raise ValueError(
                f"{self.path}: step {step} was appended after step {self._last}; append steps in "
                "ascending order"
            )
        self._last = step
        data = "".join(dumps({"step": step, **row}) + "\n" for row in rows).encode()
        with self._writes.to(self.path):
            self._file.append(data)

    def sync(self) -> None:
        """Flush all lines to disk (fsync); call this before a checkpoint counts as written."""
        self._file.sync()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


class AppendFile:
    """A file to which every append is written whole or not at all, even if the disk is full."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it with its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes in a single call: a kill leaves the old or the new file."""
        os.ftruncate(self._fd, size)

    def append(self, data: bytes) -> None:
        """Append bytes. If that fails or the file was deleted, raise OSError."""
        found = os.fstat(self._fd)
        if not found.st_nlink:  # Otherwise the write would succeed, to a file without a name.
            raise FileNotFoundError(errno.ENOENT, "the file was deleted during the run")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self.truncate(found.st_size)
            raise

    def sync(self) -> None:
        """Flush the file to disk (fsync)."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a log file; none if the file is missing. Damaged lines are logged and
    skipped. An unfinished last line, which a writer may still complete, is skipped silently. Raise
    ConfigError if the path is not a readable regular file."""
    if why := fault(path):
        if why == "no such file":
            return
        raise ConfigError(f"{path}: {why}; give a log file of a run")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            row = _parse(line)
            if row is not None:
                yield row
            elif line.endswith(b"\n"):
                log.warning("%s line %d: skipped, it is not a JSON object", path, number)


def dumps(value: Any) -> str:
    """Encode a value as one line of strict JSON. numpy numbers become plain numbers. NaN and
    infinities, which JSON lacks, become null. Lone surrogates, which UTF-8 cannot encode, are
    escaped."""
    plain = _plain(value)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(plain, allow_nan=False, separators=(", ", ": "))
    return text


def write_atomic(path: Path, text: str | bytes) -> None:
    """Replace a file atomically: after a kill, and for every reader, the file has either the old
    or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _end_before(path: Path, next_step: int) -> int:
    """Return the number of bytes before the first line of `next_step` or later, or before an
    incomplete last line."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            row = _parse(line)
            step = 0 if row is None else row.get("step", 0)
            is_later = isinstance(step, int | float) and step >= next_step
            if not line.endswith(b"\n") or is_later:
                break
            end += len(line)
    return end


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):  # `value` is a numpy array, a numpy number or a tensor
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
