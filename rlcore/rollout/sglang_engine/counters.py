"""Counters of decode steps and drafts in a memory-mapped file. The scheduler adds to the counters.
The engine reads the difference since its last read, because counters are never reset."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

FILE = "drafts"
"""Name of the counter file in the engine's folder."""
_COUNTS = (
    "decode_steps",
    "verify_steps",
    "verify_rows",
    "verify_inputs",
    "verify_tokens",
    "drafted_tokens",
    "accepted_tokens",
)
_SECONDS = ("draft_s", "verify_s")
_NAMES = (*_COUNTS, *_SECONDS)
_SIZES = 24
"""Number of batch-size classes: 1, 2 to 3, 4 to 7, ..."""


class Counters:
    """One process's access to the shared counters. Names and units are those of `Stats`."""

    def __init__(self, folder: str, *, new: bool = False) -> None:
        """Map the counter file. If `new`, create the file, else open the existing file."""
        shape = (len(_NAMES) + 3 * _SIZES,)
        mode: Literal["w+", "r+"] = "w+" if new else "r+"
        self._numbers = np.memmap(Path(folder) / FILE, np.float64, mode, shape=shape)
        self._taken: np.ndarray = self._numbers.copy()

    def add(self, **numbers: float) -> None:
        """Add these numbers to the counters of the same names."""
        for name, number in numbers.items():
            self._numbers[_NAMES.index(name)] += number

    def step(self, running: int, gained: int, drafts: bool) -> None:
        """Count a decode step that added `gained` tokens to `running` requests. `drafts`: whether
        drafting was on in this step."""
        at = len(_NAMES) + 3 * min(running.bit_length() - 1, _SIZES - 1)
        self._numbers[at : at + 3] += running, gained, running * drafts
        self.add(decode_steps=1)

    def take(self) -> dict[str, Any]:
        """Return how much the counters have grown since the last call, as fields of `Stats`."""
        now = np.array(self._numbers)
        new, self._taken = now - self._taken, now
        found: dict[str, Any] = {name: int(new[i]) for i, name in enumerate(_COUNTS)}
        found |= {name: float(new[_NAMES.index(name)]) for name in _SECONDS}
        sizes = new[len(_NAMES) :].astype(int).reshape(_SIZES, 3)
        last = int(np.flatnonzero(sizes.any(1))[-1]) + 1 if sizes.any() else 0
        found["by_batch"] = tuple((int(a), int(b), int(c)) for a, b, c in sizes[:last])
        return found
