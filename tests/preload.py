"""What a fork of `tests.forks` has imported when it begins."""

import errno
import threading
from multiprocessing import reduction

import rlcore.cli.builders
import rlcore.cli.train
import rlcore.cli.world
import rlcore.mcore.learner  # noqa: F401
import tests.kit
import tests.runs  # noqa: F401

_recvfds = reduction.recvfds


def _receive(*args: int) -> list[int]:
    """Let the server outlive a process that is killed while it asks for a fork."""
    try:
        return _recvfds(*args)
    except EOFError as e:
        raise OSError(errno.ECONNABORTED, "the process that asked is gone") from e


reduction.recvfds = _receive

assert threading.active_count() == 1, "a thread does not survive a fork"
