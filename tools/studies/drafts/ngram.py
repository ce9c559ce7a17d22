"""Drafting from a request's own text: the rules of vLLM's ngram proposer and of prompt lookup.

Written from their published behaviour. vLLM: the longest n-gram of min_n..max_n tokens that ends
the text and occurs earlier, its first occurrence, the k tokens after it. The scan here stops at
the first occurrence of max_n tokens, which vLLM's pass over the whole text does not: a little kind
to it. Prompt lookup (PLD): n from max_n down to 1, first occurrence, the k tokens after it.
"""

import numpy as np
from drafts.jit import njit


@njit
def vllm_rule(text: np.ndarray, min_n: int, max_n: int) -> int:
    """Where the draft starts in `text`; -1: no earlier occurrence of min_n tokens or more."""
    n = len(text)
    best, at = min_n - 1, -1
    for i in range(n - 1):
        if text[i] != text[n - 1]:
            continue
        k = 1
        while k < max_n and k <= i and text[i - k] == text[n - 1 - k]:
            k += 1
        if k > best:
            best, at = k, i + 1
            if k == max_n:
                break
    return at


def lookup_rule(text: np.ndarray, max_n: int) -> int:
    """Where the draft starts in `text`; -1: nowhere. Vector compares, as the peer's own form."""
    n = len(text)
    for g in range(min(max_n, n - 1), 0, -1):
        same = text[: n - g] == text[n - g]
        for j in range(1, g):
            same &= text[j : n - g + j] == text[n - g + j]
        hits = np.flatnonzero(same)
        if len(hits):
            return int(hits[0]) + g
    return -1
