"""Lock a folder for one process at a time.

Own code instead of the package filelock, to name the process that holds the folder.
"""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from rlcore.utils.log import log

_HELD: dict[Path, TextIO] = {}
"""Lock files of this process by path, open until the process exits. The locks are POSIX locks,
which children do not inherit and network disks support."""


def hold(path: Path, wait_s: float = 10.0) -> str:
    """Lock a file until this process exits. Wait up to `wait_s`, since the holder may be exiting.
    Return "" on success, else the name of the process that holds the lock."""
    path = path.absolute()
    if path in _HELD:
        return ""
    file, end = path.open("a+"), time.monotonic() + wait_s
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() < end:
                time.sleep(0.2)
                continue
            file.seek(0)
            who = file.read().strip() or "another process"
            file.close()
            return who
        except OSError as error:  # Some network disks have no locks.
            log.warning(
                "cannot lock %s (%s); do not start another process in this folder", path, error
            )
            break
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    _HELD[path] = file
    return ""
