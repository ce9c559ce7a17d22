"""The tiny task: running sums of labelled digits, made on the fly; its splits share no prompt.

    a7b5c9= -> b5+7=12;c9+12=21;>21

The label makes finding the next term a look-up, so that a model of half a million parameters can do
it; 2 to 16 terms with a geometric tail make the longest answer five times as long as the median.

A prompt belongs to one split by a hash of its text, whatever the seed: what `val` asks can stand in
no training set. The number of terms is drawn before the split decides, so all splits have the same
lengths; the 100 prompts of two terms are shared out too, so a split repeats its few of them.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from rlcore.records import Prompt
from rlcore.utils.seed import rng

Split = Literal["train", "val", "probe"]

NAME = "label"
PAD, EOS = 0, 1
LABELS = "abcdefghijklmnop"
CHARS = "0123456789+=;>*-" + LABELS
VOCAB = ("<pad>", "<eos>", *CHARS)
"""34 tokens, one for each character; the id is the position."""
NUM_VAL = 1024
"""Held-out prompts where nobody asks for another number."""

_MIN_TERMS, _MAX_TERMS, _STOP = 2, 16, 0.28
_SHARES: dict[Split, range] = {"val": range(0, 20), "probe": range(20, 30), "train": range(30, 100)}


class Row(NamedTuple):
    """One question with a correct way to the answer."""

    prompt: str
    demonstration: str
    """Working and answer, without the end-of-sequence token."""
    answer: str


def make(split: Split, seed: int, index: int) -> Row:
    """The row number `index` of a split: endless, the same for the same three arguments."""
    if split not in _SHARES:
        raise ValueError(f"split {split}: allowed are {', '.join(_SHARES)}")
    if index < 0:
        raise ValueError(f"index {index}: must not be negative")
    random = rng(seed, NAME, split, index)
    num_terms = _draw_num_terms(random)
    while True:
        terms = [random.randrange(10) for _ in range(num_terms)]
        prompt = _prompt(terms)
        if _bucket(prompt) in _SHARES[split]:
            return Row(prompt, _working(terms), str(sum(terms)))


def to_prompt(row: Row, index: int, encode: Callable[[str], Sequence[int]]) -> Prompt:
    """A row as the prompt number `index`."""
    tokens = np.array(encode(row.prompt), np.int32)
    return Prompt(index=index, source=NAME, tokens=tokens, answer=row.answer, text=row.prompt)


def split_of(prompt: str) -> Split:
    """The split that a prompt belongs to."""
    bucket = _bucket(prompt)
    return next(split for split, share in _SHARES.items() if bucket in share)


def _draw_num_terms(random: random.Random) -> int:
    n = _MIN_TERMS
    while n < _MAX_TERMS and random.random() > _STOP:
        n += 1
    return n


def _bucket(prompt: str) -> int:
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest(), "big") % 100


def _prompt(terms: list[int]) -> str:
    return "".join(f"{label}{t}" for label, t in zip(LABELS, terms, strict=False)) + "="


def _working(terms: list[int]) -> str:
    total, steps = terms[0], []
    for label, t in zip(LABELS[1:], terms[1:], strict=False):
        steps.append(f"{label}{t}+{total}={total + t};")
        total += t
    return "".join(steps) + f">{total}"
