"""Environments for tests, named by dotted path. They speak in numbers: token ids, as text."""

import os
import threading
import time
from pathlib import Path
from typing import Any

from rlcore.config.schema import EnvConfig

_second_began = threading.Event()


class Sums:
    """Three turns; shows twice a number that hangs on the turn, scores 1 by the last one's."""

    wants_tokens = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.left, self.k = 3, int(options["episode"].rpartition(".")[2])
        return [], {}

    def step(self, action: list[int]):
        self.left -= 1
        number = sum(action) % 20 + 2
        over = self.left == 0
        return [number, number], number / 32 if over else 0.0, over, False, {"left": self.left}

    def close(self) -> None: ...


class Waits(Sums):
    """The first episode's environment waits for the second's to have had a turn."""

    def step(self, action: list[int]):
        if self.k == 1:
            _second_began.set()
        elif not _second_began.wait(60):
            raise TimeoutError("the second episode has had no turn")
        return super().step(action)


class Odd(Sums):
    """Misbehaves in as many ways as a group has members."""

    def step(self, action: list[int]):
        if self.left == 2:
            if self.k == 0:
                raise KeyError("no such door")
            if self.k == 1:
                time.sleep(3600)
            if self.k == 2:
                os._exit(7)
        return super().step(action)


class Flaky(Sums):
    """Fails in the first step of an episode's first attempt."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.mark = Path(os.environ["MARKS_DIR"], options["episode"])
        return super().reset(seed=seed, options=options)

    def step(self, action: list[int]):
        if not self.mark.exists():
            self.mark.touch()
            raise ConnectionError("the server is busy")
        return super().step(action)


class Closes(Sums):
    """Leaves a mark when it is closed. Its first turn takes as many seconds as its number says."""

    name = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.name = options["episode"]
        return super().reset(seed=seed, options=options)

    def step(self, action: list[int]):
        time.sleep(self.k)
        return super().step(action)

    def close(self) -> None:
        if self.name:
            time.sleep(0.2)
            Path(os.environ["MARKS_DIR"], self.name).touch()


class Mute(Sums):
    """Never answers."""

    def step(self, action: list[int]):
        time.sleep(3600)


class Junk(Sums):
    """Answers with what is no observation."""

    def step(self, action: list[int]):
        return 7, 0.0, False, False, {}


class Missing:
    """Cannot be made here."""

    def __init__(self) -> None:
        raise ModuleNotFoundError("No module named 'alfworld'")

    def reset(self) -> None: ...

    def step(self) -> None: ...

    def close(self) -> None: ...


class PatientConfig(EnvConfig):
    """Of `Patient`."""


class Patient(Sums):
    """Takes the section."""

    def __init__(self, config: PatientConfig) -> None:
        self.config = config


class Strange(Sums):
    """Shows a token that no model has."""

    def step(self, action: list[int]):
        seen, *rest = super().step(action)
        return [2**40 if self.k == 0 else 10_000 if self.k == 1 else seen[0]], *rest
