"""Run a shell command in a folder that travels as a tar archive.

`workspace.py` gives the text of this module to `Sandbox.run`, followed by a call of `run_command`.
So it runs inside the sandbox, as an untrusted program, and imports only the standard library. Stdin
is the archive. Stdout is the archive after the command. Stderr is the output of the command, and a
last line with its exit status.
"""

import os
import select
import signal
import subprocess
import sys
import tarfile
from typing import Any

TIMED_OUT = 124
"""Exit status of a command that was killed at its deadline, as that of the command `timeout`."""


def run_command(command: str, folder: str, timeout_s: float) -> None:
    """Run a command in a folder of the archive. Raises OSError or TarError if the archive cannot be
    unpacked, or packed again."""
    tmp = os.environ["HOME"]
    top, script, printed = (
        os.path.join(tmp, name) for name in ("workspace", ".script", ".printed")
    )
    os.mkdir(top)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|*") as archive:
        # Python 3.14 would refuse absolute links, and before 3.11.4 there are no filters.
        trusted: dict[str, Any] = (
            {"filter": "fully_trusted"} if hasattr(tarfile, "tar_filter") else {}
        )
        archive.extractall(top, **trusted)
    with open(script, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(command)  # not an argument, because the kernel limits the length of those
    with open(printed, "w+b") as output:  # a file has a limit of size, and needs no reader
        process = subprocess.Popen(
            ["bash", script],
            cwd=os.path.join(top, folder),
            env=os.environ | {"PATH": _path(), "GIT_CONFIG_NOSYSTEM": "1"},  # it is hidden
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = _wait(process, timeout_s)
        output.seek(0)
        sys.stderr.buffer.write(output.read() + b"\n%d" % status)
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        archive.add(top, ".")


def _wait(process: subprocess.Popen, timeout_s: float) -> int:
    """Wait for a command, and return its exit status as a shell does. Kill the processes that it
    left behind, which would change files while they are packed."""
    has_ended = bool(select.select([os.pidfd_open(process.pid)], [], [], timeout_s)[0])
    os.killpg(process.pid, signal.SIGKILL)  # not waited for yet, so no other group has this number
    status = process.wait()
    if not has_ended:
        return TIMED_OUT
    return status if status >= 0 else 128 - status


def _path() -> str:
    return f"{os.path.dirname(sys.executable)}:/usr/local/bin:{os.environ['PATH']}"
