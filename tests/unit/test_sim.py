"""The simulator: costs by hand, a replica against one that decodes token by token, rounds of the
shipped controller in virtual time."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.records import Prompt, Sampling, Work
from rlcore.sched.roles import Round
from rlcore.sched.stop import StopAtAll, StopAtFirst
from rlcore.sim import rollpacker
from rlcore.sim.cluster import SimRun
from rlcore.sim.cost import CONSTANTS, EngineCost, engine_cost, model_named
from rlcore.sim.drafts import REAL, DraftGain
from rlcore.sim.engine import SimRequest, VirtualEngine
from rlcore.sim.rewards import FixedScorer, Rewards
from rlcore.sim.round import SimSettings
from rlcore.sim.workload import GENERATORS, Recorded
from rlcore.utils.gpus import GPUS

# ---- costs


def test_a_step_by_hand_and_many_steps_are_their_sum():
    cost = EngineCost(step_s=1.0, sequence_s=0.1, context_s=0.01)
    assert cost.decode_s(2, 10, 1) == pytest.approx(1 + 0.2 + 0.1)
    by_one = sum(cost.decode_s(2, 10 + 2 * k, 1) for k in range(7))
    assert cost.decode_s(2, 10, 7) == pytest.approx(by_one)


@given(
    sequences=st.integers(1, 50),
    context=st.floats(0, 1e5),
    steps=st.integers(0, 3000),
    sequence_s=st.sampled_from([0.0, 1e-5]),
    context_s=st.sampled_from([0.0, 1e-9, 1e-6]),
    part=st.floats(0, 0.999),
)
def test_the_steps_within_a_time_are_those_that_take_it(
    sequences, context, steps, sequence_s, context_s, part
):
    cost = EngineCost(step_s=0.01, sequence_s=sequence_s, context_s=context_s)
    until = cost.decode_s(sequences, context, steps)
    after = cost.decode_s(sequences, context, steps + 1)
    assert cost.steps_within(sequences, context, until + part * 0.99 * (after - until)) in (
        steps,
        steps - (part < 1e-6),
    )


def test_an_engine_reads_its_weights_once_a_step_and_multiplies_once_a_token():
    cost, c = engine_cost(model_named("14B"), GPUS["H800"], 2), CONSTANTS
    parameters = model_named("14B").parameters
    assert parameters == pytest.approx(14.77e9, rel=1e-3)
    multiplied = parameters - 152_064 * 5120  # an embedding is looked up
    assert cost.weights_s == pytest.approx(multiplied / (c.bandwidth * 3350e9))
    assert cost.product_s == pytest.approx(multiplied / (c.arithmetic * 989e12))
    assert cost.step_s == pytest.approx(48 * (c.layer_s + 2 * c.collective_s))
    assert cost.cache_tokens == pytest.approx((2 * 64e9 - 2 * parameters) / 196_608)
    with pytest.raises(ValueError, match="32B over 1 x A100: the weights take 66 GB of 64 GB"):
        engine_cost(model_named("32B"), GPUS["A100"], 1)


def test_a_step_is_bound_by_reading_and_then_by_products():
    cost = EngineCost(step_s=1.0, weights_s=8.0, product_s=1.0)
    assert [cost.sequences_s(n) for n in (1, 8, 16)] == [9, 9, 17]
    assert cost.sequences_s(4, width=4) == 17  # four positions of each


def test_a_mixture_reads_the_experts_that_its_tokens_need():
    moe, dense = (engine_cost(model_named(m), GPUS["H100"], 2) for m in ("30B-A3B", "32B"))
    assert moe.experts_s > 10 * moe.weights_s and moe.expert_share == 8 / 128
    one, all_ = moe.sequences_s(1) - moe.step_s, moe.sequences_s(200) - moe.step_s
    read = moe.weights_s + moe.experts_s * 8 / 128
    assert one == pytest.approx(read + moe.sequence_s + moe.request_s)
    assert all_ > moe.weights_s + 0.99 * moe.experts_s
    assert moe.product_s < dense.product_s / 8  # three of thirty billion


# ---- a replica


def finish_times(cost: EngineCost, jobs: list[tuple[int, int, float]], max_running: int = 1 << 30):
    """(prompt, length, arrival) of each; when each ends."""
    replica, ends = VirtualEngine(cost, max_running), {}
    arrivals = sorted((time, i) for i, (_, _, time) in enumerate(jobs))
    while arrivals or replica.live:
        at = replica.next_event()
        if arrivals and (at is None or arrivals[0][0] <= at):
            time, i = arrivals.pop(0)
            prompt, length, _ = jobs[i]
            replica.submit([SimRequest(id=f"r{i}", prompt=prompt, length=length)], time)
            continue
        for job in replica.step_to_event():
            ends[job.id] = at
    return ends, replica


def slowly(cost: EngineCost, jobs: list[tuple[int, int]], max_running: int):
    """All arrive at 0; one step after the other."""
    waiting = [[i, prompt, length, 0] for i, (prompt, length) in enumerate(jobs)]
    running, ends, now, preempted = [], {}, 0.0, 0

    def context() -> int:
        return sum(prompt + have for _, prompt, _, have in running)

    def admit() -> float:
        took = 0
        while waiting and len(running) < max_running:
            _, prompt, _, have = waiting[0]
            if running and context() + prompt + have + len(running) + 1 > cost.cache_tokens:
                break
            took += prompt + have - 1  # the last token goes through the decode step
            running.append(waiting.pop(0))
        return took * cost.prefill_s

    now += admit()
    while running:
        now += cost.decode_s(len(running), context(), 1)
        for job in running:
            job[3] += 1
        for job in [job for job in running if job[3] == job[2]]:
            running.remove(job)
            ends[f"r{job[0]}"] = now
        while len(running) > 1 and context() + len(running) > cost.cache_tokens:
            waiting.insert(0, running.pop())
            preempted += 1
        now += admit()
    return ends, preempted


@given(
    jobs=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=12),
    cache=st.sampled_from([math.inf, 200.0, 60.0, 40.0]),
    max_running=st.sampled_from([1, 3, 100]),
)
def test_events_are_those_of_a_replica_that_decodes_token_by_token(jobs, cache, max_running):
    cost = EngineCost(
        step_s=1.0, sequence_s=0.125, context_s=0.0625, prefill_s=0.5, cache_tokens=cache
    )
    ours, replica = finish_times(cost, [(p, n, 0.0) for p, n in jobs], max_running)
    theirs, preempted = slowly(cost, jobs, max_running)
    assert ours.keys() == theirs.keys()
    for id in ours:
        assert ours[id] == pytest.approx(theirs[id], rel=1e-9), id
    assert replica.preemptions == preempted
    assert replica.decoded == sum(n for _, n in jobs)


def test_an_arrival_slows_those_that_are_there_and_an_abort_hands_back_what_was_made():
    cost = EngineCost(step_s=0.0, sequence_s=1.0)
    ends, _ = finish_times(cost, [(1, 10, 0.0), (1, 4, 5.0)])
    assert ends == {"r0": 14.0, "r1": 13.0}
    replica = VirtualEngine(cost)
    replica.submit(
        [SimRequest(id="a", prompt=1, length=10), SimRequest(id="b", prompt=1, length=10)], 0.0
    )
    (gone,) = replica.abort(["b"], 6.5)
    assert (gone.id, gone.have) == ("b", 3) and replica.live == 1
    assert replica.next_event() == pytest.approx(6.0 + 7.0)


def test_what_a_replica_lets_go_of_goes_on_elsewhere_from_the_tokens_that_there_are():
    """Ten tokens, four of them made at the first. The second prefills the prompt and these tokens
    but the last."""
    first, second = (VirtualEngine(EngineCost(step_s=1.0, prefill_s=0.5)) for _ in range(2))
    first.submit([SimRequest(id="a", prompt=3, length=10)], 0.0)  # prefilled until 1.0
    (job,) = first.release(5.0)
    assert (job.have, first.live, first.next_event()) == (4, 0, None)
    second.submit([SimRequest(id="a", prompt=3, length=10, have=job.have)], 5.0)
    assert second.next_event() == pytest.approx(5.0 + 0.5 * 6 + 6)
    assert second.step_to_event()[0].id == "a" and second.decoded == 6


# ---- rounds


def work(num_groups: int, num_samples: int, wanted: int = 0) -> list[Work]:
    return [
        Work(
            id=f"t{g}",
            prompt=Prompt(index=g, dataset="sim", tokens=np.zeros(10, np.int32)),
            num_samples=num_samples,
            wanted=wanted,
            sampling=Sampling(),
        )
        for g in range(num_groups)
    ]


def world(lengths: dict[str, int], replicas: int = 1, **options) -> SimSettings:
    return SimSettings([EngineCost(step_s=1.0)] * replicas, lambda r: lengths[r.id], **options)


LENGTHS = {"t0.0": 5, "t0.1": 9, "t1.0": 7, "t1.1": 50}


def test_all_waits_for_the_longest_and_the_first_do_not():
    whole = world(LENGTHS).run(Round(work=work(2, 2), stop=StopAtAll()))
    assert whole.seconds == 50 and whole.kept == ["t0", "t1"] and whole.decoded == 71
    first = world(LENGTHS).run(
        Round(work=work(2, 2), stop=StopAtFirst({"": 1}, {"t0": "", "t1": ""}))
    )
    assert first.seconds == 9 and first.kept == ["t0"]
    assert first.decoded == 5 + 9 + 7 + 9
    each = StopAtFirst({"": 2}, {"t0": "", "t1": ""})
    kept = world(LENGTHS).run(Round(work=work(2, 2, wanted=1), stop=each))
    assert kept.seconds == 7 and kept.lengths == [5, 7]


def test_a_slow_reward_holds_the_round_and_workers_take_turns():
    rewards = Rewards({"": FixedScorer(each_s=10.0, workers=1)})
    out = world(LENGTHS, rewards=rewards).run(Round(work=work(2, 2), stop=StopAtAll()))
    # scored one after the other: 5 to 15, 7 to 25, 9 to 35, 50 to 60
    assert out.seconds == 60 and out.last_finish == 50 and out.reward_s == 0


def test_rewards_after_the_rollout_begin_when_it_is_over():
    rewards = Rewards({"": FixedScorer(each_s=10.0, workers=2)}, after=True)
    out = world(LENGTHS, rewards=rewards).run(Round(work=work(2, 2), stop=StopAtAll()))
    assert out.seconds == 50 and out.reward_s == 20


def test_two_replicas_share_a_round_and_it_repeats_itself():
    runs = [
        world(LENGTHS, replicas=2).run(Round(work=work(2, 2), stop=StopAtAll())) for _ in range(2)
    ]
    assert runs[0] == runs[1]
    one, two = runs[0].spans
    assert one == [(0.0, 5.0, 2), (5.0, 9.0, 1)]  # a new span where half as many are decoded
    assert two == [(0.0, 7.0, 2), (7.0, 50.0, 1)]
    assert runs[0].idle == pytest.approx(1 - (9 + 50) / 100)


def test_a_request_that_is_preempted_counts_once():
    costs = [EngineCost(step_s=1.0, cache_tokens=30.0)]
    lengths = {"t0.0": 12, "t1.0": 12}
    out = SimSettings(costs, lambda r: lengths[r.id]).run(Round(work=work(2, 1), stop=StopAtAll()))
    assert out.kept == ["t0", "t1"] and out.preemptions == 1


# ---- drafts


def test_forwards_and_positions_are_inverse():
    gain = DraftGain(starts=(0, 10, 30), gains=(2.0, 4.0, 5.0), width=8)
    assert [gain.forwards(p) for p in (0, 10, 30, 80)] == [0, 5, 10, 20]
    for position in (0, 7, 10, 25, 30, 1000):
        assert gain.position(gain.forwards(position)) == pytest.approx(position)
    assert (gain.at(9.9), gain.at(10), gain.at(1e9)) == (2.0, 4.0, 5.0)


@pytest.mark.parametrize("gain", [2.0, 4.0])
def test_drafts_divide_the_steps_by_their_gain_while_reading_binds(gain):
    drafts = DraftGain(starts=(0,), gains=(gain,), width=4)
    free = EngineCost(step_s=1.0)
    plain, drafted = (drain(free, [100, 400], d) for d in (None, drafts))
    assert plain == [100, 400] and drafted == pytest.approx([100 / gain, 400 / gain])


def test_drafts_are_off_where_products_bind():
    drafts = DraftGain(starts=(0,), gains=(2.0,), width=4)
    dear = EngineCost(step_s=0.1, product_s=1.0)
    assert drain(dear, [50] * 8, drafts) == pytest.approx(drain(dear, [50] * 8, None))
    # once few are left, a step costs the same with drafts: the last request is faster
    ends = drain(EngineCost(step_s=1.0, weights_s=4.0, product_s=1.0), [10] * 7 + [100], drafts)
    assert ends[-1] == pytest.approx(10 * (1 + 8) + 90 / 2 * 5)


def drain(cost: EngineCost, lengths: list[int], drafts: DraftGain | None) -> list[float]:
    """The times at which requests of these lengths end."""
    engine, ends = VirtualEngine(cost, drafts=drafts), []
    engine.submit([SimRequest(id=f"t{k}", prompt=0, length=n) for k, n in enumerate(lengths)], 0.0)
    while engine.next_event() is not None:
        ended = engine.step_to_event()
        assert all(job.have == job.length for job in ended)
        ends += [engine.now] * len(ended)
    assert engine.decoded == pytest.approx(sum(lengths), abs=2 * len(lengths))
    return ends


def test_a_request_that_leaves_while_drafts_are_used_keeps_its_tokens():
    engine = VirtualEngine(EngineCost(step_s=1.0), drafts=REAL)
    engine.submit([SimRequest(id="t0", prompt=5, length=1000)], 0.0)
    (job,) = engine.release(100.0)
    assert job.have == int(100 * 2.18)
    other = VirtualEngine(EngineCost(step_s=1.0))
    other.submit([SimRequest(id="t0", prompt=5, length=1000, have=job.have)], 100.0)
    assert other.next_event() == 100.0 + 1000 - job.have


# ---- workloads


def test_the_generator_has_the_published_quantiles():
    """RollPacker, 16k: median 527, P75 1139, mean 1325, P99 at the cap."""
    g = GENERATORS["16k"]
    drawn = np.concatenate([g.lengths(row, 8, 0) for row in range(10_000)])
    assert np.median(drawn) == pytest.approx(527, rel=0.04)
    assert np.quantile(drawn, 0.75) == pytest.approx(1139, rel=0.04)
    assert drawn.mean() == pytest.approx(1325, rel=0.04)
    assert np.quantile(drawn, 0.99) == g.cap


def test_a_prompt_keeps_its_character_and_a_round_its_own_lengths():
    g = GENERATORS["16k"]
    means = [[np.log(g.lengths(row, 64, seed)).mean() for row in range(200)] for seed in (1, 2)]
    assert np.corrcoef(means)[0, 1] > 0.8
    assert g.lengths(3, 8, 1) == g.lengths(3, 8, 1)
    assert g.lengths(3, 8, 1) != g.lengths(3, 8, 2)
    assert g.lengths(3, 8, 1) != replace(g, seed=1).lengths(3, 8, 1)  # other data


def test_recorded_lengths_are_dealt_without_replacement_first():
    recorded = Recorded([[1, 2, 3, 4]])
    assert sorted(recorded.lengths(0, 4, 5)) == [1, 2, 3, 4]
    assert sorted(recorded.lengths(0, 6, 5)[:4]) == [1, 2, 3, 4]
    assert len(set(recorded.lengths(9, 2, 5))) == 2


# ---- figure 11


def test_the_share_of_long_rounds_and_the_gain_of_a_few_rounds():
    found = list(SimRun(rollpacker.arm_of_figure_11("16k", 1.25, 1.25, 0)).steps(5))
    assert [s.kind for s in found] == ["short"] * 4 + ["long"]
    assert all(len(s.outcome.kept) == 128 and len(s.outcome.lengths) == 1024 for s in found)
    *short, long = [s.phases["gen"] for s in found]
    assert max(short) < 60 < 200 < long
