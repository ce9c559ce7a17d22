"""Which jobs share nodes: numbers worked by hand, promises under any order of arrivals and
departures, the bill against the cheapest partition."""

import json
import math
import random
import statistics
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.sched.cluster import Cluster, JobGroup, MuxJob, NodePool, Nodes
from rlcore.sched.drift import drifted, grown
from rlcore.sched.phase_mux import Member
from rlcore.sim.mux_baselines import optimum
from rlcore.sim.mux_group import Iteration, MuxSimulation, VirtualJob

ROLLOUT = NodePool(price=14.8, memory_gb=1500, switch_s=1.0)
TRAIN = NodePool(price=42.24, memory_gb=1500, switch_s=5.0)


def job(name, rollout_s, train_s, slo=2.0, nodes=1, **more):
    sizes = {"rollout_nodes": nodes, "train_nodes": nodes} | more
    return MuxJob(id=name, rollout_s=rollout_s, train_s=train_s, slo=slo, **sizes)


def test_two_equal_jobs_share_one_pair_of_nodes():
    cluster = Cluster(ROLLOUT, TRAIN)
    first = cluster.admit(job("A", 100, 100))
    assert (first.kind, first.period_s) == ("isolated", 200)
    assert first.added == pytest.approx(57.04)
    second = cluster.admit(job("B", 100, 100))
    assert (second.kind, second.added, second.group) == ("packed", 0.0, first.group)
    assert second.period_s == 210  # its chain is 100 + 1 + 100 + 5; the train node has 2 x 105
    assert cluster.cost == first.added
    third = cluster.admit(job("C", 100, 100))
    assert third.kind == "isolated"
    assert third.passed == {"saturated": 1}
    assert "other groups: 1 saturated" in third.explain()


def test_rollout_heavy_jobs_bring_rollout_nodes_of_their_own():
    """D + D + E of RollMux: 24 H20 and 8 H800."""
    cluster = Cluster(ROLLOUT, TRAIN)
    for name, rollout_s, train_s in (("D", 250, 100), ("D2", 250, 100), ("E", 420, 70)):
        made = cluster.admit(job(name, rollout_s, train_s, slo=1.42))
    assert made.kind == "scaled"
    assert cluster.nodes == (3, 1)
    assert cluster.cost == pytest.approx(86.64)


def test_a_promise_close_to_one_is_kept_by_staying_alone():
    cluster = Cluster(ROLLOUT, TRAIN)
    cluster.admit(job("A", 100, 100, slo=1.0))
    assert cluster.admit(job("B", 50, 50)).passed == {"where a job would miss its SLO": 1}
    assert cluster.admit(job("C", 100, 20)).kind == "packed"


def test_host_memory_limits_who_shares():
    cluster = Cluster(ROLLOUT, TRAIN)
    cluster.admit(job("A", 100, 30, rollout_gb=900, train_gb=100))
    made = cluster.admit(job("B", 20, 30, 4, rollout_gb=700, train_gb=100))
    assert (made.kind, cluster.nodes) == ("scaled", (2, 1))
    made = cluster.admit(job("C", 20, 30, 4, rollout_gb=100, train_gb=1400))
    assert made.passed == {"without host memory": 1}
    assert cluster.admit(job("D", 20, 30, train_gb=1600)).kind == "refused"


def test_a_job_on_more_train_nodes_brings_them():
    cluster = Cluster(ROLLOUT, TRAIN)
    cluster.admit(job("D", 250, 100, train_scaling=1.0))
    made = cluster.admit(job("C", 120, 200, nodes=2))
    assert (made.kind, made.rollout, made.train) == ("scaled", (0, 1), (0, 1))
    assert cluster.group_of("D").load_s == 120 + 250 + 2  # its training takes 50 s now
    cluster.leave("C")
    assert cluster.nodes == (1, 1)


