"""Prompts in epoch order, and groups of equal rewards that the next prompts replace."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlcore.records import Prompt, RewardResult, Sampling
from rlcore.sched.prompt_source import EpochPrompts
from rlcore.sched.roles import GroupState, RequestState
from rlcore.sched.stop import EQUAL_REWARDS


def source(num_prompts: int, **options: int) -> EpochPrompts:
    rows = iter(range(10**6))

    def next_prompts(n: int) -> list[Prompt]:
        tokens = np.zeros(1, np.int32)
        return [Prompt(index=next(rows), dataset="s", tokens=tokens) for _ in range(n)]

    return EpochPrompts(next_prompts, num_prompts, 2, **options)


def play(prompts: EpochPrompts, equal: set[int], dice: np.random.Generator) -> list[int]:
    """Run a round in which groups end in any order; return the rows of the groups it keeps."""
    todo = prompts.next_round(Sampling())
    groups: dict[str, GroupState] = {}
    open_ = list(todo.work)
    dropped: dict[str, str] = {}
    while True:
        for work in open_:
            groups.setdefault(work.id, GroupState(work=work))
        work = open_.pop(int(dice.integers(len(open_))))
        scores = (1.0, 1.0) if work.prompt.index in equal else (0.0, 1.0)
        for k, score in enumerate(scores):
            result = RewardResult(score=score)
            groups[work.id].counted.append(RequestState(id=f"{work.id}.{k}", result=result))
        verdict = todo.stop.judge(groups, groups[work.id])
        dropped |= verdict.dropped
        open_ += verdict.more
        if verdict.kept is not None:
            assert not open_ and set(dropped.values()) <= {EQUAL_REWARDS}
            prompts.settle(verdict.kept, dropped)
            return [groups[g].work.prompt.index for g in verdict.kept]


@given(equal=st.sets(st.integers(0, 30)), seed=st.integers(0, 999))
def test_a_round_keeps_the_first_prompts_of_unequal_rewards_in_their_order(equal, seed):
    prompts = source(4, max_replaced=100)
    dice, n = np.random.default_rng(seed), 0
    for _ in range(3):
        kept = play(prompts, equal, dice)
        wanted, first = [], n
        while len(wanted) < 4:
            wanted += [n] if n not in equal else []
            n += 1
        assert kept == wanted
        assert prompts.metrics() == {"training/replaced_groups": float(n - first - 4)}
    assert prompts.state() == {"issued": n}, "a resumed run goes on behind the last one"


def test_at_the_limit_a_round_has_fewer_groups_and_at_least_one():
    dice = np.random.default_rng(0)
    for _ in range(20):  # the last to end is one that counts, or one that does not
        assert play(source(4, max_replaced=2), set(range(5)), dice) == [5]
    assert len(play(source(4, max_replaced=2), set(range(100)), dice)) == 1
    assert len(play(source(4), set(range(100)), dice)) == 4, "without it they count"
