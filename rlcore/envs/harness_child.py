"""Process of one episode's harness: becomes a command, or calls a function.

    python -m rlcore.envs.harness_child CHANNEL_DESCRIPTOR PARENT_PID

`harness.HarnessRun` starts this process. A command replaces it, so that no Python interpreter waits
beside each command, and keeps what `open_guarded_channel` set up: it ends with the rank, adopts its
orphans, and cannot signal the trainer.
"""

import inspect
import os
import signal
import sys
from typing import Any

import msgspec
from msgspec import Struct

from rlcore.config import dotted
from rlcore.utils import net
from rlcore.utils.children import open_guarded_channel
from rlcore.utils.process_tree import MARK

TASK, SCORE = "RLCORE_TASK", "RLCORE_SCORE"
"""Environment variables with the paths of the task file and the score file."""
NOT_FOUND = 127
"""Exit code if the command cannot be started, as of a shell."""


class HarnessStart(Struct, frozen=True, kw_only=True):
    """First message to the child."""

    words: tuple[str, ...] = ()
    """The command; empty: call `function`."""
    function: str = ""
    """Dotted path of a function that takes the task, a dict."""
    env: dict[str, str]
    folder: str
    """Working directory."""
    sys_path: tuple[str, ...] = ()


def main() -> None:
    channel = open_guarded_channel("harness")
    start = net.decode(channel.first(), HarnessStart)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the request to end
    mark = os.environ[MARK]
    os.environ.clear()
    os.environ.update(start.env | {MARK: mark})
    os.chdir(start.folder)
    if start.words:
        _become(start.words)
    sys.path[:] = start.sys_path
    _, function = dotted.find("harness", start.function)
    with open(os.environ[TASK], "rb") as file:
        task = msgspec.json.decode(file.read())
    _write_score(_call(function, task))


def _become(words: tuple[str, ...]) -> None:
    """Replace this process by the command; exit if the command cannot be started."""
    try:
        os.execvp(words[0], words)  # noqa: S606  # a list of words, no shell
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_FOUND)


def _call(function: Any, task: dict[str, Any]) -> Any:
    returned = function(task)
    if not inspect.iscoroutine(returned):
        return returned
    import asyncio  # a quarter of the start of a process, and a command does not need it

    return asyncio.run(returned)


def _write_score(returned: Any) -> None:
    """Write what the function returned to the score file, unless it returned nothing."""
    if returned is None:
        return
    with open(os.environ[SCORE], "wb") as file:
        file.write(msgspec.json.encode(returned))


if __name__ == "__main__":
    main()
