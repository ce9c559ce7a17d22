"""Seal a checkpoint with the size and checksum of each file, written last. A folder without a seal
is incomplete; a file that does not match its seal is damaged. Ranks share the reading of files."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rlcore.utils import collective, disk, files
from rlcore.utils.errors import ConfigError

MANIFEST = "manifest.json"
UNREADABLE = -1.0


class Manifest(msgspec.Struct):
    """Contents of the file `manifest.json`."""

    files: dict[str, tuple[int, int]]
    """Size and CRC-32 of each file, by its path in the checkpoint."""
    checksum: int = -1
    """CRC-32 of `files`, so that a lost or changed entry is detected; -1 in earlier versions."""


def write(folder: Path, group: collective.Group, known: Mapping[str, int] | None = None) -> str:
    """Seal a complete checkpoint folder on a disk that all ranks share. Return the error on every
    rank, or "" if there is none. Collective.

    Args:
        known: CRC-32 of files that this rank has already read back, by path in the folder. At most
            one rank may have a file's CRC-32; files that no rank has are read here.
    """
    error, sizes = "", {}
    if collective.is_first(group):
        try:
            sizes = {name: (folder / name).stat().st_size for name in _files(folder)}
        except OSError as e:
            error = str(e)
    sizes = json.loads(collective.broadcast_text(json.dumps(sizes), group))
    sums = _checksums(folder, list(sizes), group, known)
    if UNREADABLE in sums:
        error = error or "cannot read a file that was just written"
    elif collective.is_first(group) and not error:
        seals = {n: [size, int(s)] for (n, size), s in zip(sizes.items(), sums, strict=True)}
        try:
            text = json.dumps({"files": seals, "checksum": _checksum_of(seals)}, indent=1)
            disk.write_text(folder / MANIFEST, text)
            disk.sync_tree(folder)
        except OSError as e:
            error = str(e)
    return collective.broadcast_text(error, group)


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


def _checksums(
    folder: Path, names: list[str], group: collective.Group, known: Mapping[str, int] | None = None
) -> list[float]:
    """Return the CRC-32 of each file, or UNREADABLE. Ranks share the reading of files whose CRC-32
    no rank has in `known`. Collective."""
    known = known or {}
    rank, size = collective.place(group)
    is_known = collective.reduce_floats([float(n in known) for n in names], "max", group)
    mine = [float(known.get(n, 0)) for n in names]
    for i, name in enumerate(names):
        if not is_known[i] and i % size == rank:
            mine[i] = _checksum(folder / name)
    totals = collective.reduce_floats(mine, group=group)
    return [UNREADABLE if t < 0 else t for t in totals]


def _checksum(path: Path) -> float:
    try:
        return float(disk.checksum(path))
    except OSError:
        return UNREADABLE  # negative, so that the sum over all ranks is negative
