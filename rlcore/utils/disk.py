"""Write files so that they survive a loss of power, before a rename makes them count."""

import os
import zlib
from pathlib import Path

CHUNK_BYTES = 4 * 2**20


def write_text(path: Path, text: str) -> None:
    """Write a text file and flush it to disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Flush a written file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file's contents."""
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found = zlib.crc32(chunk, found)
    return found


def sync_folder(path: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Flush all files below a folder to disk, and then all folders."""
    found = list(folder.rglob("*"))
    for path in found:
        if path.is_file():
            sync_file(path)
    for path in (*filter(Path.is_dir, found), folder):
        sync_folder(path)


def rename(aside: Path, path: Path) -> None:
    """Rename a folder or file that is on disk, and flush the rename as well. An existing file at
    `path` is replaced."""
    os.replace(aside, path)
    sync_folder(path.parent)
