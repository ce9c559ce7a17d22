"""Logs of one JSON object per line that survive a kill: whole lines only, cut back on resume.

Own code instead of the package jsonlines: a resumed run cuts the file back.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.utils.log import log


class JsonLines:
    """A file of objects with a `step` that never falls. A line is on disk whole or not at all, as
    seen after a kill; `sync` makes it last through a power cut too.

    Opening with `next_step` drops what an interrupted run wrote for this step and later: after a
    resume no step is there twice.
    """

    def __init__(self, path: Path, next_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # one call, so a kill leaves the file as it was or as it shall be
        os.ftruncate(self._fd, _end_before(path, next_step))
        self._last = next_step - 1

    def append(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of one step in one go. OSError with the path if the disk is full; the file
        then ends with the row before."""
        if step < self._last:
            raise ValueError(f"{self.path}: step {step} after step {self._last}; steps only grow")
        self._last = step
        data = "".join(dumps({"step": step, **row}) + "\n" for row in rows).encode()
        size = os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise OSError(
                error.errno, f"cannot write step {step} ({error.strerror})", str(self.path)
            ) from error

    def sync(self) -> None:
        """Return when the lines are on the disk itself: before a checkpoint counts as written."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a log; a missing file is an empty one. Damaged lines are named and left out,
    an unfinished last line (a writer at work) is left out in silence."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            row = _parse(line)
            if row is not None:
                yield row
            elif line.endswith(b"\n"):
                log.warning("%s line %d: not a JSON object, left out", path, number)


def dumps(value: Any) -> str:
    """One line of strict JSON. numpy's numbers become plain ones; NaN and infinities become null,
    since JSON has no name for them. Half a surrogate pair, which UTF-8 cannot hold, is escaped."""
    plain = _plain(value)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(plain, allow_nan=False, separators=(", ", ": "))
    return text


def write_atomic(path: Path, text: str | bytes) -> None:
    """Replace a file: a reader, or a kill, finds the old text or the new one."""
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
    """Bytes from the start to the first line of `next_step` or later, or to a torn last line."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            row = _parse(line)
            if not line.endswith(b"\n") or (row is not None and row.get("step", 0) >= next_step):
                break
            end += len(line)
    return end


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy arrays and numbers, tensors
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