def test_a_full_pool_queues_and_an_impossible_job_is_refused():
    small = Cluster(NodePool(nodes=1, switch_s=1), NodePool(nodes=1))
    assert small.admit(job("A", 100, 100, slo=1)).kind == "isolated"
    queued = small.admit(job("B", 100, 100, slo=1))
    assert queued.kind == "queued"
    assert "needs 1 rollout and 1 train nodes, but 0 and 0 are free" in queued.explain()
    assert "but the pool has 1" in small.admit(job("C", 1, 1, nodes=2)).explain()
    with pytest.raises(ValueError, match="job A: the name is in use"):
        small.admit(job("A", 1, 1))
    small.leave("A")
    assert small.admit(job("B", 100, 100, slo=1)).kind == "isolated"


def test_a_job_that_takes_longer_than_it_said_may_stay_while_promises_hold():
    cluster = Cluster(ROLLOUT, TRAIN)
    cluster.admit(job("A", 100, 100, slo=1.2))
    cluster.admit(job("B", 50, 50, slo=4))
    assert cluster.reprofile(job("B", 130, 50, slo=4))
    assert cluster.group_of("A").period_s == 232  # rollouts of 100 and 130, two switches
    assert not cluster.reprofile(job("B", 150, 50, slo=4))  # 252 s; A was promised 240
    assert cluster.group_of("A").period_s == 232
    assert drifted([100, 130, 100, 131, 100], 100) is None
    assert drifted([100, 130, 100, 131, 111], 100) == 131
    assert drifted([130] * 3 + [100] * 6, 100) is None  # long ago


def test_a_job_may_not_grow_beyond_the_memory_of_its_nodes():
    cluster = Cluster(NodePool(nodes=1, memory_gb=100), NodePool(nodes=1, memory_gb=100))
    cluster.admit(job("A", 100, 100, slo=4, rollout_gb=40, train_gb=40))
    cluster.admit(job("B", 100, 100, slo=4, rollout_gb=40, train_gb=40))
    assert cluster.group_of("A").host_gb == (80, 80)
    assert cluster.reprofile(job("B", 100, 100, slo=4, rollout_gb=60, train_gb=40))
    assert not cluster.reprofile(job("B", 100, 100, slo=4, rollout_gb=61, train_gb=40))
    assert not cluster.reprofile(job("B", 100, 100, slo=4, rollout_gb=40, train_gb=61))
    assert cluster.group_of("A").host_gb == (100, 80)
    assert grown(40.0, 40.0) is None
    assert grown(41.0, 40.0) == pytest.approx(45.1)


@pytest.mark.parametrize(
    "wrong, what",
    [
        ({"slo": 0.9}, "slo 0.9: must be at least 1"),
        ({"rollout_s": 0.0}, "rollout_s 0.0: must be above 0 s; profile the job"),
        ({"train_s": math.nan}, "train_s nan: must be above 0 s"),
        ({"train_nodes": 0}, "train_nodes 0: must be at least 1"),
        ({"train_scaling": 2}, "train_scaling 2: must be from 0 to 1"),
        ({"train_scaling": 1, "colocated": True}, "train_scaling 1: must be 0 for a colocated job"),
    ],
)
def test_a_job_that_cannot_be_is_refused(wrong, what):
    values = {"rollout_nodes": 1, "train_nodes": 1, "rollout_s": 1.0, "train_s": 1.0} | wrong
    with pytest.raises(ValueError, match=what):
        MuxJob(id="A", **values)


def test_colocated_jobs_share_time_as_far_as_promises_reach():
    """A rollout and a training of 100 s each, a switch of 1 and 5 s, and C on both nodes for 50 s:
    101 + 105 + 56. Whoever comes first, the same."""
    a, c = job("A", 100, 100, slo=1.4), job("C", 30, 20, slo=8, colocated=True)
    for first, second in ((a, c), (c, a)):
        cluster = Cluster(ROLLOUT, TRAIN)
        assert cluster.admit(first).kind == "isolated"
        made = cluster.admit(second)
        assert (made.kind, made.added, made.period_s) == ("packed", 0.0, 262)
        assert cluster.groups[0].order() == ["A", "C"]
        assert cluster.admit(job("D", 30, 20, slo=8, colocated=True)).passed == {
            "where a job would miss its SLO": 1  # 318 s; A was promised 280
        }
        assert not cluster.reprofile(job("C", 49, 20, slo=8, colocated=True))
        assert cluster.reprofile(job("C", 48, 20, slo=8, colocated=True))
        cluster.leave("C")
        assert cluster.group_of("A").period_s == 200


