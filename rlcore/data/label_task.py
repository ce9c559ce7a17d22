"""Generated task: running sums of labelled digits; its splits share no prompt.

A correct response to the prompt `a7b5c9=` is `b5+7=12;c9+12=21;>21`. The labels make finding the
next term a look-up, so that a model of half a million parameters can solve the task. The number of
terms (2 to 16) has a geometric tail: the longest answer has five times the median length.

The number of terms is drawn before the split is decided (generated.py), so all splits have the same
lengths. There are only 100 prompts of two terms, so each split repeats its share of these prompts.
"""

import random
from collections.abc import Callable, Sequence

import numpy as np

from rlcore.data.generated import Split, TaskRow, check, split_of
from rlcore.records import Prompt
from rlcore.utils.seed import rng

NAME = "label"
PAD, EOS = 0, 1
LABELS = "abcdefghijklmnop"
CHARS = "0123456789+=;>*-" + LABELS
VOCAB = ("<pad>", "<eos>", *CHARS)
"""Vocabulary of 34 tokens: <pad>, <eos>, then one per character; a token's index is its id."""

_MIN_TERMS, _MAX_TERMS, _STOP = 2, 16, 0.28


def make(split: Split, seed: int, index: int) -> TaskRow:
    """Generate row `index` of a split, such as `train`. Equal arguments give equal rows."""
    check(split, index)
    random = rng(seed, NAME, split, index)
    num_terms = _draw_num_terms(random)
    while True:
        terms = [random.randrange(10) for _ in range(num_terms)]
        prompt = _prompt(terms)
        if split_of(prompt) == split:
            return TaskRow(prompt, _working(terms), str(sum(terms)))


def to_prompt(row: TaskRow, index: int, encode: Callable[[str], Sequence[int]]) -> Prompt:
    """Convert a row to `Prompt` number `index`."""
    tokens = np.array(encode(row.prompt), np.int32)
    return Prompt(index=index, dataset=NAME, tokens=tokens, answer=row.answer, text=row.prompt)


def _draw_num_terms(random: random.Random) -> int:
    n = _MIN_TERMS
    while n < _MAX_TERMS and random.random() > _STOP:
        n += 1
    return n


def _prompt(terms: list[int]) -> str:
    return "".join(f"{label}{t}" for label, t in zip(LABELS, terms, strict=False)) + "="


def _working(terms: list[int]) -> str:
    total, steps = terms[0], []
    for label, t in zip(LABELS[1:], terms[1:], strict=False):
        steps.append(f"{label}{t}+{total}={total + t};")
        total += t
    return "".join(steps) + f">{total}"
