"""HistoPipe's decisions: ranks, turns, shares, thresholds; HistoSpec's windows by simulation."""

import gzip
import json

import numpy as np
import pytest

from rlcore.ops.suffix import Forest
from rlcore.records import Prompt, Sampling, Work
from rlcore.sched import histopipe
from rlcore.sim import rhymerl
from rlcore.sim.rhymerl import LENGTHS


def test_prompts_are_ranked_by_the_longest_answer_of_the_last_epoch():
    history = histopipe.LengthHistory()
    for prompt, lengths in {"a": [5, 90], "b": [60, 60], "c": [7, 8], "d": [300, 2]}.items():
        history.note(prompt, lengths)
    history.note("d", [20, 30])  # an epoch later
    predicted = {p: history.predict(p, otherwise=1000) for p in "abcde"}
    assert predicted == {"a": 90, "b": 60, "c": 8, "d": 30, "e": 1000}
    assert histopipe.rank("abcde", predicted, 2) == [["c", "d"], ["b", "a", "e"]]
    assert sorted(history.lengths("ad")) == [5, 20, 30, 90]
    with pytest.raises(ValueError, match="6 ranking groups for 5 prompts"):
        histopipe.rank("abcde", predicted, 6)


def test_workers_take_turns_so_that_linear_groups_pair_to_the_same_time():
    assert [histopipe.group_of_worker(w, 1, 4) for w in range(4)] == [0, 1, 2, 3]
    assert [histopipe.group_of_worker(w, 2, 4) for w in range(4)] == [3, 2, 1, 0]
    linear = [1 + g / 7 for g in range(8)]
    assert histopipe.two_steps(linear)[1] == pytest.approx(3)  # every worker: 1 + 2
    mean = sum(linear) / 8
    assert histopipe.two_steps(linear)[0] / mean == pytest.approx(2.67, abs=0.005)
    assert histopipe.two_steps(linear)[1] / mean == pytest.approx(2.0)
    exponential = [8 ** (g / 7) for g in range(8)]
    mean = sum(exponential) / 8
    apart, paired = histopipe.two_steps(exponential)
    assert apart / mean == pytest.approx(4.53, abs=0.01)
    assert paired / mean == pytest.approx(2.55, abs=0.01)


