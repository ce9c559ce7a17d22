"""Short and long rounds: what is started, what waits, what is trained."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.records import Prompt, RewardResult, Sampling, Work
from rlcore.sched.prompt_source import EpochPrompts
from rlcore.sched.roles import GroupState, RequestState
from rlcore.sched.stop import EQUAL_REWARDS, StopAtFirst
from rlcore.sched.tail_batching import TailBatching, long_share
from rlcore.utils.errors import ConfigError

ROWS = 1000


def prompt(row: int, source: str = "s") -> Prompt:
    return Prompt(index=row, dataset=source, tokens=np.array([row], np.int32))


def rows_of(num_rows: int = ROWS):
    """Epochs without a shuffle."""
    at = 0

    def next_rows(n: int) -> list[tuple[int, int]]:
        nonlocal at
        out = [divmod(p, num_rows) for p in range(at, at + n)]
        at += n
        return out

    return next_rows


def tail(num_prompts: int = 4, num_samples: int = 2, num_rows: int = ROWS, **options):
    prompt_of = options.pop("prompt_of", prompt)
    options = {"eta_prompts": 1.25, "eta_samples": 1.25} | options
    return TailBatching(
        rows_of(num_rows), prompt_of, num_prompts=num_prompts, num_samples=num_samples, **options
    )


def rows(work: list[Work]) -> list[int]:
    return [w.prompt.index for w in work]


def settle(source: TailBatching, work: list[Work], kept: list[int], dropped=()) -> None:
    """By their places in the round."""
    source.settle([work[i].id for i in kept], {work[i].id: EQUAL_REWARDS for i in dropped})


# ---- rounds


def test_a_short_round_starts_more_and_a_long_one_is_made_of_what_was_late():
    source = tail()  # 4 prompts of 2; starts floor(5) of round(2.5) = 2
    for first in (0, 5, 10, 15):
        todo = source.next_round(Sampling())
        assert todo.kind == "short" and rows(todo.work) == list(range(first, first + 5))
        settle(source, todo.work, [0, 1, 2, 4])
    todo = source.next_round(Sampling())
    assert todo.kind == "long" and rows(todo.work) == [3, 8, 13, 18]
    assert [w.num_samples for w in todo.work] == [2, 2, 2, 2]
    settle(source, todo.work, [0, 1, 2, 3])
    assert source.next_round(Sampling()).kind == "short"


@pytest.mark.parametrize(
    ("samples", "eta", "started"),
    [(8, 1.25, 10), (4, 1.25, 5), (2, 1.25, 2), (8, 1.0, 8), (3, 1.5, 4)],
)
def test_responses_are_rounded_and_prompts_are_not_rounded_up(samples, eta, started):
    source = tail(num_prompts=7, num_samples=samples, eta_samples=eta)
    work = source.next_round(Sampling()).work
    assert len(work) == 8  # floor(1.25 * 7 = 8.75)
    assert {(w.num_samples, w.wanted) for w in work} == {(started, samples)}


@pytest.mark.parametrize("eta", [1.125, 1.25, 1.5, 2.0])
def test_the_share_of_long_rounds_is_exact(eta):
    """One long round to 1 / (eta - 1) short ones."""
    source = tail(num_prompts=8, num_samples=1, eta_prompts=eta)
    kinds = Counter()
    period = round(1 / (eta - 1)) + 1
    for _ in range(10 * period):
        todo = source.next_round(Sampling())
        kinds[todo.kind] += 1
        settle(source, todo.work, list(range(8)))
    assert kinds["long"] == 10 and kinds["long"] / kinds.total() == pytest.approx(long_share(eta))


def test_without_more_prompts_no_round_is_long():
    source = tail(eta_prompts=1.0)
    for _ in range(20):
        todo = source.next_round(Sampling())
        assert todo.kind == "short" and len(todo.work) == 4
        settle(source, todo.work, [0, 1, 2, 3])
    assert source.waiting == 0


def test_the_queue_lives_over_epochs_and_a_prompt_of_the_next_epoch_is_another_one():
    source = tail(num_prompts=4, num_samples=1, num_rows=6)
    for _ in range(3):
        todo = source.next_round(Sampling())
        settle(source, todo.work, [0, 1, 2, 3])
    assert source.state()["queue"][""] == [[0, 4], [1, 3], [2, 2]]
    assert {e: r["started"] for e, r in source.accounts().items()} == {0: 6, 1: 6, 2: 3}


@given(
    num_prompts=st.integers(1, 9),
    eta=st.sampled_from([1.0, 1.125, 1.25, 1.5, 2.0]),
    num_rows=st.integers(20, 50),
    seed=st.integers(0, 1000),
    dynamic=st.booleans(),
)
def test_every_prompt_of_an_epoch_is_trained_once_or_dropped_with_a_reason(
    num_prompts, eta, num_rows, seed, dynamic
):
    """In rounds whose winners are drawn by lot."""
    dice = np.random.default_rng(seed)
    source = tail(num_prompts, 1, num_rows, eta_prompts=eta, max_replaced=9 * dynamic)
    fate = Counter()
    for _ in range(60):
        todo = source.next_round(Sampling())
        keys = {w.id: source._round[w.id].key for w in todo.work}
        order = dice.permutation(len(todo.work))
        kept = [todo.work[i].id for i in order[:num_prompts]]
        dropped = {}
        if dynamic and len(kept) > 1:
            dropped = {kept.pop(): EQUAL_REWARDS}
        source.settle(kept, dropped)
        fate.update(keys[g] for g in [*kept, *dropped])
    assert max(fate.values()) == 1
    assert len(set(fate)) == len(fate)
    waiting = [tuple(key) for key in source.state()["queue"][""]]
    assert not set(waiting) & set(fate) and len(set(waiting)) == len(waiting)
    for epoch, row in source.accounts().items():
        ends = sum(n for name, n in row.items() if name != "started")
        assert row["started"] == ends, (epoch, row)
    first = source.accounts()[0]
    assert first["started"] == num_rows or len(source.accounts()) == 1


# ---- sources of their own


def by_source(row: int) -> Prompt:
    return prompt(row, "code" if row % 4 == 0 else "math")


def test_every_source_has_its_own_number_of_prompts_in_a_round():
    source = tail(4, 1, prompt_of=by_source, quotas={"math": 2, "code": 2}, eta_prompts=1.5)
    for _ in range(2):
        todo = source.next_round(Sampling())
        assert Counter(w.prompt.dataset for w in todo.work) == {"math": 3, "code": 3}
        settle(source, todo.work, [0, 1, 3, 4])
    todo = source.next_round(Sampling())
    assert todo.kind == "long"
    assert Counter(w.prompt.dataset for w in todo.work) == {"math": 2, "code": 2}


def test_no_queue_grows_with_the_rounds_if_another_source_is_never_late():
    """Of code, floor(1.25 * 1) = 1 prompt starts, so none of it can be late."""
    source = tail(5, 1, prompt_of=by_source, quotas={"math": 4, "code": 1})
    kinds, sizes = Counter(), []
    for _ in range(50):
        todo = source.next_round(Sampling())
        kinds[todo.kind] += 1
        wanted = 5 if todo.kind == "short" else 4
        assert Counter(w.prompt.dataset for w in todo.work) == {"math": wanted, "code": 1}
        kept = [i for i, w in enumerate(todo.work) if w.prompt.dataset == "math"][:4]
        kept += [i for i, w in enumerate(todo.work) if w.prompt.dataset == "code"]
        settle(source, todo.work, kept)
        sizes.append(source.waiting)
    assert kinds == {"short": 40, "long": 10} and max(sizes) == 4


def test_prompts_that_a_source_has_too_many_of_are_left_out_and_do_not_pile_up():
    """Three of four rows are math, and a round takes as many of code: 8 math rows are drawn and
    2.5 of them start."""
    source = tail(4, 1, prompt_of=by_source, quotas={"math": 2, "code": 2}, eta_prompts=1.5)
    sizes = []
    for _ in range(600):
        todo = source.next_round(Sampling())
        by_name = {"math": [], "code": []}
        for i, w in enumerate(todo.work):
            by_name[w.prompt.dataset].append(i)
        settle(source, todo.work, [*by_name["math"][:2], *by_name["code"][:2]])
        state = source.state()
        parts = [*state["queue"].values(), *state["ahead"].values(), state["accounts"]]
        sizes.append(sum(map(len, parts)))
    assert max(sizes) < 320, "digits aside, checkpoints do not grow"
    assert len(source.state()["ahead"]["math"]) == 100 * 3
    assert source.state()["ahead"]["code"] == []


def test_accounts_of_early_epochs_are_added_up():
    source = tail(num_prompts=4, num_samples=1, num_rows=8)
    for _ in range(500):
        todo = source.next_round(Sampling())
        settle(source, todo.work, [0, 1, 2, 3])
    accounts = source.accounts()
    assert list(accounts)[:2] == [-1, max(accounts) - 99] and len(accounts) == 101
    total = Counter()
    for row in accounts.values():
        assert row["started"] == row["trained"] + row["waiting"]
        total.update(row)
    assert total["trained"] == 500 * 4 and total["waiting"] == source.waiting
    assert source.metrics()["sched/prompts_trained"] == 500 * 4


def test_a_source_that_is_full_is_closed_while_the_other_goes_on():
    domains = {"a": "math", "b": "math", "c": "code", "d": "code"}
    stop, groups = StopAtFirst({"math": 1, "code": 1}, dict(domains)), states(domains)
    verdict = stop.judge(groups, groups["b"])
    assert verdict.kept is None and verdict.closed == ["a"]
    assert stop.judge(groups, groups["c"]).kept == ["b", "c"]


def test_a_source_without_a_number_is_named():
    source = tail(4, 1, prompt_of=by_source, quotas={"math": 4})
    with pytest.raises(ValueError, match="domain 'code' has no quota"):
        source.next_round(Sampling())


def test_a_source_that_hardly_comes_is_named():
    source = tail(4, 1, prompt_of=prompt, quotas={"s": 3, "rare": 1})
    with pytest.raises(ValueError, match="domain 'rare': only 0 of a round's 1 prompts"):
        source.next_round(Sampling())


# ---- groups that do not count


def states(names, scores=(0.0, 1.0)) -> dict[str, GroupState]:
    out = {}
    for name in names:
        work = Work(id=name, prompt=prompt(0), num_samples=2, sampling=Sampling())
        state = out[name] = GroupState(work=work)
        for k, score in enumerate(scores):
            request = RequestState(id=f"{name}.{k}", result=RewardResult(score=score))
            state.counted.append(request)
    return out


def test_without_dynamic_sampling_a_group_of_equal_rewards_counts():
    stop, groups = StopAtFirst({"": 1}, {"a": "", "b": ""}), states("ab", scores=(1.0, 1.0))
    assert stop.judge(groups, groups["b"]).kept == ["b"]


def test_with_it_another_prompt_takes_its_place():
    source = tail(2, 2, max_replaced=8)
    todo = source.next_round(Sampling())
    ids = [w.id for w in todo.work]
    groups = states(ids) | states(ids[:1], scores=(1.0, 1.0))
    verdict = todo.stop.judge(groups, groups[ids[0]])
    assert verdict.dropped == {ids[0]: EQUAL_REWARDS} and verdict.kept is None
    (more,) = verdict.more
    assert more.prompt.index == 2 and more.id not in ids
    groups |= states([more.id])
    assert todo.stop.judge(groups, groups[more.id]).kept is None
    kept = todo.stop.judge(groups, groups[ids[1]]).kept
    assert kept == [ids[1], more.id]
    source.settle(kept, verdict.dropped)
    assert source.waiting == 0
    assert source.accounts()[0] == {
        "started": 3,
        "trained": 2,
        f"dropped: {EQUAL_REWARDS}": 1,
        "waiting": 0,
    }


def test_a_round_that_may_start_no_more_prompts_ends_short_and_says_so():
    source = tail(2, 2, max_replaced=1)
    todo = source.next_round(Sampling())
    verdicts = []
    groups: dict[str, GroupState] = {}
    open_ = [w.id for w in todo.work]
    while open_:
        groups |= states(open_, scores=(1.0, 1.0))
        verdicts.append(todo.stop.judge(groups, groups[open_.pop(0)]))
        open_ += [w.id for w in verdicts[-1].more]
    assert len(groups) == 3
    assert [v.kept for v in verdicts[:-1]] == [None, None] and verdicts[-1].is_short
    assert verdicts[-1].kept == [list(groups)[-1]], "a batch has at least one group"
    assert not verdicts[-1].dropped


# ---- checkpoints


def test_a_restored_source_goes_on_as_the_other_would_have():
    sources = [tail(), tail()]
    for source in sources:
        for _ in range(3):
            todo = source.next_round(Sampling())
            settle(source, todo.work, [0, 2, 3, 4])
    fresh = tail()
    fresh._next_rows = sources[1]._next_rows  # the sampler has its own state
    fresh.restore(sources[1].state(), ROWS)
    for _ in range(4):
        rounds = [source.next_round(Sampling()) for source in (sources[0], fresh)]
        assert [w.id for w in rounds[0].work] == [w.id for w in rounds[1].work]
        assert rows(rounds[0].work) == rows(rounds[1].work)
        for source, todo in zip((sources[0], fresh), rounds, strict=True):
            settle(source, todo.work, [0, 1, 2, 3])
    assert fresh.accounts() == sources[0].accounts()


def test_a_checkpoint_of_the_plain_schedule_goes_on_with_an_empty_queue():
    source = tail()
    source.restore({"issued": 8}, ROWS)
    todo = source.next_round(Sampling())
    assert todo.work[0].id == "t8" and source.waiting == 0
    settle(source, todo.work, [0, 2, 3, 4])
    assert source.waiting == len(todo.work) - 4


def test_the_plain_schedule_refuses_prompts_that_were_deferred():
    source = tail()
    plain = EpochPrompts(source._next_rows, 4, 2)
    plain.restore(source.state(), ROWS)  # nothing is deferred yet
    todo = source.next_round(Sampling())
    settle(source, todo.work, [0, 2, 3, 4])
    count = len(todo.work) - 4
    with pytest.raises(ConfigError, match=f"has {count} prompts that --schedule tail_batching"):
        plain.restore(source.state(), ROWS)


def test_a_queue_of_other_data_is_refused_and_nothing_is_lost():
    source = tail()
    todo = source.next_round(Sampling())
    settle(source, todo.work, [0, 1, 2, 3])
    before = source.state()
    with pytest.raises(ValueError, match="names row 77 of data.train, which has 50 rows"):
        source.restore({**before, "queue": {"": [[0, 3], [0, 77]]}}, 50)
    with pytest.raises(ValueError, match="has the domain 'code'"):
        source.restore({**before, "queue": {"code": []}}, 50)
    assert source.state() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eta_prompts": 0.9}, "eta_prompts 0.9: must be at least 1"),
        ({"eta_samples": float("nan")}, "eta_samples nan: must be at least 1"),
        ({"num_prompts": 0}, "num_prompts 0: must be at least 1"),
        ({"quotas": {"a": 1, "b": 2}}, "sum to the 4 prompts of a step"),
        ({"quotas": {"a": 0, "b": 4}}, "each be at least 1"),
    ],
)
def test_numbers_that_make_no_round_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        tail(**options)
