"""A plain yardstick in numba: one flat arena holding a suffix automaton per prompt.

State s: link, length, weight (reward-weighted occurrences), best child. Transitions: one
open-addressing table keyed by (state, token), and a list of edges per state. A request carries
(state, matched length): a step costs O(tokens appended), a draft is a walk over best children.
No limit on the match, no text of the live request, no tie rule: it is no reference of rlcore's.
"""

from typing import NamedTuple

import numpy as np
from drafts.jit import njit

# Top of the multiplicative hash; 2^63 / golden ratio, odd.
MULTIPLIER = 0x4F1BBCDCBFA53E0B


class Arena(NamedTuple):
    link: np.ndarray  # int32 [S]
    length: np.ndarray  # int32 [S]
    best_token: np.ndarray  # int32 [S]
    best_to: np.ndarray  # int32 [S], -1: none
    best_p: np.ndarray  # float32 [S]
    keys: np.ndarray  # int64 [power of two], -1: free
    to: np.ndarray  # int32, beside keys

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self)


@njit
def _slot(keys, key, mask):
    i = (key * MULTIPLIER >> 20) & mask
    while keys[i] != key and keys[i] != -1:
        i = (i + 1) & mask
    return i


@njit
def _clone(state, copy, keys, to, mask, head, following, token, num_edges):
    """Copy the edges of `state` to `copy`; the number of edges after that."""
    e = head[state]
    while e != -1:
        source = _slot(keys, (np.int64(state) << 32) | token[e], mask)
        target = _slot(keys, (np.int64(copy) << 32) | token[e], mask)
        keys[target] = (np.int64(copy) << 32) | token[e]
        to[target] = to[source]
        token[num_edges] = token[e]
        following[num_edges] = head[copy]
        head[copy] = num_edges
        num_edges += 1
        e = following[e]
    return num_edges


@njit
def _build(
    text, starts, roots, weights, num, link, length, weight, keys, to, head, following, token
):
    """Insert every sequence; the number of states."""
    mask = np.int64(len(keys) - 1)
    num_edges = 0
    for q in range(len(starts) - 1):
        last = np.int64(roots[q])
        for j in range(starts[q], starts[q + 1]):
            c = np.int64(text[j])
            slot = _slot(keys, (last << 32) | c, mask)
            current = np.int64(-1)
            p = last
            if keys[slot] == -1:
                current = num
                num += 1
                length[current] = length[last] + 1
                weight[current] += weights[q]
                while p != -1:
                    key = (p << 32) | c
                    slot = _slot(keys, key, mask)
                    if keys[slot] != -1:
                        break
                    keys[slot] = key
                    to[slot] = current
                    token[num_edges] = c
                    following[num_edges] = head[p]
                    head[p] = num_edges
                    num_edges += 1
                    p = np.int64(link[p])
                if p == -1:
                    link[current] = roots[q]
                    last = current
                    continue
            following_state = np.int64(to[slot])
            found = following_state
            if length[following_state] != length[p] + 1:
                found = num
                num += 1
                length[found] = length[p] + 1
                link[found] = link[following_state]
                link[following_state] = found
                num_edges = _clone(
                    following_state, found, keys, to, mask, head, following, token, num_edges
                )
                while p != -1:
                    slot = _slot(keys, (p << 32) | c, mask)
                    if keys[slot] == -1 or to[slot] != following_state:
                        break
                    to[slot] = found
                    p = np.int64(link[p])
            if current >= 0:
                link[current] = found
                last = current
            else:
                weight[found] += weights[q]
                last = found
    return num


@njit
def _finish(order, link, weight, keys, to, head, following, token, best_token, best_to, best_p):
    """Sum the weights up the links, then choose each state's heaviest child."""
    mask = np.int64(len(keys) - 1)
    for k in range(len(order) - 1, -1, -1):
        s = order[k]
        if link[s] >= 0:
            weight[link[s]] += weight[s]
    for s in range(len(link)):
        most, total = np.float32(-1.0), np.float32(0.0)
        e = head[s]
        while e != -1:
            child = to[_slot(keys, (np.int64(s) << 32) | token[e], mask)]
            total += weight[child]
            if weight[child] > most:
                most = weight[child]
                best_token[s] = token[e]
                best_to[s] = child
            e = following[e]
        best_p[s] = most / total if total > 0 else 0.0