def test_shares_of_gpus_bring_exponential_groups_near_to_a_line():
    work = [8 ** (g / 7) for g in range(8)]

    def seconds(g, n):
        return work[g] / n * 8

    found = histopipe.shares(seconds, 8, 64)
    assert sum(found) == 64 and min(found) >= 1
    assert found == sorted(found) and found[-1] > 8 > found[0]
    times = [seconds(g, n) for g, n in enumerate(found)]
    equal = [seconds(g, 8) for g in range(8)]
    assert histopipe.two_steps(times)[1] < 0.85 * histopipe.two_steps(equal)[1]
    assert histopipe.off_line(times) < histopipe.off_line(equal)
    assert histopipe.off_line([3.0, 5.0, 7.0, 9.0]) == pytest.approx(0)
    assert histopipe.off_line([0.0, 0.0, 4.0, 0.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="7 units for 8 ranking groups"):
        histopipe.shares(seconds, 8, 7)


def test_the_threshold_is_a_length_that_two_percent_of_the_history_exceed():
    assert histopipe.threshold(list(range(1, 101))) == 98
    assert histopipe.threshold([7]) == 7
    with pytest.raises(ValueError, match="needs lengths"):
        histopipe.threshold([])


def works(count, first=0):
    return [
        Work(
            id=f"t{first + i}",
            prompt=Prompt(index=i, dataset="s", tokens=np.ones(2, np.int32)),
            num_samples=2,
            sampling=Sampling(max_tokens=100),
        )
        for i in range(count)
    ]


def test_replicas_have_long_prompts_in_one_step_and_short_ones_in_the_next():
    """Four prompts over two replicas; the longest answers are of prompts 1 and 2."""
    pipe = histopipe.HistoPipe(engines=[3, 5], batch=4, longest=100, rows=100)
    idle = {3: 0, 5: 0}
    pipe.order(works(4))  # nothing is known: in their order
    assert [pipe.choose(f"t{i}.0", idle) for i in range(4)] == [3, 3, 5, 5]
    for work, lengths in zip(works(4), [(5, 9), (50, 60), (70, 80), (6, 7)], strict=True):
        pipe.learn(work.prompt, lengths)
    pipe.order(works(8, first=4)[:4])
    assert [pipe.choose(f"t{4 + i}.1", idle) for i in range(4)] == [5, 3, 3, 5]  # step 2
    pipe.order(works(4, first=8))
    assert [pipe.choose(f"t{8 + i}.0", idle) for i in range(4)] == [3, 5, 5, 3]
    found = pipe.metrics()
    assert found["pipe/known"] == 1 and found["pipe/higher"] == 0
    assert found["pipe/longest_group"] == 80 and found["pipe/moved"] == 0
    assert pipe.choose("t8.0", {5: 7}) == 5  # its replica is gone
    assert pipe.choose("t99.0", {3: 2, 5: 1}) == 5 and pipe.choose("t99.0", {}) is None
    pipe.order(works(1, first=12))  # in another's place, no step
    assert pipe.choose("t12.0", {3: 1, 5: 0}) == 5


def test_answers_beyond_the_threshold_of_their_group_leave_once_for_a_higher_one():
    pipe = histopipe.HistoPipe(engines=[3, 5], batch=4, longest=100, rows=100)
    for work, lengths in zip(works(4), [(5, 9), (50, 60), (70, 80), (6, 7)], strict=True):
        pipe.learn(work.prompt, lengths)
    pipe.order(works(4))  # t0 and t3 are the lower group, whose longest answer had 9 tokens
    running = {"t0.0": 9, "t0.1": 10, "t3.0": 40, "t1.0": 99}
    assert pipe.leave(running) == ["t0.1", "t3.0"]
    assert pipe.leave(running) == []
    assert [pipe.choose(i, {3: 0, 5: 9}) for i in ("t0.0", "t0.1", "t3.0", "t1.0")] == [3, 5, 5, 5]
    assert pipe.choose("t0.1", {3: 4}) == 3
    assert pipe.metrics()["pipe/moved"] == 2 / 8
    for group in ("t0", "t1", "t2", "t3"):
        pipe.forget(group)
    assert not pipe._workers and not pipe._away


def test_groups_of_long_answers_get_more_replicas():
    """Eight replicas, four prompts a group: 4 answers of 10 tokens in the lower, of 80 in the
    upper, ten places a replica."""
    pipe = histopipe.HistoPipe(engines=range(8), batch=40, longest=100, rows=2, groups=2)
    work = works(40)
    for i, w in enumerate(work):
        pipe.learn(w.prompt, [10, 10] if i < 20 else [80, 80])
    pipe.order(work)
    load = dict.fromkeys(range(8), 0)
    short = {pipe.choose(f"t{i}.0", load) for i in range(20)}
    long = {pipe.choose(f"t{i}.0", load) for i in range(20, 40)}
    assert len(long) > len(short) and short | long == set(range(8)) and not short & long


def test_on_the_generated_workload_ranks_jump_and_answers_migrate_as_published():
    """Published: 16 % (math) to 28 % (code) jump to a higher one of 8 groups, 1.5 to 3.6 % of the
    answers migrate."""
    found = rhymerl.stability(LENGTHS["8k"], prompts=256, samples=16, epochs=6, seed=0)
    assert 0.16 < found["jump_up"] < 0.28
    assert found["jump_one"] > 0.8 * found["jump_up"]
    assert 0.015 < found["migrated"] < 0.036


def test_rank_jumps_of_real_answers_are_only_reported(real_data, record_property):
    """30 prompts with one answer each: too few for a band."""
    with gzip.open(real_data / "lengths" / "epochs_long.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    by_epoch = {}
    for row in rows:
        by_epoch.setdefault(row["checkpoint"], {})[row["idx"]] = row["n_tokens"]
    epochs = [by_epoch[k] for k in sorted(by_epoch)]
    ranks = [histopipe.rank(sorted(e), e, 8) for e in epochs]
    shares = [histopipe.jumps(a, b) for a, b in zip(ranks, ranks[1:], strict=False)]
    up, one = np.mean(shares, axis=0)
    record_property("jump_up", float(up))
    assert 0 < one <= up < 0.5


# ---- windows


AIMD = (
    # probability that a token is right, tokens per forward, share of drafted tokens accepted
    (0.84, 3.37, 0.63),
    (0.86, 3.59, 0.66),
    (0.90, 4.20, 0.71),
    (0.92, 4.66, 0.74),
    (0.94, 5.32, 0.78),
    (0.95, 5.78, 0.80),
    (0.98, 8.8, 0.87),
)


@pytest.mark.parametrize(("accept", "tokens", "rate"), AIMD)
def test_the_forests_windows_give_the_table_of_the_paper_by_simulation(accept, tokens, rate):
    """RhymeRL: AIMD(2, +2, 32, reset) with every token right with probability `accept`.
    The forest drafts from a text that never ends, so drafts are as long as the window."""
    pytest.importorskip("rlcore._C", reason="the Python reference would take minutes")
    forest = Forest(min_prob=0.0, live=False, min_match=3)
    text = np.full(200, 5, np.int32)
    ends = np.array([0, 200]), np.array([0, 1])
    forest.build(np.array([1]), text, *ends, np.zeros(1, np.float32))
    forest.swap()
    rng, batch, rounds = np.random.default_rng(0), 200, 500
    handles = forest.open(np.ones(batch, np.int64))
    forest.advance(handles, np.full(3 * batch, 5, np.int32), np.arange(batch + 1) * 3)
    drafted = accepted = steps = 0
    for number in range(rounds):
        _, lengths = forest.draft(handles)
        runs = rng.geometric(1 - accept, batch) - 1
        right = np.minimum(runs, lengths).astype(np.int32)
        forest.accept(handles, right)
        if number >= 50:
            drafted, accepted, steps = (
                drafted + lengths.sum(),
                accepted + right.sum(),
                steps + batch,
            )
    assert 1 + accepted / steps == pytest.approx(tokens, rel=0.03)
    assert accepted / drafted == pytest.approx(rate, abs=0.015)
