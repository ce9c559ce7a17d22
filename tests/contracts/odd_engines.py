"""Engines that misbehave in a child process, for the tests of `ChildEngine`."""

import os
import sys
import time


class Odd:
    """Does nothing; `resume` and `poll` do what the factory asked for."""

    def __init__(self, resume=None, poll=None):
        self._resume, self._poll = resume, poll

    def submit(self, requests):
        pass

    def resume(self):
        if self._resume is not None:
            self._resume()

    def poll(self, timeout_s):
        if self._poll is not None:
            self._poll()
        time.sleep(timeout_s)
        return []


def stuck():
    """`resume` never returns."""
    return Odd(resume=lambda: time.sleep(3600))


def broken():
    """Cannot be built."""
    raise ValueError("no such weights")


def crashing():
    """Raises between calls, once it has been resumed."""
    state = {"on": False}

    def poll():
        if state["on"]:
            raise KeyError("lost a block")

    return Odd(resume=lambda: state.update(on=True), poll=poll)


def telling():
    """`resume` raises a sentence with the process's variables and heavy modules."""

    def tell():
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
        heavy = [m for m in ("transformers", "megatron", "pytest") if m in sys.modules]
        seen = [n for n in names if n in os.environ]
        raise ValueError(f"{seen} {heavy} {os.environ['OMP_NUM_THREADS']}")

    return Odd(resume=tell)
