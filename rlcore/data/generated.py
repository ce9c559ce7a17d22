"""What generated tasks share: rows, and splits that have no prompt in common.

A prompt belongs to one split by a hash of its text, whatever the seed: what `val` asks can stand in
no training set.
"""

import hashlib
from typing import Literal, NamedTuple

Split = Literal["train", "val", "probe"]

NUM_VAL = 1024
"""Held-out prompts where nobody asks for another number."""
SHARES: dict[Split, range] = {"val": range(0, 20), "probe": range(20, 30), "train": range(30, 100)}


class Row(NamedTuple):
    """One question with a correct way to the answer."""

    prompt: str
    demonstration: str
    """Working and answer, without the end-of-sequence token."""
    answer: str
    tests: tuple[str, ...] = ()
    """Statements that hold of a right answer, where it is a program."""


def check(split: str, index: int) -> None:
    """ValueError for a row that no task has."""
    if split not in SHARES:
        raise ValueError(f"split {split}: allowed are {', '.join(SHARES)}")
    if index < 0:
        raise ValueError(f"index {index}: must not be negative")


def split_of(prompt: str) -> Split:
    """The split that a prompt belongs to."""
    bucket = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest(), "big") % 100
    return next(split for split, share in SHARES.items() if bucket in share)