@njit
def _advance(link, length, keys, to, roots, states, matched, requests, tokens, offsets):
    mask = np.int64(len(keys) - 1)
    for k in range(len(requests)):
        i = requests[k]
        state, m = np.int64(states[i]), matched[i]
        for j in range(offsets[k], offsets[k + 1]):
            while True:
                slot = _slot(keys, (state << 32) | np.int64(tokens[j]), mask)
                if keys[slot] != -1:
                    state = np.int64(to[slot])
                    m += 1
                    break
                if state == roots[i]:
                    m = 0
                    break
                state = np.int64(link[state])
                m = length[state]
        states[i], matched[i] = state, m


@njit
def _draft(
    link, length, best_token, best_to, best_p, states, requests, windows, min_p, min_match, out, num
):
    for k in range(len(requests)):
        s = states[requests[k]]
        num[k] = 0
        if length[s] < min_match:
            continue
        while best_to[s] < 0 and link[s] >= 0 and length[link[s]] >= min_match:
            s = link[s]
        p = np.float32(1.0)
        while num[k] < windows[k] and best_to[s] >= 0:
            p *= best_p[s]
            if p < min_p:
                break
            out[k, num[k]] = best_token[s]
            s = best_to[s]
            num[k] += 1


def build(
    text: np.ndarray,
    offsets: np.ndarray,
    prompt_of: np.ndarray,
    weights: np.ndarray,
    num_prompts: int,
) -> Arena:
    """The arena of sequences text[offsets[q] : offsets[q + 1]] of prompts prompt_of[q]; the root
    of prompt i is state i."""
    n = len(text)
    states, edges = 2 * n + num_prompts + 1, 4 * n + 16
    link, length = np.full(states, -1, np.int32), np.zeros(states, np.int32)
    weight = np.zeros(states, np.float32)
    head = np.full(states, -1, np.int32)
    following, token = np.empty(edges, np.int32), np.empty(edges, np.int32)
    slots = 1 << int(np.ceil(np.log2(max(64, n * 3.2))))
    keys, to = np.full(slots, -1, np.int64), np.zeros(slots, np.int32)
    num = _build(
        text, offsets, prompt_of.astype(np.int32), weights.astype(np.float32), num_prompts, link,
        length, weight, keys, to, head, following, token,
    )  # fmt: skip
    link, length = link[:num].copy(), length[:num].copy()
    best_token, best_to = np.zeros(num, np.int32), np.full(num, -1, np.int32)
    best_p = np.zeros(num, np.float32)
    order = np.argsort(length, kind="stable").astype(np.int32)
    _finish(
        order, link, weight[:num], keys, to, head[:num], following, token, best_token, best_to,
        best_p,
    )  # fmt: skip
    return Arena(link, length, best_token, best_to, best_p, keys, to)


def advance(a: Arena, roots, states, matched, requests, tokens, offsets) -> None:  # noqa: ANN001
    """Carry (states, matched) of `requests` over tokens[offsets[k] : offsets[k + 1]], in place."""
    _advance(
        a.link, a.length, a.keys, a.to, roots, states, matched, requests, tokens, offsets
    )  # fmt: skip


def draft(  # noqa: ANN001
    a: Arena, states, requests, windows, min_p: float, min_match: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [B, W] and lengths int32 [B] of the heaviest paths of `requests`."""
    out = np.zeros((len(requests), int(windows.max(initial=1))), np.int32)
    num = np.zeros(len(requests), np.int32)
    _draft(
        a.link, a.length, a.best_token, a.best_to, a.best_p, states, requests, windows,
        np.float32(min_p), min_match, out, num,
    )  # fmt: skip
    return out, num
