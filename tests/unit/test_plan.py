"""Which sample is trained where: the rows of an update do not depend on the number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rlcore.algos.base import AlgoConfig
from rlcore.records import Group, SampleRef
from rlcore.trainer import plan


def groups(scores: list[list[float]], lengths: int = 5) -> list[Group]:
    return [
        Group(
            id=f"t{g}",
            prompt_index=g,
            dataset="s",
            refs=tuple(SampleRef(owner=g % 2, id=f"t{g}.{k}") for k in range(len(row))),
            scores=tuple(row),
            lengths=tuple(lengths + 3 * g + k for k in range(len(row))),
            finishes=("stop",) * len(row),
            errors=("",) * len(row),
            prompt_length=4,
        )
        for g, row in enumerate(scores)
    ]


def rows(p: plan.StepPlan, update: int) -> list[str]:
    return sorted(r.id for part in p.updates[update] for r in part)


MIXED = [[1.0, 0.0, 0.0, 1.0], [1.0] * 4, [0.0, 0.0, 1.0, 0.0], [0.0] * 4]


def test_every_sample_is_trained_exactly_once():
    p = plan.make(groups(MIXED), AlgoConfig(), num_updates=2, num_ranks=3, seed=1)
    assert sorted(rows(p, 0) + rows(p, 1)) == sorted(
        f"t{g}.{k}" for g in range(4) for k in range(4)
    )
    assert len(rows(p, 0)) == len(rows(p, 1)) == 8
    assert p.num_equal_groups == 2


def test_excluded_samples_are_not_trained_and_count_in_their_group():
    first, *rest = groups(MIXED)
    first = structs.replace(first, excluded=(True, False, True, False))
    p = plan.make([first, *rest], AlgoConfig(), num_updates=1, num_ranks=2, seed=1)
    assert [r for r in rows(p, 0) if r.startswith("t0.")] == ["t0.1", "t0.3"]
    assert len(rows(p, 0)) == 14 and [len(group) for group in p.groups] == [4, 4, 4, 4]


@given(st.integers(1, 5), st.integers(0, 99))
def test_the_rows_of_an_update_do_not_depend_on_the_number_of_ranks(num_ranks, seed):
    one = plan.make(groups(MIXED), AlgoConfig(), num_updates=2, num_ranks=1, seed=seed)
    many = plan.make(groups(MIXED), AlgoConfig(), num_updates=2, num_ranks=num_ranks, seed=seed)
    assert [rows(one, u) for u in (0, 1)] == [rows(many, u) for u in (0, 1)]
    assert sorted(one.lengths(0)) == sorted(many.lengths(0))


def test_few_groups_are_divided_between_updates():
    p = plan.make(groups(MIXED), AlgoConfig(), num_updates=2, num_ranks=1, seed=1)
    assert all(rows(p, u) == sorted(rows(p, u)) for u in (0, 1))
    found = [{i.split(".")[0] for i in rows(p, u)} for u in (0, 1)]
    assert not found[0] & found[1] and len(found[0]) == len(found[1]) == 2
    p = plan.make(groups(MIXED), AlgoConfig(), num_updates=3, num_ranks=1, seed=1)
    assert [len(rows(p, u)) for u in range(3)] == [5, 5, 6]
    assert sum(len({i.split(".")[0] for i in rows(p, u)}) for u in range(3)) <= 4 + 2


def group_of(lengths: list[int], prompt: int, name: str = "g") -> list[plan.TrainRow]:
    return [
        plan.TrainRow(f"{name}.{k}", name, 0, 0.0, 0.0, n, prompt) for k, n in enumerate(lengths)
    ]


def loads(parts: tuple[tuple[plan.TrainRow, ...], ...]) -> list[int]:
    return sorted(plan.tokens_to_compute(part, True) for part in parts)


def test_siblings_stay_on_one_rank_unless_that_is_slower():
    long_prompts = [*group_of([9] * 4, 1000, "a"), *group_of([9] * 4, 1000, "b")]
    assert loads(plan.distribute(long_prompts, 2, True)) == [1036, 1036]
    assert sorted(map(len, plan.distribute(long_prompts, 2, False))) == [4, 4]
    # Halves of a group are faster than the whole, quarters no faster than halves.
    assert loads(plan.distribute(group_of([100] * 4, 50), 2, True)) == [250, 250]
    assert loads(plan.distribute(group_of([100] * 4, 50), 4, True)) == [150] * 4
    assert loads(plan.distribute(group_of([10] * 4, 500), 8, True)) == [0] * 4 + [510] * 4
    assert plan.distribute((), 2, True) == ((), ())


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=8), min_size=1, max_size=5),
    st.integers(0, 60),
    st.integers(1, 6),
)
def test_sharing_never_makes_the_busiest_rank_slower(lengths, prompt, num_ranks):
    every = [r for g, ns in enumerate(lengths) for r in group_of(ns, prompt, f"t{g}")]
    shared, apart = (plan.distribute(every, num_ranks, shares) for shares in (True, False))
    assert sorted(r.id for part in shared for r in part) == sorted(r.id for r in every)
    assert loads(shared)[-1] <= loads(apart)[-1]


def test_work_counts_shared_prompts_once():
    made = groups([[1.0, 0.0]])
    p = plan.make(made, AlgoConfig(), num_updates=1, num_ranks=1, seed=1, shares_prefix=True)
    assert p.loads(1) == [4 + 5 + 6] and p.num_tokens() == 2 * 4 + 5 + 6
    assert p.squares() == 9**2 + 10**2 - 4**2
    assert plan.joined([p.placed((1,), 2)] * 2).loads(2) == [0, 4 + 2 * (5 + 6)]
    apart = plan.make(made, AlgoConfig(), num_updates=1, num_ranks=1, seed=1)
    assert apart.squares() == 9**2 + 10**2


def test_loads_are_prompts_and_responses():
    p = plan.make(groups([[1.0, 0.0]]), AlgoConfig(), num_updates=1, num_ranks=2, seed=1)
    assert sorted(p.placed((0, 2), 3).loads(3)) == [0, 4 + 5, 4 + 6]


def test_observations_are_loads_but_not_trained_and_failed_episodes_are_nothing():
    (group,) = groups([[1.0, 0.0, 0.0]])
    group = structs.replace(group, observed=(2, 0, 0), finishes=("stop", "stop", "failed"))
    p = plan.make([group], AlgoConfig(), num_updates=1, num_ranks=1, seed=1)
    assert rows(p, 0) == ["t0.0", "t0.1"] == [r.id for r in p.groups[0]]
    assert sorted(p.lengths(0)) == [5 - 2, 6] and p.loads(1) == [4 + 5 + 4 + 6]
    silent = structs.replace(group, observed=(5, 0, 0))  # the policy sampled nothing
    p = plan.make([silent], AlgoConfig(), num_updates=1, num_ranks=1, seed=1)
    assert rows(p, 0) == ["t0.0", "t0.1"] and p.lengths(0) == [6]
    alone = structs.replace(group, finishes=("stop", "failed", "failed"))
    for name, trained in (("grpo", []), ("grpo_passk", []), ("reinforce_plus_plus", ["t0.0"])):
        cfg = AlgoConfig(adv_estimator=name)
        p = plan.make([alone], cfg, num_updates=1, num_ranks=1, seed=1)
        assert rows(p, 0) == trained and len(p.groups) == len(trained)
    lost = structs.replace(group, finishes=("failed",) * 3)
    assert plan.make([lost], AlgoConfig(), num_updates=1, num_ranks=1, seed=1).groups == ()


def test_equal_groups_leave_the_batch_when_asked():
    cfg = AlgoConfig(equal_reward_groups="drop")
    p = plan.make(groups(MIXED), cfg, num_updates=2, num_ranks=2, seed=1)
    kept = rows(p, 0) + rows(p, 1)
    assert {i.split(".")[0] for i in kept} == {"t0", "t2"}
    assert len(rows(p, 0)) == len(rows(p, 1)) == 4


def test_a_step_of_equal_groups_only_has_empty_updates():
    cfg = AlgoConfig(equal_reward_groups="drop")
    p = plan.make(groups([[1.0, 1.0]]), cfg, num_updates=2, num_ranks=2, seed=1)
    assert p.lengths(0) == [] and len(p.updates) == 2 and len(p.updates[0]) == 2


def test_destinations_are_all_ranks_of_the_replica_that_trains_a_sample():
    p = plan.make(groups(MIXED), AlgoConfig(), num_updates=1, num_ranks=2, seed=3)
    where = p.destination([(0, 1), (2, 3)])
    for d, part in enumerate(p.updates[0]):
        assert all(where[r.id] == [(0, 1), (2, 3)][d] for r in part)
    assert p.owners()["t1.0"] == 1


def test_shuffled_rewards_are_the_same_multiset_in_another_order():
    """A score keeps what its own length cost, or the control would learn to be short."""
    g = groups([[float(4 * i + k) for k in range(4)] for i in range(4)])
    cfg = AlgoConfig(overlong_share=1.0)
    shuffled = plan.rewards_of(g, cfg, 20, 5)
    flat = [pair for row in shuffled for pair in row]
    plain = [pair for row in plan.rewards_of(g, cfg, 20, None) for pair in row]
    assert sorted(flat) == sorted(plain) and flat != plain
    assert plan.rewards_of(g, cfg, 20, 5) == shuffled
    assert [score for score, _ in plain] == [s for x in g for s in x.scores]
    lost = [score - reward for score, reward in plain]
    assert lost == pytest.approx([n / 20 for x in g for n in x.lengths])


def test_groups_are_dropped_for_equal_scores_whatever_their_lengths_cost():
    cfg = AlgoConfig(equal_reward_groups="drop", overlong_share=1.0)
    p = plan.make(groups(MIXED), cfg, num_updates=1, num_ranks=1, seed=1, max_tokens=20)
    assert {i.split(".")[0] for i in rows(p, 0)} == {"t0", "t2"}


def test_the_groups_that_are_trained_are_named_with_their_rewards():
    cfg = AlgoConfig(equal_reward_groups="drop")
    p = plan.make(groups(MIXED), cfg, num_updates=1, num_ranks=1, seed=0)
    found = [[(r.id, r.reward) for r in members] for members in p.groups]
    assert found == [[(f"t{g}.{k}", MIXED[g][k]) for k in range(4)] for g in (0, 2)]
