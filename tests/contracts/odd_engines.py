"""Engines that misbehave in a child process, for the tests of `ChildEngine`."""

import os
import sys
import time
from pathlib import Path

from rlcore.rollout.errors import EngineFailedError
from rlcore.utils.errors import ConfigError


class Odd:
    """Does nothing; `resume`, `poll` and `close` do what the factory asked for."""

    def __init__(self, resume=None, poll=None, close=None):
        self._resume, self._poll, self._close = resume, poll, close

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

    def close(self):
        if self._close is not None:
            self._close()


def stuck():
    """`resume` never returns."""
    return Odd(resume=lambda: time.sleep(3600))


def patient(deadline_s):
    """Has a deadline of its own."""
    return Odd()


def broken():
    """Cannot be built."""
    raise ConfigError("no such weights")


def short_of_memory():
    """Cannot be built, and that is no setting's fault."""
    raise RuntimeError("CUDA out of memory")


class Breaking(Odd):
    """Finds out in a call that it is gone; what it raises then does not end the process at once."""

    def begin_load(self, version):
        pass

    def load_bucket(self, *_):
        raise EngineFailedError("process 7 of SGLang was killed by signal 9")

    end_load = abort = load_bucket


def breaking():
    """See `Breaking`."""
    return Breaking(close=lambda: time.sleep(3600))


class Counting(Odd):
    """Its last call says how long it was to wait for events."""

    waited_s = 0.0

    def poll(self, timeout_s):
        self.waited_s += timeout_s
        return super().poll(timeout_s)

    def begin_load(self, version):
        pass

    def load_bucket(self, bucket, payloads):
        pass

    def end_load(self):
        raise RuntimeError(f"waited {self.waited_s:g} s")


def counting():
    """See `Counting`."""
    return Counting()


class Picky(Odd):
    """Takes some time for a bucket, refuses that with checksum 2 and ends at that with checksum 9.
    `end_load` says which buckets came."""

    def begin_load(self, version):
        self.came = []

    def load_bucket(self, bucket, payloads):
        time.sleep(0.05)
        self.came.append(bucket.checksum)
        if bucket.checksum == 9:
            os._exit(3)
        if bucket.checksum == 2:
            raise ValueError("bucket 2 is odd")

    def end_load(self):
        raise RuntimeError(f"came: {self.came}")


def picky():
    """See `Picky`."""
    return Picky()


def tidy(file):
    """Leaves a file when it is closed."""
    return Odd(close=lambda: Path(file).write_text("closed"))


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


def sized(tp):
    """Ends at once where it is asked for more ranks than 2, and says its size otherwise."""
    if tp > 2:
        raise RuntimeError(f"{tp} ranks are too many")
    return Odd(poll=None, resume=lambda: _refuse(f"size {tp}"))


def _refuse(text):
    raise RuntimeError(text)


def dies_once(file, tp):
    """Ends as it starts for the first time with 2 ranks."""
    if tp == 2 and not Path(file).exists():
        Path(file).write_text("was here")
        os._exit(7)
    return Breaking()


def babbling():
    """`resume` writes into the stream of frames."""
    return Odd(resume=lambda: os.write(int(sys.argv[1]), b"\xff" * 8))


def slow_to_start():
    """Never gets ready."""
    time.sleep(3600)


LATE_S = 1.0


def late(**settings):
    """The torch engine, which gets ready after LATE_S."""
    from rlcore.rollout.torch_engine.engine import build

    time.sleep(LATE_S)
    return build(**settings)


def refuses(**settings):
    """Settings that cannot work, found when the engine starts."""
    raise ConfigError("--rollout.tp 1: this engine has other sizes")
