"""Common parts of generated tasks: rows, and splits that have no prompt in common.

The hash of a prompt's text determines its split, whatever the seed. A prompt of `val` is therefore
never in a training set.
"""

import hashlib
from typing import Literal, NamedTuple

Split = Literal["train", "val", "probe"]

NUM_VAL = 1024
"""Default number of validation prompts of a task, which are never trained on."""
SHARES: dict[Split, range] = {"val": range(0, 20), "probe": range(20, 30), "train": range(30, 100)}


class TaskRow(NamedTuple):
    """Row of a generated task: a prompt, a correct solution and the answer."""

    prompt: str
    demonstration: str
    """Correct solution, answer included, without the end-of-sequence token."""
    answer: str
    tests: tuple[str, ...] = ()
    """Assertions that a right answer passes, if the answer is a program."""


def check(split: str, index: int) -> None:
    """Raise ValueError if the split is unknown or the index is negative."""
    if split not in SHARES:
        raise ValueError(f"split {split}: allowed are {', '.join(SHARES)}")
    if index < 0:
        raise ValueError(f"index {index}: must not be negative")


def split_of(prompt: str) -> Split:
    """Return the split to which a prompt belongs, by the hash of its text."""
    bucket = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest(), "big") % 100
    return next(split for split, share in SHARES.items() if bucket in share)
