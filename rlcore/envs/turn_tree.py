"""The tree of an episode's turns, as the log of rollouts has it.

    turn 0 --- turn 1 --- turn 2        row 0
           \\-- turn 3                   row 1

A turn is a stretch of sampled tokens and the context in front of it, back to the turn that it
continues. The tree is made from the token ids of the rows alone, so it is the same on the rank that
sampled the episode and on every rank that trains it. Every token of a row is in one turn. If an
environment shows nothing between two turns, they are one.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from rlcore.hf.messages import split_messages
from rlcore.hf.tokenizer import Tokenizer
from rlcore.hf.tool_calls import OPENING_TOKENS, family_of, reasoning_of, split_calls
from rlcore.records import IntArray, Sample
from rlcore.utils.errors import ConfigError


class EpisodeTurn(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A turn in the log of rollouts."""

    row: int
    """Row of the episode that trains the turn."""
    parent: int = -1
    """Number of the turn that it continues; -1: none, the context begins the conversation."""
    same: tuple[int, int] = (0, 0)
    """An earlier turn with the same parent, and how many messages of its context this turn's
    context begins with. `context` does not repeat them."""
    context: list[tuple[str, str]] = []
    """Messages between the parent and this turn: role, empty if unknown, and text."""
    sampled: list[tuple[bool, str]] = []
    """Text of the policy in pieces, each with whether it is tool calls."""
    num_context: int
    """Number of tokens of the context; without those of the data's prompt, which the log has."""
    num_tokens: int
    """Number of sampled tokens."""


def sampled_stretches(sample: Sample) -> Iterator[tuple[int, int, int]]:
    """Yield each stretch of sampled tokens as row, begin and end among the row's tokens."""
    for number, row in enumerate(sample.rows):
        is_sampled = np.concatenate(([False], row.versions >= 0, [False]))
        edges = np.flatnonzero(is_sampled[1:] != is_sampled[:-1]).tolist()
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            yield number, begin, end


def turns_of(sample: Sample, tokenizer: Tokenizer, prompt: IntArray) -> list[EpisodeTurn]:
    """Return the turns of an episode, row by row. `prompt`: tokens of the data's prompt, which are
    left out of a context that begins with them."""
    try:
        family = family_of(tokenizer.chat_template)
    except ConfigError:  # the model has no tool calls
        family = ""

    def read(ids: IntArray) -> str:
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    found: list[EpisodeTurn] = []
    paths: list[IntArray] = []  # all tokens up to the end of each turn
    contexts: list[list[tuple[str, str]]] = []  # whole contexts, by turn
    texts: list[str] = []
    last_row = -1
    for row, begin, end in sampled_stretches(sample):
        of_row = sample.rows[row]
        whole = np.concatenate((of_row.prompt, of_row.tokens))
        begin, end = begin + len(of_row.prompt), end + len(of_row.prompt)
        parent = len(found) - 1 if row == last_row else _longest(paths, whole[:begin])
        start = len(paths[parent]) if parent >= 0 else _common(whole[:begin], prompt)
        context = split_messages(read(whole[start:begin]), texts[parent] if parent >= 0 else "")
        siblings = [i for i, turn in enumerate(found) if turn.parent == parent]
        count, like = max(
            ((_num_equal(contexts[i], context), -i) for i in siblings), default=(0, 0)
        )
        text = read(whole[begin:end])
        reasoning = reasoning_of(
            tokenizer.chat_template, read(whole[max(0, begin - OPENING_TOKENS) : begin])
        )
        found.append(
            EpisodeTurn(
                row=row,
                parent=parent,
                same=(-like, count) if count else (0, 0),
                context=context[count:],
                sampled=split_calls(family, text, reasoning) if family else [(False, text)],
                num_context=begin - start,
                num_tokens=end - begin,
            )
        )
        paths.append(whole[:end])
        contexts.append(context)
        texts.append(text)
        last_row = row
    return found


def _longest(paths: Sequence[IntArray], context: IntArray) -> int:
    """Return the index of the longest path that a context begins with; -1: none."""
    fits = [i for i, path in enumerate(paths) if _common(context, path)]
    return max(fits, key=lambda i: len(paths[i]), default=-1)


def _common(tokens: IntArray, beginning: IntArray) -> int:
    """Return the length of `beginning` if the tokens begin with it, else 0."""
    size = len(beginning)
    return size if np.array_equal(tokens[:size], beginning) else 0


def _num_equal(ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]]) -> int:
    """Return how many messages at the beginning are equal."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
