"""Exit codes of commands (0 done, 1 failed, 2 refused), and the file for a failure's traceback."""

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from rlcore.utils.errors import ConfigError

FIRST_S = 3.0
"""Seconds by which the first rank of a node comes before the others with a refusal."""


def guard(body: Callable[[], int]) -> int:
    """Run `body` and return its exit code. On a `ConfigError` print it and return 2. On any other
    exception print an error that names the traceback's file and return 1.

    The ranks of a node refuse the same settings: the first one prints why, and torchrun then ends
    the others before they do."""
    try:
        return body()
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(FIRST_S)
        print(error, file=sys.stderr)
        return 2
    except Exception as error:
        return fail(error)


def fail(error: Exception, file: Path | None = None) -> int:
    """Append the traceback to `file`, or to a new temporary file if `file` is None or not writable.
    Print an error that names the traceback's file, and return 1."""
    print(sentence(error, keep(error, file)), file=sys.stderr)
    return 1


def sentence(error: Exception, file: Path) -> str:
    """Return a message with the first line of an error and the name of its traceback's file."""
    kind = type(error).__name__
    first = next(iter(str(error).splitlines()), "") or kind
    if not isinstance(error, RuntimeError | OSError | ValueError):  # a KeyError's text is unclear
        first = kind if first == kind else f"{kind}: {first}"
    return f"{first} (traceback: {file})"


def keep(error: Exception, file: Path | None = None) -> Path:
    """Append the traceback to `file`, or to a temporary file. Return the path of that file."""
    text = "".join(traceback.format_exception(error))
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as out:
                out.write(text)
            return file
        except OSError:
            pass
    descriptor, name = tempfile.mkstemp(prefix="rlcore-", suffix=".log")
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    return Path(name)
