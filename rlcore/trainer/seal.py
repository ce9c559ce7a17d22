"""Seal a checkpoint with the size and checksum of each file, written last. A folder without a seal
is incomplete; a file that does not match its seal is damaged. Ranks share the reading of files.

With asynchronous saving, each rank leaves a list of its files (`<part>.rank00003.part`) when they
are written, and rank 0 seals the folder when all lists exist. This needs no collective, so a
checkpoint becomes complete even in the middle of a step."""

import errno
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event

import msgspec

from rlcore.utils import collective, disk, files
from rlcore.utils.errors import ConfigError

MANIFEST = "manifest.json"
UNREADABLE = -1.0
LIST = ".part"
"""Ending of the list of files that a rank has written."""
_POLL_S = 0.05


class Manifest(msgspec.Struct):
    """Contents of the file `manifest.json`."""

    files: dict[str, tuple[int, int]]
    """Size and CRC-32 of each file, by its path in the checkpoint."""
    checksum: int = -1
    """CRC-32 of `files`, so that a lost or changed entry is detected; -1 in earlier versions."""


def write(folder: Path, group: collective.Group) -> str:
    """Seal a complete checkpoint folder on a disk that all ranks share. Return the error on every
    rank, or "" if there is none. Collective."""
    error, sizes = "", {}
    if collective.is_first(group):
        try:
            sizes = {name: (folder / name).stat().st_size for name in _files(folder)}
        except OSError as e:
            error = str(e)
    sizes = json.loads(collective.broadcast_text(json.dumps(sizes), group))
    sums = _checksums(folder, list(sizes), group)
    if UNREADABLE in sums:
        error = error or "cannot read a file that was just written"
    elif collective.is_first(group) and not error:
        seals = {n: (size, int(s)) for (n, size), s in zip(sizes.items(), sums, strict=True)}
        try:
            _seal(folder, seals)
        except OSError as e:
            error = str(e)
    return collective.broadcast_text(error, group)


def leave_list(folder: Path, part: str, rank: int, checksums: Mapping[str, int]) -> None:
    """Leave the list of files that this rank has written to the subfolder `part`. Raise OSError if
    the list cannot be written.

    Args:
        checksums: CRC-32 of each file, by its name in the subfolder.
    """
    seals = {}
    for name, checksum in checksums.items():
        seals[f"{part}/{name}"] = (folder / part / name).stat().st_size, checksum
    path = folder / f"{part}.rank{rank:05d}{LIST}"
    aside = path.with_name(f".{path.name}")
    disk.write_text(aside, msgspec.json.encode(Manifest(seals)).decode())
    aside.rename(path)


def write_from_lists(folder: Path, num_lists: int, cancelled: Event) -> None:
    """Wait for the lists of all ranks' files, then seal the folder. Files that are in no list are
    read here.

    Raises:
        OSError: a file is missing or has another size than its rank has written, a file cannot be
            read, or `cancelled` was set.
    """
    while len(lists := list(folder.glob(f"[!.]*{LIST}"))) < num_lists:
        if cancelled.wait(_POLL_S):
            raise OSError(errno.ECANCELED, "it was cancelled")
    seals: dict[str, tuple[int, int]] = {}
    for path in lists:
        seals |= msgspec.json.decode(path.read_bytes(), type=Manifest).files
        path.unlink()
    if wrong := _wrong_size(folder, seals):
        raise OSError(errno.EIO, wrong)
    for name in _files(folder):
        if name not in seals:
            seals[name] = (folder / name).stat().st_size, disk.checksum(folder / name)
    _seal(folder, {name: seals[name] for name in sorted(seals)})


def _seal(folder: Path, seals: Mapping[str, tuple[int, int]]) -> None:
    """Write the manifest, and flush the folder to disk."""
    text = json.dumps({"files": seals, "checksum": _checksum_of(seals)}, indent=1)
    disk.write_text(folder / MANIFEST, text)
    disk.sync_tree(folder)


def look(folder: Path) -> tuple[str, dict[str, tuple[int, int]]]:
    """Check a checkpoint against its seal: names and sizes of the files, but not their contents.

    Returns:
        The fault ("" if there is none), and (size, checksum) of each file by name.
    """
    try:
        if files.fault(folder / MANIFEST) == "no such file":
            return f"has no {MANIFEST}, so it is incomplete or from an earlier version", {}
        found = msgspec.json.decode(files.read_text(folder / MANIFEST), type=Manifest)
    except (ConfigError, msgspec.MsgspecError, RecursionError) as e:
        return f"cannot read its {MANIFEST} ({e})", {}
    if found.checksum < 0:
        return f"its {MANIFEST} has no checksum: an earlier version of rlcore wrote it", {}
    if not found.files or found.checksum != _checksum_of(found.files):
        return f"its {MANIFEST} has lost or changed entries", {}
    try:
        return _wrong_size(folder, found.files), found.files
    except OSError as e:
        return f"cannot read a file ({e})", {}


def fault(folder: Path, group: collective.Group) -> str:
    """Check a checkpoint against its seal: sizes and checksums. Return the fault on every rank, or
    "" if all files are intact. Collective."""
    found, seals = look(folder) if collective.is_first(group) else ("", {})
    found, seals = json.loads(collective.broadcast_text(json.dumps([found, seals]), group))
    if found:
        return found
    for name, now in zip(seals, _checksums(folder, list(seals), group), strict=True):
        if now == UNREADABLE:
            return f"cannot read {name}"
        if now != seals[name][1]:
            return f"{name} has a wrong checksum"
    return ""


def _checksum_of(seals: Mapping[str, Sequence[int]]) -> int:
    return zlib.crc32(json.dumps({name: list(seals[name]) for name in sorted(seals)}).encode())


def _wrong_size(folder: Path, seals: Mapping[str, tuple[int, int]]) -> str:
    for name, (size, _) in seals.items():
        path = folder / name
        if ".." in path.parts or Path(name).is_absolute():
            return f"its {MANIFEST} names {name!r}, which is outside of the checkpoint"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
    return ""


def _files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _checksums(folder: Path, names: list[str], group: collective.Group) -> list[float]:
    """Return the CRC-32 of each file, or UNREADABLE. Ranks share the reading. Collective."""
    rank, size = collective.place(group)
    mine = [0.0] * len(names)
    for i, name in enumerate(names):
        if i % size == rank:
            mine[i] = _checksum(folder / name)
    totals = collective.reduce_floats(mine, group=group)
    return [UNREADABLE if t < 0 else t for t in totals]


def _checksum(path: Path) -> float:
    try:
        return float(disk.checksum(path))
    except OSError:
        return UNREADABLE  # negative, so that the sum over all ranks is negative
