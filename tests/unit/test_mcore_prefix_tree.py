"""Prefix trees of sequences, and attention over them against every sequence alone."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from rlcore.mcore import attention, microbatch, prefix_tree
from rlcore.mcore.prefix_tree import LEAST, PrefixTree

Row = tuple[list[int], int]
"""Tokens of a sequence, and how many of them belong to its prompt."""


def tree_of(rows: list[Row]) -> PrefixTree:
    tokens = np.concatenate([np.array(tokens, np.int64) for tokens, _ in rows])
    trained = np.concatenate([np.arange(len(tokens)) >= prompt for tokens, prompt in rows])
    return prefix_tree.build(tokens, trained, [len(tokens) for tokens, _ in rows])


def offsets(tree: PrefixTree) -> list[int]:
    return [0, *accumulate(node.size for node in tree.nodes)]


def sizes(tree: PrefixTree) -> list[tuple[int, int, int]]:
    return [(node.parent, node.start, node.size) for node in tree.nodes]


P = list(range(100, 120))  # a prompt


def test_a_group_shares_its_prompt_but_for_the_last_token() -> None:
    tree = tree_of([([*P, 1, 2], 20), ([*P, 1, 2, 3], 20), ([*P, 4], 20)])
    assert sizes(tree) == [(-1, 0, 19), (0, 19, 4), (0, 19, 3), (0, 19, 2)]
    assert tree.paths == ((0, 2), (0, 1), (0, 3))
    assert tree.num_tokens == 28
    assert tree.rows(offsets(tree), [22, 23, 21]).tolist() == [
        *(*range(19), 23, 24, 25),
        *(*range(19), 19, 20, 21, 22),
        *(*range(19), 26, 27),
    ]


def test_a_turn_shares_the_history_with_its_trained_tokens() -> None:
    first = [*P, *range(30)]
    second = [*first, 7, 7, 7, 7, *range(50, 60)]
    rows = [(first, 20), (second, 54), ([*first[:45], 9, 9], 45)]
    assert sizes(tree_of(rows)) == [(-1, 0, 44), (0, 44, 20), (0, 44, 3)]
    assert tree_of(rows).paths == ((0, 1), (0, 1), (0, 2))
    again = tree_of([*rows, (second, 54)])  # which trains on the same tokens as another
    assert sizes(again) == [(-1, 0, 44), (0, 44, 9), (1, 53, 11), (1, 53, 11), (0, 44, 3)]
    assert again.paths == ((0, 1), (0, 1, 2), (0, 4), (0, 1, 3))


def test_short_prefixes_are_not_shared() -> None:
    rows = [(P[: LEAST + 1] + [n], LEAST + 1) for n in range(3)]
    assert tree_of(rows).num_tokens == LEAST + 6
    rows = [(P[:LEAST] + [n], LEAST) for n in range(3)]
    assert tree_of(rows).num_tokens == 3 * (LEAST + 1)


def test_a_sequence_that_ends_where_others_part() -> None:
    tree = tree_of([([*P, 1], 20), ([*P, 2], 20), (P, 20)])
    assert tree.paths == ((0, 1), (0, 2), (0, 1)) and tree.num_tokens == 23
    few = P[:3]
    assert tree_of([([*few, 1], 3), ([*few, 2], 3), (few, 3)]).paths == ((0,), (1,), (0,))


@st.composite
def families(draw: st.DrawFn) -> list[Row]:
    """Sequences of two tokens, many of which go on from a piece of another."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 8))):
        begin: list[int] = []
        if rows:
            other = draw(st.sampled_from(rows))[0]
            begin = other[: draw(st.integers(0, len(other)))]
        more = draw(st.lists(st.integers(0, 1), min_size=0 if begin else 1, max_size=20))
        tokens = begin + more
        rows.append((tokens, draw(st.integers(1, len(tokens)))))
    return rows


