"""Full-text search over a local corpus, for the tool `search` of `--env tools`.

    python -m rlcore.envs.corpus wiki.jsonl        # index a large corpus before the run
    --env tools --env.tools search --env.corpus wiki.jsonl

A corpus is a JSONL file; each line has `text`, and may have `title`. Its index is an SQLite file
beside it with the FTS5 extension, which ranks documents by BM25. SQLite is part of Python, reads
the index from disk, and lets many processes search at a time.
"""

import fcntl
import os
import re
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from rlcore.utils.errors import ConfigError

LARGE_BYTES = 256 << 20
"""Size above which a corpus is not indexed at the start of a run."""
_WORD = re.compile(r"\w+")
_MOST_WORDS = 64
_FORMAT = 1


class Document(NamedTuple):
    """Document of a corpus."""

    title: str
    text: str


class _Line(msgspec.Struct):
    text: str
    title: str = ""


class Corpus:
    """Documents that can be searched, by one thread at a time."""

    def __init__(self, file: Path) -> None:
        """Open the index of a corpus. A missing or old index is made first, by one process while
        others wait. Raises ConfigError if the corpus is too large for that, or invalid."""
        self._index = _index_of(file)
        address = f"file:{quote(str(self._index))}?mode=ro&immutable=1"
        self._database = sqlite3.connect(address, uri=True, check_same_thread=False)

    def search(self, query: str, most: int) -> list[Document]:
        """Return the best documents for the words of a query, at most `most`. A document need not
        have all words. Equal documents of a corpus have the order of the file."""
        words = list(dict.fromkeys(_WORD.findall(query.lower())))[:_MOST_WORDS]
        if not words:
            return []
        found = self._database.execute(
            "SELECT title, text FROM documents WHERE documents MATCH ? "
            "ORDER BY rank, rowid LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), most),
        )
        return [Document(*row) for row in found]

    def close(self) -> None:
        self._database.close()


def index(file: Path) -> Path:
    """Make the index of a corpus, if it is missing or older than the corpus, and return its path.
    Raises ConfigError if a line is invalid or the folder is not writable."""
    made = Path(f"{file}.fts5")
    try:
        with open(f"{made}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_of(made, file):
                _write(made, file)
    except OSError as error:
        raise ConfigError(
            f"--env.corpus {file}: its index cannot be made ({error}); copy the corpus into a "
            "folder that this user may write"
        ) from error
    return made


def _index_of(file: Path) -> Path:
    if not file.is_file():
        raise ConfigError(f"--env.corpus {file}: there is no such file; give a JSONL file")
    made = Path(f"{file}.fts5")
    if _is_of(made, file):
        return made
    if file.stat().st_size > LARGE_BYTES:
        raise ConfigError(
            f"--env.corpus {file}: has {file.stat().st_size >> 20} MiB and no index; make it with "
            f"python -m rlcore.envs.corpus {file}"
        )
    return index(file)


def _stamp(file: Path) -> str:
    """Return what changes with the corpus or with the form of the index."""
    found = file.stat()
    return f"{_FORMAT} {found.st_size} {found.st_mtime_ns}"


def _is_of(made: Path, file: Path) -> bool:
    try:
        database = sqlite3.connect(f"file:{quote(str(made))}?mode=ro&immutable=1", uri=True)
    except sqlite3.OperationalError:
        return False
    try:
        return database.execute("SELECT stamp FROM origin").fetchone() == (_stamp(file),)
    except sqlite3.DatabaseError:
        return False
    finally:
        database.close()


def _write(made: Path, file: Path) -> None:
    """Write the index to a second file, and move it to its place when it is complete."""
    part = Path(f"{made}.part")
    part.unlink(missing_ok=True)
    stamp = _stamp(file)
    database = sqlite3.connect(part)
    try:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("CREATE TABLE origin (stamp TEXT)")
        database.execute(
            "CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')"
        )
        database.executemany("INSERT INTO documents VALUES (?, ?)", _documents(file))
        database.execute("INSERT INTO documents (documents) VALUES ('optimize')")
        database.execute("INSERT INTO origin VALUES (?)", (stamp,))
        database.commit()
    except sqlite3.Error as error:
        raise OSError(str(error)) from error
    finally:
        database.close()
    os.replace(part, made)


def _documents(file: Path) -> Iterator[Document]:
    read = msgspec.json.Decoder(_Line).decode
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found = read(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"--env.corpus {file}: line {number}: {error}; each line is a JSON object with "
                    "text, and perhaps title"
                ) from error
            yield Document(found.title, found.text)


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m rlcore.envs.corpus CORPUS.jsonl", file=sys.stderr)
        return 2
    try:
        print(index(Path(argv[0])))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
