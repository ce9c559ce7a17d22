"""Steps on a virtual cluster: costs of the phases against closed forms, rewards, the command."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlcore.cli import sim
from rlcore.sched.reward_timeout import AdaptiveTimeout
from rlcore.sim import profile, report, rollpacker, table
from rlcore.sim.cluster import PHASES, ClusterPlan, SimRun, SimStep, StreamRule, summarize
from rlcore.sim.cost import GPUS, MODELS, EngineCost
from rlcore.sim.phases import (
    JudgeCost,
    TrainingCost,
    judge_from_data_sheet,
    training_from_data_sheet,
    weights_s,
)
from rlcore.sim.rewards import FixedScorer, JudgeScorer, Rewards, SandboxScorer
from rlcore.sim.user import read_model
from rlcore.sim.workload import GENERATORS, Recorded

# ---- phases


def test_training_is_six_operations_a_parameter_and_token_and_the_pairs_of_attention():
    t = training_from_data_sheet(MODELS["7B"], GPUS["H100"], 8, mfu=0.5)
    arithmetic = 0.5 * 989e12 * 8
    operations = 6 * 7.6e9 * 3000 + 6 * 28 * 3584 * (1000**2 + 2000**2)
    assert t.update_s([1000, 2000]) == pytest.approx(operations / arithmetic)
    assert t.logprobs_s([1000, 2000]) == pytest.approx(operations / arithmetic / 3)
    with_reference = training_from_data_sheet(MODELS["7B"], GPUS["H100"], 8, reference=True)
    assert with_reference.forward_share == pytest.approx(2 / 3)
    assert weights_s(MODELS["7B"], GPUS["H100"], 2) == pytest.approx(7.6e9 / (0.6 * 450e9))


def test_a_streamed_judge_takes_the_longer_of_computing_and_reading_or_both():
    whole = judge_from_data_sheet(MODELS["7B"], GPUS["H100"], 1)
    assert whole.seconds(1000) == pytest.approx(2 * 7.6e12 / (0.6 * 989e12))
    streamed = judge_from_data_sheet(MODELS["7B"], GPUS["H100"], 1, streamed=True)
    read = 7.6e9 / (0.6 * 64e9)  # half of the layers, two bytes a parameter
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


def small(**options: object) -> ClusterPlan:
    made = {
        "name": "small",
        "gpus": 4,
        "tp": 1,
        "costs": lambda tp: EngineCost(step_s=0.01 / tp, cache_tokens=4000.0 * tp),
        "training": TrainingCost(token_s=1e-4, step_s=2.0, sync_s=0.5),
        "workload": Recorded([[20, 30, 40, 50, 60, 400], [10, 12, 14, 16, 18, 20]], 10),
        "num_prompts": 8,
        "num_samples": 4,
    }
    return ClusterPlan(**made | options)


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
        plan = small(seed=seed, schedule="tail_batching")
        return [s.outcome.lengths for s in SimRun(plan).steps(6)]

    assert lengths(1) == lengths(1)
    assert lengths(1) != lengths(2)


def test_log_probs_hide_in_the_time_in_which_nothing_is_decoded_and_no_more():
    plain, over = (next(SimRun(small(overlap_logprobs=x)).steps(1)) for x in (False, True))
    idle = plain.outcome.idle * plain.outcome.seconds
    assert 0 < plain.phases["old_log_prob"] < idle and over.phases["old_log_prob"] == 0
    slow = small(overlap_logprobs=True, training=TrainingCost(token_s=1.0))
    (step,) = SimRun(slow).steps(1)
    whole = TrainingCost(token_s=1.0).logprobs_s(
        [p + n for p, n in zip(step.outcome.prompts, step.outcome.lengths, strict=True)]
    )
    assert step.phases["old_log_prob"] == pytest.approx(
        whole - step.outcome.idle * step.phases["gen"]
    )


def test_the_planner_is_driven_by_measured_preemptions_and_pays_for_the_change():
    """Answers get longer from step to step: a cache is full, then fuller, and replicas double."""
    lengths = rollpacker.Growing(Recorded([[900] * 6], 10), 100)
    plan = small(
        workload=lengths,
        max_tp=4,
        num_prompts=16,
        reshard_s=lambda tp: 7.0,
        costs=lambda tp: EngineCost(step_s=0.01, cache_tokens=4000.0 * tp),
    )
    run, steps = SimRun(plan), []
    for cap in (250, 400, 900):
        lengths.cap = cap
        steps += run.steps(1)
    assert [s.tp for s in steps] == [1, 1, 2]
    assert 0 < steps[0].outcome.preemptions < steps[1].outcome.preemptions
    assert [s.phases["resize_engines"] for s in steps] == [0, 0, 7.0]
    assert len(steps[2].outcome.spans) == 2


def test_half_of_the_replicas_train_early_and_nothing_is_trained_twice_or_lost():
    """Eight prompts over four replicas, the last two of which turn to training."""
    training = TrainingCost(token_s=1e-4, step_s=2.0)
    plain, early = (
        next(SimRun(small(stream=x, training=training)).steps(1)) for x in (None, StreamRule())
    )
    assert sorted(early.outcome.lengths) == sorted(plain.outcome.lengths)
    at = early.outcome
    assert at.streamed and at.streamed < set(at.kept)
    assert [bool(spans) for spans in at.stream_spans] == [False, False, True, True]
    # what was done early is not in the phases that follow
    rest = [p + n for p, n, done in at.samples() if not done]
    update = training.update_s(rest) + at.stream_left_s + 2
    assert early.phases["update_actor"] == pytest.approx(update)
    # two of four replicas, so a group takes one of them four times as long as all
    of = {g: sum(p + n for p, n, k in _of(at) if k == g) for g in at.streamed}
    took = sum(s.end - s.start for spans in at.stream_spans for s in spans)
    assert took == pytest.approx(4 * 1e-4 * sum(of.values()) * 4 / 3)
    # a replica that trains does not decode
    for decoded, trained in zip(at.spans[2:], at.stream_spans[2:], strict=True):
        assert decoded[-1].end <= trained[0].start + 1e-9


def _of(outcome):
    return zip(outcome.prompts, outcome.lengths, outcome.groups, strict=True)


def test_what_is_handed_over_is_prefilled_with_its_tokens_and_ends_as_long_as_it_was_to_be():
    """One long answer a replica; those of the half that leaves go on at the other half."""
    lengths = Recorded([[20, 20, 20, 400]], 10)
    costs = EngineCost(step_s=0.01, prefill_s=1e-3)
    plan = small(workload=lengths, stream=StreamRule(), costs=lambda tp: costs)
    (step,) = SimRun(plan).steps(1)
    out = step.outcome
    assert out.stats["sched/migrated"] > 0 and out.stats["sched/migrated_tokens"] > 0
    assert sorted(set(out.lengths)) == [20, 400] and len(out.lengths) == 32
    # the tokens that were kept are decoded once
    assert out.decoded == sum(out.lengths)


def test_training_once_leaves_more_for_the_end():
    often, once = (
        next(SimRun(small(stream=StreamRule(once=x, batch_tokens=1))).steps(1))
        for x in (False, True)
    )
    assert len(once.outcome.streamed) < len(often.outcome.streamed)


def test_replicas_that_do_not_divide_the_gpus_are_refused():
    with pytest.raises(ValueError, match="4 GPUs cannot be divided into engines of 3"):
        small(tp=3)


# ---- what is shown


def two_arms() -> dict[str, list[SimStep]]:
    plans = small(name="all"), small(name="tail", schedule="tail_batching", stream=StreamRule())
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

OPTIONS = ["run", "--gpus", "4", "--tp", "1", "--model", "7b", "--prompts", "8", "--samples", "4"]
OPTIONS += ["--steps", "6"]


def test_sim_run_makes_a_table_json_a_picture_and_a_trace(tmp_path: Path, capsys):
    files = {name: tmp_path / name for name in ("o.json", "o.png", "t.json")}
    more = ["--reward", "mix", "--judge", "streamed", "--json", str(files["o.json"])]
    more += ["--stream", "--picture", str(files["o.png"]), "--trace", str(files["t.json"])]
    assert sim.main([*OPTIONS, *more]) == 0
    said = capsys.readouterr().out
    assert "verl" in said and "tail_batching + stream" in said
    found = json.loads(files["o.json"].read_text())
    assert found["speed_up"] > 1 and len(found["steps"]["tail_batching + stream"]) == 6
    assert files["o.png"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files["t.json"].read_text())["traceEvents"]


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
    assert sim.main([*OPTIONS, "--profile", str(path), "--tp", "2"]) == 2
    assert "has engines of [1] GPUs but not of 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "h1000"], "--gpu h1000: unknown; choose from h800, h100"),
        (["--model", "9b"], "--model 9b: unknown; choose from 7b"),
        (["--tp", "3"], "--tp 3: the 4 rollout GPUs cannot be divided"),
        (["--model", "32b"], "32B over 1 x H100: the weights take 66 GB of 64 GB"),
        (["--lengths", "none.csv"], "--lengths none.csv: no such file"),
        (["--eta-prompts", "0.5"], "eta_prompts 0.5: must be at least 1"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--mfu", "0"], "--mfu 0: must be above 0 and at most 1"),
        (["--where", "model"], "--where model: must be COLUMN=VALUE"),
        (["--tp", "4", "--stream"], "--tp 4 makes one engine of all GPUs"),
        (["--max-tp", "16"], "--max-tp 16: must be at most the 8 GPUs of a node"),
    ],
)
def test_a_bad_option_is_one_sentence(tmp_path: Path, capsys, options, words):
    if options[0] == "--where":
        path = tmp_path / "n.csv"
        path.write_text("num_tokens\n5\n")
        options = [*options, "--lengths", str(path)]
    assert sim.main([*OPTIONS, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_model_is_read_from_its_config(tmp_path: Path):
    """Qwen2.5 7B: 7.6 billion parameters, 57,344 bytes a token."""
    path = tmp_path / "config.json"
    sizes = {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    }
    path.write_text(json.dumps(sizes))
    found = read_model(str(path))
    assert found.parameters == pytest.approx(7.6e9, rel=0.01)
    assert (found.layers, found.kv_bytes) == (28, MODELS["7B"].kv_bytes)


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
    [(["--table", "2"], 24), (["--figure", "10c"], 12), (["stream"], 9), (["scaling"], 12)],
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
    ladder = rollpacker.ladder(rollpacker.published.SYSTEMS["14B/16k"], 0, prompts=4, gpus=4)
    assert list(ladder)[:5] == ["veRL", "tail", "reward", "planner", "trainer"]
    assert (
        ladder["tail"].rewards(lambda r: 0).after
        and not ladder["reward"].rewards(lambda r: 0).after
    )


def test_rollpacker_asks_for_one_table(capsys):
    assert sim.main(["rollpacker"]) == 2
    assert "one of --figure 11" in capsys.readouterr().err


def test_the_generator_of_8k_is_that_of_16k_with_another_cap():
    assert GENERATORS["8k"] == replace(GENERATORS["16k"], cap=8192)
