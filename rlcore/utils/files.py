"""Read files that a user, a model's folder or an earlier run provides.

Such a path may name a folder, a pipe that blocks, an endless device, or a file of any size and
contents. The functions here detect this before they read.
"""

import errno
import json
import stat
from pathlib import Path
from typing import Any

from rlcore.utils.errors import ConfigError

MOST_TEXT_BYTES = 64 << 20
"""Maximum size of a file that is read as a whole. As Python objects, JSON takes up to 30 times its
size."""
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def fault(path: Path) -> str:
    """Return why `path` cannot be read as a regular file, such as `no such file`; "" if it can."""
    return _fault(path, stat.S_IFREG)


def folder_fault(path: Path) -> str:
    """Return why `path` cannot be read as a folder, such as `no such folder`; "" if it can."""
    return _fault(path, stat.S_IFDIR)


def _fault(path: Path, wanted: int) -> str:
    noun = _KINDS[wanted].removeprefix("a ")
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != wanted:
            return f"is {_KINDS.get(kind, 'another kind of file')}, not a {noun}"
        if wanted == stat.S_IFDIR:
            next(path.iterdir(), None)
        else:
            path.open("rb").close()
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        return f"no such {noun}" if missing else (error.strerror or str(error)).lower()
    except ValueError as error:  # the name has a NUL
        return str(error)
    return ""


def read_text(path: Path) -> str:
    """Read a file as UTF-8. Raise ConfigError if it is not a readable regular file, is larger than
    `MOST_TEXT_BYTES`, or is not UTF-8."""
    if why := fault(path):
        raise ConfigError(f"{path}: {why}; give a text file")
    try:
        with path.open("rb") as file:
            data = file.read(MOST_TEXT_BYTES + 1)
        if len(data) > MOST_TEXT_BYTES:
            raise ConfigError(
                f"{path}: has more than {MOST_TEXT_BYTES >> 20} MiB; give a smaller file"
            )
        return data.decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error})") from error


def read_json(path: Path, hint: str = "fetch the file again") -> dict[str, Any]:
    """Read a JSON object from a file. Raise ConfigError, which ends with `hint`, if the file holds
    no JSON object."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); {hint}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object; {hint}")
    return value


def recipes_folder() -> Path:
    """Return the folder of the recipes: in the installed package, or beside it in a checkout.

    Raises:
        ConfigError: the installation has no recipes.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / "common.sh").is_file():
            return folder
    raise ConfigError(f"{package} has no recipes: install rlcore again, with pip")
