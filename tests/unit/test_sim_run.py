"""Steps on a virtual cluster: costs of the phases against closed forms, rewards, the command."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlcore.cli import sim
from rlcore.records import group_of
from rlcore.sched.reward_timeout import AdaptiveTimeout
from rlcore.sim import profile, report, rollpacker, table
from rlcore.sim.cluster import (
    PHASES,
    SimAsyncRun,
    SimRun,
    SimStep,
    simulate,
    summarize,
    summarize_updates,
)
from rlcore.sim.cost import CONSTANTS, EngineCost, hf_named, model_named
from rlcore.sim.job import SimJob, config
from rlcore.sim.phases import (
    JudgeCost,
    Layout,
    TrainingCost,
    TrainingWork,
    judge_cost,
    offload_s,
    train_row,
    training_cost,
    update_weights_s,
)
from rlcore.sim.rewards import FixedScorer, JudgeScorer, Rewards, SandboxScorer
from rlcore.sim.user import read_model
from rlcore.sim.workload import GENERATORS, Recorded
from rlcore.utils.files import recipes_folder
from rlcore.utils.gpus import GPUS

# ---- phases


LINK, ARITHMETIC = CONSTANTS.link, CONSTANTS.arithmetic * 989e12


def work(cost: TrainingCost, *lengths: int) -> TrainingWork:
    """The work of samples of these lengths, each of a group of its own."""
    return cost.work([train_row(f"t{k}", 0, n) for k, n in enumerate(lengths)])


def test_training_is_six_operations_a_parameter_and_token_and_the_pairs_of_attention():
    t = training_cost(model_named("7B"), GPUS["H100"], Layout(gpus=8))
    multiplied = model_named("7B").parameters - 152_064 * 3584
    operations = 6 * multiplied * 3000 + 6 * 28 * 3584 * (1000**2 + 2000**2)
    assert t.dp == 8  # a sample takes one of eight GPUs, so the longer one takes the most
    longest = 6 * multiplied * 2000 + 6 * 28 * 3584 * 2000**2
    assert t.update_s(work(t, 1000, 2000)) == pytest.approx(longest / ARITHMETIC)
    many = work(t, *[1000, 2000] * 8)
    assert t.update_s(many) == pytest.approx(8 * operations / ARITHMETIC / 8)
    assert t.logprobs_s(many) == pytest.approx(operations / ARITHMETIC / 3)
    with_reference = training_cost(model_named("7B"), GPUS["H100"], Layout(gpus=8), reference=True)
    assert with_reference.forward_share == pytest.approx(2 / 3)


def test_a_layout_pays_for_its_traffic_its_bubbles_and_its_recomputation():
    def cost(**sizes) -> TrainingCost:
        return training_cost(model_named("14B"), GPUS["H800"], Layout(gpus=16, **sizes))

    plain = cost()
    # two reductions of a layer's activations, forth and back, in each of three passes
    reduced = 3 * 2 * 48 * 2 * (1 / 2) * 2 * 5120 / (LINK * 200e9)
    assert cost(tp=2).token_s == pytest.approx(plain.token_s + reduced / 8)
    gathered = 3 * 196_608 / 2 / (LINK * 200e9)
    assert cost(cp=2).token_s == pytest.approx(plain.token_s + gathered / 8)
    # with two stages, one micro-batch's seconds of a stage are idle; interleaving halves that
    bubbles = cost(pp=2).step_s - cost(pp=2, vpp=2).step_s
    assert bubbles == pytest.approx(16_384 * plain.token_s * 8 / 2, rel=1e-6)
    assert cost(recompute="full").token_s == pytest.approx(plain.token_s * 4 / 3)
    assert cost(epochs=2, updates=4).step_s == pytest.approx(8 * plain.step_s)


def test_ranks_that_share_key_value_heads_pay_for_gathering_them():
    """40 query heads of 128 in 8 groups: each rank gathers the half of its group that it lacks."""
    plain, shared = (
        training_cost(model_named("14B"), GPUS["H800"], Layout(gpus=16, tp=tp)) for tp in (1, 16)
    )
    reduced = 3 * 2 * 48 * 2 * (15 / 16) * 2 * 5120 / (LINK * 200e9)
    gathered = 3 * 48 * 2 * (5 + 2) * 128 / 2 / (LINK * 200e9)
    assert shared.token_s == pytest.approx(plain.token_s + reduced + gathered)


def test_the_slowest_stage_sets_the_pace_and_the_last_has_the_head():
    model = model_named("7B")

    def cost(*layers: int) -> float:
        layout = Layout(gpus=8, pp=2, pp_layers=layers)
        return training_cost(model, GPUS["H100"], layout).token_s

    layer = (model.products - model.head) / 28
    assert 2.3 < model.head / layer < 2.4
    head = model.head / layer
    assert cost(14, 14) == cost()
    assert cost(15, 13) == pytest.approx(cost() * (13 + head) / (14 + head))
    assert cost(17, 11) == pytest.approx(cost() * 17 / (14 + head))
    assert cost(15, 13) < cost() < cost(17, 11)


def test_experts_pay_for_their_balance_and_their_tokens_way():
    model = model_named("30B-A3B")
    near, far = (training_cost(model, GPUS["H100"], Layout(gpus=32, ep=n)) for n in (8, 16))
    alone = training_cost(model, GPUS["H100"], Layout(gpus=32))
    products = 6 * (model.dense + model.experts * 8 / 128 / CONSTANTS.expert_arithmetic)
    assert alone.token_s == pytest.approx(products / ARITHMETIC / 32)
    sent = 3 * 48 * 2 * 8 * 2 * 2048
    busiest = 6 * model.experts * 8 / 128 / CONSTANTS.expert_arithmetic * 0.2 / ARITHMETIC / 32
    way = sent * 7 / 8 / (LINK * 450e9) / 32
    assert near.token_s == pytest.approx(alone.token_s + busiest + way)
    assert far.token_s > near.token_s + sent * 15 / 16 / (LINK * 50e9) / 32 * 0.8
    divided = training_cost(model, GPUS["H100"], Layout(gpus=32, ep=4, etp=2))
    ways = sent * (3 / 4 + 1) / (LINK * 450e9) / 32  # to the experts, and to both ranks of each
    assert divided.token_s == pytest.approx(alone.token_s + busiest + ways)


def test_weights_and_states_move_over_the_links_that_they_have():
    model, gpu = model_named("7B"), GPUS["H100"]
    sent = 2 * model.parameters / 2
    assert update_weights_s(model, gpu, Layout(gpus=8), 2) == pytest.approx(sent / (LINK * 450e9))
    apart = update_weights_s(model, gpu, Layout(gpus=8), 2, apart=True)
    assert apart == pytest.approx(sent / (LINK * 50e9))
    # half of a model-parallel group is on another node
    half = update_weights_s(model, gpu, Layout(gpus=32, tp=4, cp=4), 2)
    assert half == pytest.approx(sent / 2 / (LINK * 50e9) + sent / 2 / (LINK * 450e9))
    moved = 2 * 16 * model.parameters / 8 / (LINK * 64e9)
    expected = moved + CONSTANTS.offload_s + CONSTANTS.sleep_s
    assert offload_s(model, gpu, 8) == pytest.approx(expected)


def test_a_streamed_judge_takes_the_longer_of_computing_and_reading_or_both():
    model = model_named("7B")
    whole = judge_cost(model, GPUS["H100"], 1)
    assert whole.seconds(1000) == pytest.approx(2000 * model.products / ARITHMETIC)
    streamed = judge_cost(model, GPUS["H100"], 1, streamed=True)
    read = model.parameters / (LINK * 64e9)  # half of the layers, two bytes a parameter
    assert streamed.seconds(1000) == pytest.approx(read)
    one_by_one = JudgeCost(token_s=streamed.token_s, least_s=read, is_overlapped=False)
    assert one_by_one.seconds(1000) == pytest.approx(whole.seconds(1000) + read)


# ---- rewards


def request(name: str, prompt: int = 10) -> SimpleNamespace:
    return SimpleNamespace(id=name, prompt=np.zeros(prompt))


def sandbox(**options: object) -> SandboxScorer:
    made = {
        "quantiles": ((0.0, 4.0), (1.0, 4.0)),
        "looping": 0.0,
        "workers": 1,
        "seed": 0,
        "prompt_of": lambda r: r.id.partition(".")[0],
        "right": 1.0,
    }
    return SandboxScorer(**made | options)


def test_a_right_program_of_a_prompt_shortens_the_time_of_those_that_loop():
    """Four seconds when right, so six for what follows, instead of thirty."""
    box = sandbox(timeout=AdaptiveTimeout(least_s=2.0, most_s=30.0, factor=1.5))
    rewards = Rewards({"": box})
    end, took = rewards.done_at(0.0, request("t0.0"), 5)
    assert (end, took) == (4.0, 4.0)
    assert rewards.score(request("t0.0"), 5, took) == 1.0
    box.looping = 1.0
    assert rewards.done_at(10.0, request("t0.1"), 5)[1] == 6.0
    assert rewards.done_at(10.0, request("t1.0"), 5)[1] == 30.0  # nobody was right there
    assert box.timed_out_s == 36.0


def test_workers_of_a_domain_take_turns_and_domains_do_not_wait_for_each_other():
    scorers = {"a": FixedScorer(3.0, 2), "b": JudgeScorer(lambda tokens: tokens / 10, 1)}
    rewards = Rewards(scorers, lambda r: r.id[0], after=True)
    three = [(request(f"a{k}"), 5) for k in range(3)]
    assert rewards.all_at_once(three) == 6.0
    assert rewards.all_at_once([*three, (request("b0", 50), 20)]) == 7.0
    assert rewards.all_at_once([]) == 0.0


# ---- steps


TRAINING = TrainingCost(token_s=1e-4, step_s=2.0, sync_s=0.5)
ENGINE = EngineCost(step_s=0.01, cache_tokens=4000.0)


def small(*keys: str, name: str = "small", **options: object) -> SimJob:
    """A job on four GPUs with costs that are easy to follow."""
    training = options.pop("training", TRAINING)
    cost = options.pop("cost", ENGINE)
    engines = {
        tp: profile.EngineMeasurements(
            tp=tp, start_s=7.0, cost=replace(cost, cache_tokens=cost.cache_tokens * tp)
        )
        for tp in (1, 2, 4)
    }
    cfg = config(
        *("--data.prompts_per_step", "8", "--rollout.samples_per_prompt", "4"),
        *("--rollout.routing", "response", *keys),
    )
    made = {
        "workload": Recorded([[20, 30, 40, 50, 60, 400], [10, 12, 14, 16, 18, 20]], 10),
        "measured": engines,
        "gpus": 4,
    }
    job = SimJob(name=name, cfg=cfg, hf=hf_named("7B"), gpu=GPUS["H100"], **made | options)
    job.__dict__["training"] = training  # instead of the cost model's
    return job


STREAM = ("--mode", "stream", "--rollout.kv_cache_tokens", "4000")


def test_a_step_is_the_sum_of_its_phases():
    (step,) = SimRun(small()).steps(1)
    tokens = sum(step.outcome.lengths) + sum(step.outcome.prompts)
    assert step.phases["gen"] == pytest.approx(0.01 * max(step.outcome.lengths))
    assert step.phases["update_actor"] == pytest.approx(1e-4 * tokens + 2)
    assert step.phases["old_log_prob"] == pytest.approx(1e-4 * tokens / 3)
    assert (step.phases["update_weights"], step.phases["reward"]) == (0.5, 0)
    assert step.seconds == pytest.approx(sum(step.phases.values()))


def test_a_seed_repeats_a_run_and_another_one_does_not():
    def lengths(seed: int) -> list[list[int]]:
        job = small("--run.seed", str(seed), "--schedule", "tail_batching")
        return [s.outcome.lengths for s in SimRun(job).steps(6)]

    assert lengths(1) == lengths(1)
    assert lengths(1) != lengths(2)


def test_log_probs_hide_in_the_time_in_which_nothing_is_decoded_and_no_more():
    plain, over = (next(SimRun(small(overlap_logprobs=x)).steps(1)) for x in (False, True))
    idle = plain.outcome.idle * plain.outcome.seconds
    assert 0 < plain.phases["old_log_prob"] < idle and over.phases["old_log_prob"] == 0
    slow = small(overlap_logprobs=True, training=TrainingCost(token_s=1.0))
    (step,) = SimRun(slow).steps(1)
    lengths = [p + n for p, n in zip(step.outcome.prompts, step.outcome.lengths, strict=True)]
    cost = TrainingCost(token_s=1.0)
    whole = cost.logprobs_s(work(cost, *lengths))
    assert step.phases["old_log_prob"] == pytest.approx(
        whole - step.outcome.idle * step.phases["gen"]
    )


def test_the_planner_is_driven_by_measured_preemptions_and_pays_for_the_change():
    """Answers get longer from step to step: a cache is full, then fuller, and replicas double."""
    lengths = rollpacker.Growing(Recorded([[900] * 6], 10), 100)
    keys = ("--rollout.adaptive_tp", "--rollout.max_tp", "4", "--data.prompts_per_step", "16")
    run, steps = SimRun(small(*keys, workload=lengths)), []
    for cap in (250, 400, 900):
        lengths.cap = cap
        steps += run.steps(1)
    assert [s.tp for s in steps] == [1, 1, 2]
    assert 0 < steps[0].outcome.preemptions < steps[1].outcome.preemptions
    assert [s.phases["resize_engines"] for s in steps] == [0, 0, 7.0]
    assert len(steps[2].outcome.spans) == 2


def test_half_of_the_replicas_train_early_and_nothing_is_trained_twice_or_lost():
    """Eight prompts over four replicas, the last two of which turn to training."""
    training = TrainingCost(token_s=1e-4, step_s=2.0, dp=4)
    plain, early = (next(SimRun(small(*x, training=training)).steps(1)) for x in ((), STREAM))
    assert sorted(early.outcome.lengths) == sorted(plain.outcome.lengths)
    at = early.outcome
    assert at.streamed and at.streamed < set(at.kept)
    assert [bool(spans) for spans in at.stream_spans] == [False, False, True, True]
    # what was done early is not in the phases that follow
    update = training.update_s(training.work(at.rows())) + at.stream_left_s + 2
    assert early.phases["update_actor"] == pytest.approx(update)
    # a replica that trains does not decode, and begins when the learner is back on its GPU
    turn = small().offload_s / 2
    for decoded, trained in zip(at.spans[2:], at.stream_spans[2:], strict=True):
        assert decoded[-1].end + turn <= trained[0].start + 0.02
    # a group of two replicas takes two of four times as long, or as its longest sample on one
    of = {g: [p + n for p, n, k in _of(at) if k == g] for g in at.streamed}
    took = sum(s.end - s.start for spans in at.stream_spans for s in spans)
    least = sum(2 * sum(n) * 1e-4 * 4 / 3 * 2 for n in of.values())
    most = sum(2 * 4 * max(n) * 1e-4 * 4 / 3 * 2 for n in of.values())
    assert least <= took * (1 + 1e-9) and took <= most


def _of(outcome):
    return zip(outcome.prompts, outcome.lengths, outcome.groups, strict=True)


def test_what_is_handed_over_is_prefilled_with_its_tokens_and_ends_as_long_as_it_was_to_be():
    """One long answer a replica; those of the half that leaves go on at the other half."""
    lengths = Recorded([[20, 20, 20, 400]], 10)
    cost = EngineCost(step_s=0.01, prefill_s=1e-3, cache_tokens=1e6)
    (step,) = SimRun(small(*STREAM[:2], "--rollout.kv_cache_tokens", "100000", workload=lengths,
                           cost=cost)).steps(1)  # fmt: skip
    out = step.outcome
    assert out.stats["sched/migrated"] > 0 and out.stats["sched/migrated_tokens"] > 0
    assert sorted(set(out.lengths)) == [20, 400] and len(out.lengths) == 32
    # the tokens that were kept are decoded once
    assert out.decoded == sum(out.lengths)


def test_an_asynchronous_job_trains_beside_the_rollout_and_keeps_the_bound_on_ages():
    keys = ("--mode", "async", "--cluster.rollout_ranks", "2", "--async.alpha", "1")
    run = SimAsyncRun(small(*keys))
    updates = run.updates(8)
    assert all(len(u.lengths) == 32 and max(u.ages) <= 1 for u in updates)
    assert any(u.ages and max(u.ages) == 1 for u in updates)
    found = simulate(small(*keys), 4)
    assert found.seconds == pytest.approx(sum(found.phases.values()))
    assert 0 < found.age <= 1 and found.tokens > 0


def test_an_asynchronous_job_counts_its_preemptions_and_the_tokens_that_it_discards():
    keys = ("--mode", "async", "--cluster.rollout_ranks", "2", "--async.alpha", "1")
    tight = replace(ENGINE, cache_tokens=1000.0)
    job = small(*keys, "--async.extra_prompts", "4", cost=tight)
    run = SimAsyncRun(job)
    updates, at = run.updates(8), run.rollout
    found = summarize_updates(job, at, updates)
    assert found.preemptions == sum(e.preemptions for e in at._engines.values()) / 8 > 0
    # what is decoded is trained, discarded, in the buffer, or not finished
    trained = sum(sum(u.lengths) for u in updates)
    unfinished = sum(sum(e.lengths(at._now).values()) for e in at._engines.values())
    stored = sum(n for id, n in at._finished.items() if group_of(id) in at._flow.buffer)
    decoded = sum(e.decoded for e in at._engines.values())
    assert at.discarded == decoded - trained - unfinished - stored > 0
    assert found.trained_share == trained / (trained + at.discarded)
    plain = simulate(small(*keys), 4)
    assert (plain.preemptions, plain.trained_share) == (0, 1)


def test_what_training_refuses_cannot_be_simulated():
    for keys, words in (
        (("--mode", "stream"), "--rollout.kv_cache_tokens 0: --mode stream needs"),
        (("--rollout.tp", "3"), "--rollout.tp 3: must divide the 4 ranks"),
        (("--train.tp", "3"), "--train.tp 3"),
        (("--mode", "async"), "--cluster.rollout_ranks 0"),
        (("--rollout.draft", "ngram"), "its gain is not known"),
        (("--tail.eta_prompts", "2"), "has no effect without --schedule tail_batching"),
    ):
        with pytest.raises(ValueError, match=words):
            simulate(small(*keys), 1)


# ---- what is shown


def two_arms() -> dict[str, list[SimStep]]:
    plans = small(name="all"), small("--schedule", "tail_batching", *STREAM, name="tail")
    return {p.name: list(SimRun(p).steps(6)) for p in plans}


def test_a_trace_has_every_phase_where_it_was(tmp_path: Path):
    arms, path = two_arms(), tmp_path / "trace.json"
    report.trace(arms, path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    for pid, steps in enumerate(arms.values()):
        bars = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        assert all(e["dur"] > 0 and e["ts"] >= 0 for e in bars)
        whole = [e for e in bars if e["tid"] == 0]
        assert sum(e["dur"] for e in whole) == pytest.approx(sum(s.seconds for s in steps) * 1e6)
        for before, later in zip(whole, whole[1:], strict=False):
            assert before["ts"] + before["dur"] == pytest.approx(later["ts"], abs=1)
        for step, bar in zip(steps, [e for e in whole if "rollout" in e["name"]], strict=True):
            inside = [e for e in bars if e["tid"] > 0 and e["args"]["step"] == step.number]
            assert inside and all(
                bar["ts"] - 1 <= e["ts"] and e["ts"] + e["dur"] <= bar["ts"] + bar["dur"] + 1
                for e in inside
            )


def test_the_table_holds_the_second_arm_against_the_first():
    sums = {name: summarize(steps) for name, steps in two_arms().items()}
    lines = report.table(sums)
    assert lines[0].split()[3:6] == ["gen", "old_log_prob", "update_actor"]
    assert f"{sums['all'].seconds / sums['tail'].seconds:.2f}x" in lines[2]
    assert sums["tail"].long_share == pytest.approx(1 / 6)
    assert sums["all"].seconds == pytest.approx(sum(sums["all"].phases[p] for p in PHASES))


# ---- commands

OPTIONS = ["run", "--gpus", "4", "--model", "7b", "--steps", "6"]
OPTIONS += ["--data.prompts_per_step", "8", "--rollout.samples_per_prompt", "4"]
TAIL = ["--schedule", "tail_batching", "--mode", "stream", "--rollout.kv_cache_tokens", "500000"]


def test_sim_run_makes_a_table_json_a_picture_and_a_trace(tmp_path: Path, capsys):
    files = {name: tmp_path / name for name in ("o.json", "o.png", "t.json")}
    more = ["--reward", "mix", "--judge", "streamed", "--json", str(files["o.json"])]
    more += [*TAIL, "--picture", str(files["o.png"]), "--trace", str(files["t.json"])]
    assert sim.main([*OPTIONS, *more]) == 0
    said = capsys.readouterr().out
    assert "verl" in said and "stream + tail batching" in said and "off by a factor" in said
    found = json.loads(files["o.json"].read_text())
    assert found["speed_up"] > 1 and len(found["steps"]["stream + tail batching"]) == 6
    assert files["o.png"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files["t.json"].read_text())["traceEvents"]


def test_sim_run_holds_an_asynchronous_job_against_a_synchronous_one(tmp_path: Path, capsys):
    path = tmp_path / "o.json"
    keys = ["--mode", "async", "--cluster.rollout_ranks", "2", "--json", str(path)]
    keys += ["--async.extra_prompts", "4", "--rollout.kv_cache_tokens", "17000"]
    assert sim.main([*OPTIONS, *keys]) == 0
    arms = json.loads(path.read_text())["arms"]
    assert list(arms) == ["verl", "async alpha 2"]
    assert arms["async alpha 2"]["preemptions"] > 0


def test_timeouts_of_simulated_code_adapt_only_with_the_key(tmp_path: Path, capsys):
    def gen_s(*keys: str) -> float:
        path = tmp_path / "o.json"
        more = ["--reward", "code", "--baseline", "none", "--lengths", "8k", "--json", str(path)]
        more += ["--data.num_prompts", "64", "--data.prompts_per_step", "64", *keys]
        assert sim.main([*OPTIONS, *more]) == 0
        (arm,) = json.loads(path.read_text())["arms"].values()
        return arm["phases"]["gen"]

    fixed, adapted = gen_s(), gen_s("--reward.adaptive_timeout")
    assert adapted < 0.95 * fixed
    assert adapted < gen_s("--reward.adaptive_timeout", "--reward.min_timeout_s", "10") < fixed
    assert gen_s("--reward.no_adaptive_timeout") == fixed


def test_sim_run_takes_a_measured_profile(tmp_path: Path, capsys):
    cost = EngineCost(step_s=0.01, prefill_s=1e-5, cache_tokens=1e6)
    made = [
        profile.EngineMeasurements(
            tp=1, cost=cost, decode=[profile.Decode(sequences=1, context=1, step_s=0.01)]
        )
    ]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.to_json(made, best_tp=1, head={})))
    assert sim.main([*OPTIONS, "--profile", str(path), "--baseline", "rlhfuse"]) == 0
    assert "rlhfuse" in capsys.readouterr().out
    assert sim.main([*OPTIONS, "--profile", str(path), "--rollout.tp", "2"]) == 2
    assert "engines of 2 GPUs were not measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "h1000"], "--gpu h1000: unknown; choose from h800, h100"),
        (["--model", "9b"], "--model 9b: unknown; choose from 7b"),
        (["--rollout.tp", "3"], "--rollout.tp 3: must divide the 4 ranks"),
        (["--model", "32b"], "over 1 x H100: the weights take 66 GB of 64 GB"),
        (["--lengths", "none.csv"], "--lengths none.csv: no such file"),
        (["--rollout.tp", "0"], "--rollout.tp 0: must be above 0"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--reward", "code", "--reward.workers", "2"], "--reward.workers: has no effect on a"),
        (["--reward", "math", "--reward.adaptive_timeout"], "--reward.adaptive_timeout: has no"),
        (["--tp", "2"], "--tp"),
        (["--where", "model"], "--where model: must be COLUMN=VALUE"),
        (["--rollout.tp", "4", *TAIL], "--mode stream: half of the engines train"),
    ],
)  # fmt: skip
def test_a_bad_option_is_one_sentence(tmp_path: Path, capsys, options, words):
    if options[0] == "--where":
        path = tmp_path / "n.csv"
        path.write_text("num_tokens\n5\n")
        options = [*options, "--lengths", str(path)]
    assert sim.main([*OPTIONS, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_model_is_read_from_its_config(tmp_path: Path):
    path = tmp_path / "mine" / "config.json"
    path.parent.mkdir()
    path.write_text((recipes_folder() / "models" / "qwen3_30b_a3b.json").read_text())
    hf, name = read_model(str(path))
    assert name == "mine" and hf == hf_named("30B-A3B")
    assert model_named("30B-A3B").parameters == pytest.approx(30.5e9, rel=0.01)
    assert model_named("30B-A3B").products == pytest.approx(3.0e9, rel=0.03)  # of a token


@pytest.mark.parametrize("argv", [["--figure", "11"], ["--table", "1"]])
def test_a_table_has_published_and_simulated_in_every_row(tmp_path, capsys, monkeypatch, argv):
    columns = {"16k": rollpacker.published.FIGURE_11["16k"]}
    monkeypatch.setattr(rollpacker.published, "FIGURE_11", columns)
    path = tmp_path / "rows.json"
    picture = tmp_path / "rows.png"
    files = ["--json", str(path), "--picture", str(picture)]
    assert sim.main(["rollpacker", *argv, "--rounds", "1", *files]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows, said = json.loads(path.read_text())["rows"], capsys.readouterr().out
    for row in rows:
        assert row["error"] == pytest.approx(row["simulated"] - row["published"], abs=2e-3)
        assert row["kind"] in table.KINDS and row["cell"] in said
    assert len(rows) == {"11": 8, "1": 9}[argv[1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "count"),
    [
        (["--table", "2"], 24),
        (["--figure", "10c"], 12),
        (["stream"], 5),
        (["rewards"], 12),
        (["scaling"], 6),
    ],
)
def test_the_longer_tables_have_all_their_rows(tmp_path: Path, argv, count):
    path = tmp_path / "rows.json"
    assert sim.main(["rollpacker", *argv, "--rounds", "1", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == count and all(row["simulated"] > 0 for row in rows)


@pytest.mark.slow
def test_the_planner_follows_preemptions_on_real_lengths(real_data: Path, tmp_path: Path):
    """Larger replicas preempt less (figure 6), and grow as answers do (figure 12a)."""
    path = tmp_path / "rows.json"
    options = ["--rounds", "5", "--data", str(real_data), "--json", str(path)]
    assert sim.main(["rollpacker", "planner", *options]) == 0
    rows = {row["cell"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["figure 6, short, tp 2 / tp 1, preemptions"]["simulated"] < 1
    grown = rows["figure 12a, planner against tp 1, mean"]
    assert grown["simulated"] > 1.2 and grown["sizes"] == sorted(grown["sizes"])


def test_where_two_versions_were_published_both_are_rows():
    assert rollpacker.published.TABLE_2["14B/16k"]["reward"] == (1.99, 1.76)
    ladder = rollpacker.ladder(rollpacker.published.SYSTEMS["14B/16k"], 0, prompts=4, gpus=16)
    assert list(ladder)[:5] == ["veRL", "tail", "reward", "planner", "trainer"]
    assert (
        ladder["tail"].rewards(lambda r: 0).after
        and not ladder["reward"].rewards(lambda r: 0).after
    )


def test_scores_during_a_rollout_and_a_judge_beside_the_engine_shorten_a_step(monkeypatch):
    system = replace(rollpacker.published.SYSTEMS["7B/8k"], gpus=8)
    monkeypatch.setattr(rollpacker.published, "SYSTEMS", {"7B/8k": system})
    found = rollpacker.reward_table(1, 0, Path())
    ratios = {str(r["cell"]).split(", ", 1)[1]: r["simulated"] for r in found.rows}
    assert ratios["scored during the rollout"] > 1.05
    assert ratios["adaptive timeout, code"] > 1.01
    assert ratios["judge beside the engine"] > 1  # it decodes and trains on a third more GPUs


def test_rollpacker_asks_for_one_table(capsys):
    assert sim.main(["rollpacker"]) == 2
    said = capsys.readouterr().err
    assert "one of --figure 11" in said
    assert all(name in said for name in ("planner", "rewards", "stream", "scaling"))


def test_the_generator_of_8k_is_that_of_16k_with_another_cap():
    assert GENERATORS["8k"] == replace(GENERATORS["16k"], cap=8192)