@given(families())
@example([([*P, *range(30)], 50), ([*P, *range(25), 98], 20), ([*P, *range(25), 99], 20)])
def test_each_row_computes_one_token_at_one_place_for_one_target(rows: list[Row]) -> None:
    tree = tree_of(rows)
    lengths = [len(tokens) for tokens, _ in rows]
    at = tree.rows(offsets(tree), lengths)
    assert tree.num_tokens == len(set(at.tolist())) <= sum(lengths)
    ends = [0, *accumulate(lengths)]
    holds: dict[int, tuple[int, int]] = {}
    predicts: dict[int, int] = {}
    trains: set[int] = set()
    followed: dict[int, tuple[int, ...]] = {}
    for (tokens, prompt), (start, end) in zip(rows, pairwise(ends), strict=True):
        mine = at[start:end].tolist()
        for position, (row, token) in enumerate(zip(mine, tokens, strict=True)):
            assert holds.setdefault(row, (position, token)) == (position, token)
            assert followed.setdefault(row, tuple(mine[:position])) == tuple(mine[:position])
            if position + 1 < len(tokens):
                assert predicts.setdefault(row, tokens[position + 1]) == tokens[position + 1]
                if position + 1 >= prompt:
                    assert row not in trains
                    trains.add(row)
    for i, node in enumerate(tree.nodes):
        assert node.parent < i
        users = sum(i in path for path in tree.paths)
        assert users == 1 or node.size >= LEAST or not any(n.parent == i for n in tree.nodes)
    assert sorted(tree.order()) == list(range(len(rows)))


@given(families(), st.integers(10, 60))
def test_micro_batches_hold_their_nodes_within_the_budget(rows: list[Row], budget: int) -> None:
    lengths = [len(tokens) for tokens, _ in rows]
    found = microbatch.groups(lengths, budget, tree_of(rows))
    assert sorted(row for group in found for row in group) == list(range(len(rows)))
    for group in found:
        computed = tree_of([rows[row] for row in group]).num_tokens
        assert computed <= budget or len(group) == 1


def test_siblings_go_into_one_micro_batch_if_their_tree_fits() -> None:
    rows = [([g, *P, *range(9)], 21) for g in (1, 2, 1, 2, 1)]
    lengths = [len(tokens) for tokens, _ in rows]
    assert microbatch.groups(lengths, 60, tree_of(rows)) == [[0, 2, 4], [1, 3]]
    assert microbatch.groups(lengths, 40, tree_of(rows)) == [[0, 2], [1, 3], [4]]
    assert microbatch.groups(lengths, 60) == [[0, 1], [2, 3], [4]]


# ---- attention

ROWS: list[Row] = [
    ([*P, *range(13)], 20),
    ([*P, *range(20, 22)], 20),
    ([*P, *range(13), 70, 71, *range(30, 47)], 35),
    ([*P, *range(13), 70, 71, *range(50, 58)], 35),
    ([5, 6, 7], 1),
    ([*reversed(P), 1], 20),
    ([*reversed(P), 2, 3, 4], 20),
]


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: Any
) -> Tensor:
    """Flash attention of packed sequences, sequence by sequence: causal to the last key."""
    outs = []
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        assert b - a <= max_q and d - c <= max_k
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        heads = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        out = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("flash", [None, varlen], ids=["padded", "flash"])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_attention_over_the_tree_equals_every_sequence_alone(
    cp: int, flash: Callable[..., Tensor] | None
) -> None:
    tree = tree_of(ROWS)
    assert len(tree.nodes) == 9 and max(len(path) for path in tree.paths) == 3
    multiple = 2 * cp if cp > 1 else 1
    full = [-(-node.size // multiple) * multiple for node in tree.nodes]
    full.append(multiple)  # a dummy sequence
    lengths = [len(tokens) for tokens, _ in ROWS]
    at = torch.from_numpy(tree.rows([0, *accumulate(full)], lengths))
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(full), n, 8, generator=g, dtype=torch.float64) for n in (4, 2, 2))
    for x in (q, k, v):
        x.requires_grad_()
    ours = torch.zeros_like(q)
    places = torch.zeros(sum(full), dtype=torch.int64)
    for rank in range(cp):
        index, positions = attention.local_positions(full, cp, rank, tree)
        places[index] = positions
        made = attention.plan(full, tree=tree, cp=cp, cp_rank=rank, flash=flash)
        ours = ours.index_copy(0, index, attention.attend(q[index], k, v, made))
    assert torch.equal(places[at], torch.cat([torch.arange(n) for n in lengths]))
    want = torch.cat(
        [
            F.scaled_dot_product_attention(
                *(x[rows].transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
            ).transpose(0, 1)
            for rows in at.split(lengths)
        ]
    )
    assert torch.allclose(ours[at], want, atol=1e-12)
    grad = torch.randn(want.shape, generator=g, dtype=torch.float64)
    grads = torch.autograd.grad(ours[at], (q, k, v), grad)
    wants = torch.autograd.grad(want, (q, k, v), grad)
    for a, b in zip(grads, wants, strict=True):
        assert torch.allclose(a, b, atol=1e-12)