def test_beside_a_colocated_job_rollouts_have_nodes_of_their_own_where_it_pays():
    """A's training ends after 256 s; B's after 302 + 55 s on A's node, 256 + 55 beside it. Then C:
    56 s. The limit is 375 s."""
    cluster = Cluster(ROLLOUT, TRAIN)
    cluster.admit(job("C", 30, 20, slo=7.5, colocated=True))
    assert cluster.admit(job("A", 200, 50, slo=2)).kind == "packed"
    made = cluster.admit(job("B", 100, 50, slo=2.5))
    assert (made.kind, made.rollout, made.period_s) == ("scaled", (1,), 367)


def member_of(group: JobGroup, name: str) -> VirtualJob:
    """As the arbiter has it take its turns, at its worst."""
    one = group.jobs[name]
    slots = {
        "rollout": tuple(f"r{n}" for n in group.pinned[name]),
        "train": tuple(f"t{n}" for n in group.train[: one.train_nodes]),
    }
    took = Iteration(
        rollout_s=one.rollout_s, train_s=one.train_on(len(group.train)), sync_s=one.sync_s
    )
    member = Member(job=name, slots=slots)
    return VirtualJob(member=member, iteration=lambda _: took, colocated=one.colocated)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_no_turns_of_a_group_with_colocated_jobs_take_longer_than_its_period(seed):
    """By the turns that the arbiter gives: every iteration ends at its time of the round that was
    laid out, or before."""
    dice = random.Random(seed)
    cluster = Cluster(
        NodePool(switch_s=dice.choice([0, 3])), NodePool(switch_s=dice.choice([0, 5]))
    )
    for n in range(dice.randint(2, 7)):
        took = dice.uniform(5, 100), dice.uniform(5, 100)
        sizes = {"rollout_nodes": dice.randint(1, 3), "train_nodes": dice.randint(1, 2)}
        more = {"colocated": n == 0 or dice.random() < 0.4, "sync_s": dice.choice([0.0, 4.0])}
        cluster.admit(job(str(n), *took, slo=dice.uniform(1, 12), **sizes, **more))
    for group in (g for g in cluster if g.has_colocated):
        jobs = [member_of(group, name) for name in group.order()]
        switch = dict(zip(("rollout", "train"), group.switches(len(jobs)), strict=True))
        ends = MuxSimulation(jobs, switch_s=switch).run(8).ends
        for name, times in ends.items():
            for n, at in enumerate(times):
                assert at <= (n + 1) * group.period_s + 1e-6, (name, n)
            if all(j.colocated for j in jobs):  # all are on the first train node
                assert times[-1] - times[-2] == pytest.approx(group.period_s)


def job_of(colocated: bool, train_scaling: float, **values) -> MuxJob:
    return MuxJob(colocated=colocated, train_scaling=0.0 if colocated else train_scaling, **values)


