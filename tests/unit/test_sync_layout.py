"""The plan of a push, with made-up ranks and weights."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.records import Shard
from rlcore.sync.layout import UpdatePlan, plan, shard_bytes

FLOAT = 4


def cut(name: str, shape: tuple[int, ...], dim: int, parts: int) -> list[Shard]:
    """Equal parts of a tensor."""
    size = shape[dim] // parts
    return [
        Shard(name=name, dtype="float32", shape=shape, dim=dim, start=i * size, stop=(i + 1) * size)
        for i in range(parts)
    ]


@st.composite
def cases(draw):
    """Trainers of TP x DP over two stages, some of them with engines, and rollout ranks apart; the
    ranks of both in sites of any size."""
    tp, dp, stages = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3)), 2
    trainers = tp * dp * stages
    others = draw(st.integers(0, 5))
    holdings: dict[int, list[Shard]] = {rank: [] for rank in range(trainers + others)}
    for i in range(draw(st.integers(1, 12))):
        shape = (draw(st.integers(1, 6)) * 4, draw(st.integers(1, 3)) * 4)
        stage, whole = i % stages, draw(st.booleans())
        parts = cut(f"w{i}", shape, draw(st.integers(0, 1)), 1 if whole else tp)
        for rank in range(stage * tp * dp, (stage + 1) * tp * dp):
            holdings[rank].append(parts[0 if whole else rank % tp])
    ranks = list(range(trainers + others))
    draw(st.randoms(use_true_random=False)).shuffle(ranks)
    cuts = sorted(draw(st.sets(st.integers(1, len(ranks)), max_size=3)) | {len(ranks)})
    sites = [ranks[a:b] for a, b in zip([0, *cuts], cuts, strict=False) if ranks[a:b]]
    needs = draw(st.sets(st.sampled_from(range(trainers + others)), min_size=1))
    return holdings, sites, sorted(needs), draw(st.integers(1, 2000))


def names(holdings: dict[int, list[Shard]]) -> dict[str, int]:
    """Bytes of every tensor."""
    return {s.name: math.prod(s.shape) * FLOAT for rows in holdings.values() for s in rows}


def arriving(made: UpdatePlan, site: int) -> list[tuple[str, int, int]]:
    """(tensor, first, last) of what reaches the ranks of a site."""
    return [
        (slot.shard.name, slot.shard.start, slot.shard.stop)
        for load in made.loads
        for part in load.parts
        if part.site == site
        for slot in part.slots
    ]


@given(cases())
def test_every_tensor_is_whole_once_in_every_site_that_needs_it(case):
    holdings, sites, needs, max_bytes = case
    made = plan(holdings, sites, needs, max_bytes)
    sizes = {s.name: s.shape[s.dim] for rows in holdings.values() for s in rows}
    assert sorted(m.name for load in made.loads for m in load.tensors) == sorted(sizes)
    for number, site in enumerate(made.sites):
        came = sorted(arriving(made, number))
        if not set(site) & set(needs):
            assert not came and not made.members(number)
            continue
        assert set(site) & set(needs) <= set(made.members(number)) <= set(site)
        for name, size in sizes.items():
            rows = [(start, stop) for n, start, stop in came if n == name]
            assert rows[0][0] == 0 and rows[-1][1] == size
            assert all(a[1] == b[0] for a, b in pairwise(rows))


@given(cases())
def test_only_what_a_site_does_not_have_crosses_to_it_and_owners_have_what_they_give(case):
    holdings, sites, needs, max_bytes = case
    made = plan(holdings, sites, needs, max_bytes)
    for number, load in enumerate(made.loads):
        for part in load.parts:
            site = made.sites[part.site]
            assert part.root in site
            for slot in part.slots:
                assert slot.shard in holdings[part.owner]
                assert load.tensors[slot.tensor].name == slot.shard.name
                inside = any(slot.shard in holdings[rank] for rank in site)
                assert (part.owner == part.root) == inside, (number, part)
                assert inside or part.root in needs
    copies = sum(bool(set(site) & set(needs)) for site in sites)
    assert made.slow_bytes <= copies * (made.num_bytes + 16 * len(names(holdings)) * 4)


@given(cases())
def test_buckets_are_bounded_and_tensors_lie_apart_in_them(case):
    holdings, sites, needs, max_bytes = case
    made = plan(holdings, sites, needs, max_bytes)
    sizes = names(holdings)
    for load in made.loads:
        assert load.num_bytes <= max_bytes or len(load.tensors) == 1
        ends = [0]
        for meta in load.tensors:
            assert meta.offset >= ends[-1] and meta.offset % 16 == 0
            ends.append(meta.offset + sizes[meta.name])
        assert ends[-1] == load.num_bytes
        for part in load.parts:
            at = 0
            for slot in part.slots:
                assert slot.offset >= at and slot.offset % 16 == 0
                at = slot.offset + shard_bytes(slot.shard)
            assert at == part.num_bytes


@given(cases(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_ranks(case, order: random.Random):
    holdings, sites, needs, max_bytes = case
    keys, wanting = list(holdings), list(needs)
    order.shuffle(keys)
    order.shuffle(wanting)
    shuffled = {rank: holdings[rank] for rank in keys}
    inner = [order.sample(site, len(site)) for site in sites]
    assert plan(shuffled, inner, wanting, max_bytes) == plan(holdings, sites, needs, max_bytes)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 40), st.randoms(use_true_random=False))
def test_owners_and_roots_carry_equal_loads_but_for_one_bucket(copies, receivers, count, rng):
    """Copies of the same weights on every trainer; the rollout ranks are apart."""
    shapes = [(rng.randrange(1, 30), rng.randrange(1, 30)) for _ in range(count)]
    rows = [cut(f"w{i}", shape, 0, 1)[0] for i, shape in enumerate(shapes)]
    trainers, others = range(copies), range(copies, copies + receivers)
    made = plan(dict.fromkeys(trainers, rows), [trainers, others], [*trainers, *others], 2000)
    sent, got, inside = dict.fromkeys(trainers, 0), dict.fromkeys(others, 0), {}
    for load in made.loads:
        for part in load.parts:
            size = sum(shard_bytes(slot.shard) for slot in part.slots)
            if part.owner == part.root:
                inside[part.owner] = inside.get(part.owner, 0) + size
            else:
                sent[part.owner] += size
                got[part.root] += size
    assert sum(sent.values()) == sum(got.values()) == sum(names({0: rows}).values())
    for load in (sent, got, {rank: inside.get(rank, 0) for rank in trainers}):
        assert max(load.values()) - min(load.values()) <= made.bucket_bytes


def test_shard_i_of_n_goes_to_rank_i_of_the_other_cluster():
    """As in RollMux: n trainers with a shard each, n rollout ranks, disjoint pairs."""
    n = 4
    holdings = {rank: [cut("w", (8, 8), 0, n)[rank]] for rank in range(n)}
    made = plan(holdings, [range(n), range(n, 2 * n)], range(n, 2 * n), 10**6)
    assert [(p.owner, p.root) for p in made.loads[0].parts] == [(i, i + n) for i in range(n)]
    assert made.slow_bytes == made.num_bytes == 8 * 8 * FLOAT
    assert made.linked() == tuple(range(2 * n)) and made.members(0) == ()


@pytest.mark.parametrize(
    ("holdings", "sites", "needs", "message"),
    [
        ({0: cut("w", (4, 4), 0, 2)[:1]}, [[0]], [0], "no rank has 2:4 of dimension 0"),
        ({0: cut("w", (4, 4), 0, 2), 1: cut("w", (4, 4), 0, 1)}, [[0, 1]], [0], "has 0:4 of"),
        ({0: cut("w", (4, 4), 0, 2) * 2}, [[0]], [0], "rank 0 provides 0:2 .* twice"),
        ({0: cut("w", (4, 4), 0, 1), 1: cut("w", (4, 8), 0, 1)}, [[0]], [0], "equal on all"),
        ({0: cut("w", (4, 4), 0, 1)}, [[0], [0]], [0], "rank 0 appears twice"),
        ({0: cut("w", (4, 4), 0, 1)}, [[0]], [0, 3], r"ranks \[3\] need weights but are in no"),
    ],
)
def test_what_cannot_be_planned_is_refused(holdings, sites, needs, message):
    with pytest.raises(ValueError, match=message):
        plan(holdings, sites, needs, 100)


def test_a_bucket_of_no_bytes_is_refused():
    with pytest.raises(ValueError, match="max_bytes 0"):
        plan({0: cut("w", (4, 4), 0, 1)}, [[0]], [0], 0)
