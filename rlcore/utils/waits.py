"""Say on the terminal what a run waits for, so that no long wait is silent."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rlcore.utils.log import log

FIRST_S = 5.0
"""Seconds of a wait before the first line."""
EVERY_S = 10.0
"""Seconds between two lines."""


@contextmanager
def waiting(what: str, first_s: float = FIRST_S, every_s: float = EVERY_S) -> Iterator[None]:
    """While the `with` block runs, log `what` and its seconds so far: after `first_s`, then after
    every `every_s`. A short wait logs nothing."""
    began, is_over = time.monotonic(), threading.Event()

    def tell() -> None:
        pause_s = first_s
        while not is_over.wait(pause_s):
            log.info("%s: %.0f s so far", what, time.monotonic() - began)
            pause_s = every_s

    thread = threading.Thread(target=tell, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