jobs_of = st.builds(
    job_of,
    colocated=st.booleans(),
    id=st.uuids().map(str),
    rollout_nodes=st.integers(1, 3),
    train_nodes=st.integers(1, 2),
    rollout_s=st.floats(10, 900),
    train_s=st.floats(10, 900),
    sync_s=st.floats(0, 30),
    slo=st.floats(1, 3),
    rollout_gb=st.floats(0, 900),
    train_gb=st.floats(0, 900),
    train_scaling=st.sampled_from([0.0, 0.5, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(jobs_of, max_size=25, unique_by=lambda j: j.id),
    st.randoms(),
    st.booleans(),
    st.booleans(),
)
def test_no_promise_is_ever_broken(jobs, dice, is_small, repacks):
    """I7, I8: whoever comes and leaves. Nodes are in one group each, memory is kept, a restored
    cluster decides the same."""
    size = 6 if is_small else None
    pools = [
        NodePool(nodes=size, price=p.price, memory_gb=1500, switch_s=3) for p in (ROLLOUT, TRAIN)
    ]
    cluster, there = Cluster(*pools), []
    for one in jobs:
        again = Cluster(*pools)
        again.restore(json.loads(json.dumps(cluster.state())))
        before = cluster.cost
        made = cluster.admit(one)
        assert again.admit(one) == made
        assert cluster.cost == pytest.approx(before + made.added)
        assert again.cost == cluster.cost
        if made.group is not None:
            there.append(one)
            assert made.period_s == cluster.group_of(one.id).period_s
            if repacks and made.added:
                was, before = _where(cluster), cluster.cost
                fixed = {j.id for j in there[:-1] if dice.random() < 0.1}
                made_of = cluster.repack(one.id, fixed)
                moves = {m.job: (m.group, m.rollout, m.train) for m in made_of}
                assert not moves.keys() & fixed
                assert cluster.cost < before - 1e-9 if moves else cluster.cost == before
                assert _where(cluster) == was | moves
        while there and dice.random() < 0.4:
            cluster.leave(there.pop(dice.randrange(len(there))).id)
        _check(cluster, there)


def test_a_job_that_runs_somewhere_is_placed_there_or_waits():
    pools = [NodePool(nodes=3, memory_gb=1500, switch_s=p.switch_s) for p in (ROLLOUT, TRAIN)]
    cluster = Cluster(*pools)

    def on(rollout, train):
        return Nodes(rollout=rollout, train=train)

    wide = cluster.admit(job("A", 100, 100, slo=4, nodes=2), on((2, 1), (2, 0)))
    assert (wide.kind, wide.rollout, wide.train, wide.added) == ("isolated", (1, 2), (2, 0), 4.0)
    wrong = cluster.admit(job("B", 100, 100, slo=4), on((0, 1), (2,)))
    assert wrong.kind == "refused"
    assert "its profile has 1 rollout and 1 train nodes but it runs on 2 and 1" in wrong.why
    for where, why in (
        (on((1,), (0,)), "group 0 uses train nodes 2+0 in this order"),
        (on((1, 0), (2,)), "job A on rollout 1+2; two jobs of a group"),
    ):
        waits = cluster.admit(
            job("B", 100, 100, slo=4, nodes=len(where.rollout), train_nodes=1), where
        )
        assert (waits.kind, waits.group) == ("queued", None)
        assert why in waits.why and "tried again when a job leaves" in waits.why
    shared = cluster.admit(job("B", 100, 100, slo=4), on((1,), (2,)))
    assert (shared.kind, shared.group, shared.added, shared.period_s) == ("packed", 0, 0.0, 210)
    third = cluster.admit(job("C", 100, 100, slo=4), on((1,), (2,)))
    assert (third.kind, third.period_s) == ("packed", 315)  # saturated, and still as promised
    assert "would miss its SLO" in cluster.admit(job("D", 90, 90), on((1,), (2,))).why
    apart = cluster.admit(job("D", 100, 100), on((0,), (1,)))
    assert (apart.kind, apart.group, apart.rollout, apart.train) == ("isolated", 1, (0,), (1,))
    both = cluster.admit(job("E", 100, 100, nodes=2, train_nodes=1), on((0, 1), (1,)))
    assert "nodes of several groups (0, 1)" in both.why
    cluster.leave("A")
    assert cluster.nodes == (2, 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(jobs_of, max_size=15, unique_by=lambda j: j.id), st.randoms())
def test_no_promise_is_broken_to_jobs_that_run_somewhere(jobs, dice):
    pools = [NodePool(nodes=4, price=p.price, memory_gb=1500, switch_s=3) for p in (ROLLOUT, TRAIN)]
    cluster, there = Cluster(*pools), {}
    for one in jobs:
        on = Nodes(
            rollout=tuple(dice.sample(range(4), one.rollout_nodes)),
            train=tuple(dice.sample(range(4), one.train_nodes)),
        )
        again = Cluster(*pools)
        again.restore(json.loads(json.dumps(cluster.state())))
        before = cluster.cost
        made = cluster.admit(one, on)
        assert again.admit(one, on) == made
        assert cluster.cost == pytest.approx(before + made.added)
        if made.group is not None:
            there[one.id] = one, on
        while there and dice.random() < 0.4:
            name = dice.choice(sorted(there))
            cluster.leave(name)
            del there[name]
        _check(cluster, [one for one, _ in there.values()])
        for name, (_, where) in there.items():
            group = cluster.group_of(name)
            assert set(group.pinned[name]) == set(where.rollout)
            assert set(group.train[: len(where.train)]) == set(where.train)


def _where(cluster: Cluster) -> dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return {name: (g.id, g.pinned[name], g.train) for g in cluster for name in g.jobs}


def _check(cluster: Cluster, there: list[MuxJob]) -> None:
    assert sorted(name for g in cluster for name in g.jobs) == sorted(j.id for j in there)
    for one in there:
        group = cluster.group_of(one.id)
        assert group.period_s <= one.limit_s * (1 + 1e-9)
        assert len(group.pinned[one.id]) == one.rollout_nodes
        assert len(group.train) >= one.train_nodes
    for at, what in enumerate(("load", "train")):
        used = [n for g in cluster for n in getattr(g, what)]
        assert len(used) == len(set(used)) == cluster.nodes[at]
    for group in cluster:
        assert all(gb <= 1500 for _, _, gb in group.load.values())
        assert sum(j.train_gb for j in group.jobs.values()) <= 1500
        for a, b in product(map(set, group.pinned.values()), repeat=2):
            assert a <= b or b <= a or not a & b
        turns = [(group.jobs[n].colocated, -len(group.pinned[n])) for n in group.order()]
        assert turns == sorted(turns)


def _partitions(items):
    if not items:
        yield []
        return
    for rest in _partitions(items[1:]):
        yield [[items[0]], *rest]
        for n, part in enumerate(rest):
            yield [*rest[:n], [items[0], *part], *rest[n + 1 :]]


def _cheapest(jobs, nodes):
    """All ways to pin jobs of one node each to so many."""
    best = math.inf
    for pins in product(range(nodes), repeat=len(jobs)):
        group = JobGroup(0, (ROLLOUT, TRAIN))
        for one, pin in zip(jobs, pins, strict=True):
            group.add(one, [pin], (0,))
        fits = all(gb <= ROLLOUT.memory_gb for _, _, gb in group.load.values())
        if fits and group.period_s <= group.limit_s:
            best = min(best, group.cost)
    return best


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_the_optimum_is_the_cheapest_of_all_partitions(seed):
    dice = random.Random(seed)
    jobs = [
        job(
            str(n), dice.uniform(20, 200), dice.uniform(20, 100), dice.uniform(1, 3), rollout_gb=400
        )
        for n in range(4)
    ]
    brute = min(sum(_cheapest(p, len(p)) for p in parts) for parts in _partitions(jobs))
    assert optimum(jobs, ROLLOUT, TRAIN) == pytest.approx(brute)


def test_the_bill_is_close_to_the_optimum():
    """Forty instances of eight mixed jobs; `sim rollmux --experiment optimum` has hundreds."""
    dice = random.Random(0)
    plain, repacked = [], []
    for _ in range(40):
        cluster, other, jobs = Cluster(ROLLOUT, TRAIN), Cluster(ROLLOUT, TRAIN), []
        for n in range(8):
            share = dice.choice([0.5, 0.75, 1 / 3])
            solo = dice.uniform(100, 600)
            jobs.append(job(str(n), share * solo, (1 - share) * solo, dice.uniform(1, 2)))
            cluster.admit(jobs[-1])
            if other.admit(jobs[-1]).added:
                other.repack(jobs[-1].id)
        best = optimum(jobs, ROLLOUT, TRAIN)
        for one, ratios in ((cluster, plain), (other, repacked)):
            assert one.cost >= best - 1e-6
            ratios.append(one.cost / best)
    assert statistics.fmean(plain) <= 1.12
    assert statistics.fmean(repacked) <= 1.05
