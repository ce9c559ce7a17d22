"""tools/studies/mismatch_study.py: its figures by hand, its verdicts on made-up rows, and one cell
through engine and learner."""

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.algos import base, mismatch
from rlcore.data import label_task
from rlcore.hf.config import HFConfig
from rlcore.tensors import Batch, LossInputs, cumulative

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": len(label_task.VOCAB),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "tools" / "studies" / "mismatch_study.py"
    spec = importlib.util.spec_from_file_location("study", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["study"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["study"]


def logs(*values):
    return np.log(np.array(values))


# ---- figures


def test_figures_of_two_responses_by_hand(tool):
    first = (logs(0.5, 0.25), logs(0.25, 0.25))  # differences .25, 0; w = 1/2, 1
    second = (logs(0.2), logs(0.8))  # difference .6; w = 4
    s = tool.summary([first, second])
    assert (s["responses"], s["tokens"]) == (2, 3)
    assert s["max"] == pytest.approx(0.6)
    assert s["mean"] == pytest.approx((0.125 + 0.6) / 2)  # of a response first, then of all
    assert s["median"] == pytest.approx((0.25 + 0.6) / 2)
    assert s["k1"] == pytest.approx((math.log(2) + 0 - math.log(4)) / 3)
    assert s["k3"] == pytest.approx((0.5 - 1 + math.log(2) + 0 + 4 - 1 - math.log(4)) / 3)
    assert s["maxima"] == pytest.approx([0.25, 0.6])


def test_counts_are_of_responses_above_the_mark(tool):
    pairs = [(logs(0.9, 0.9), logs(0.9 - d, 0.9)) for d in (0.6, 0.4, 0.2, 0.05, 0.001)]
    s = tool.summary(pairs)
    assert (s["above_half"], s["above_tenth"], s["above_hundredth"]) == (1, 3, 4)


def test_the_figures_are_those_of_the_training_metrics(tool):
    g = torch.Generator().manual_seed(0)
    lengths = [5, 1, 9]
    mu, p = (-2 * torch.rand(15, generator=g, dtype=torch.float64) for _ in range(2))
    x = LossInputs(
        **dict.fromkeys(("log_probs", "old_log_probs"), p),
        **dict.fromkeys(("entropy", "score", "advantage", "correction"), torch.zeros(15)),
        mask=torch.ones(15, dtype=torch.bool),
        rollout_log_probs=mu,
        ref_log_probs=None,
        sequence=torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)),
        num_sequences=3,
        versions=torch.zeros(15, dtype=torch.int32),
    )
    cfg = base.AlgoConfig()
    sums = mismatch.sums(x, p - mu, x.mask, cfg, 0)
    theirs = mismatch.metrics(sums.added.tolist(), sums.highest.tolist(), cfg)
    sides = [[t.numpy() for t in v.split(lengths)] for v in (mu, p)]
    ours = tool.summary(list(zip(*sides, strict=True)))
    for name, key in {
        "rollout_corr/kl": "k1",
        "rollout_corr/k3_kl": "k3",
        "rollout_corr/response_max_diff_max": "max",
        "rollout_corr/response_mean_diff_mean": "mean",
    }.items():
        assert ours[key] == pytest.approx(theirs[name], rel=1e-9), name
    assert np.mean(ours["maxima"]) == pytest.approx(theirs["rollout_corr/response_max_diff_mean"])


def test_lengths_that_disagree_are_refused(tool):
    with pytest.raises(ValueError, match="as many log-probs on both sides"):
        tool.summary([(logs(0.5, 0.5), logs(0.5))])
    with pytest.raises(ValueError, match="at least one"):
        tool.summary([])


def test_a_unit_joins_responses_and_cuts_long_ones(tool):
    batch = Batch(
        tokens=torch.zeros(9, dtype=torch.int64),
        cu_seqlens=cumulative([4, 5]),
        mask=torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool),
        rollout_log_probs=torch.log(torch.tensor([1, 0.5, 0.5, 0.5, 1, 1, 0.5, 0.5, 0.5])),
    )
    units = {
        "short": [tool.Unit((0,)), tool.Unit((1,))],
        "5 x short": [tool.Unit((0, 1))],
        "first of long": [tool.Unit((1,), 2)],
    }
    p = torch.log(torch.tensor([1, 0.5, 0.5, 0.4, 1, 1, 0.5, 0.5, 0.1]))
    short, both, first = tool.rows_of(tool.Sampled(batch, units), p, {"model": "m"}, list(units))
    assert short["maxima"] == pytest.approx([0.1, 0.4])
    assert (both["maxima"], both["tokens"]) == (pytest.approx([0.4]), 6)
    assert (first["maxima"], first["tokens"]) == (pytest.approx([0.0], abs=1e-7), 2)


def test_own_lengths_are_the_outer_thirds_and_the_beginning_of_the_longest(tool):
    units = tool.own_units([9, 2, 40, 3, 30, 10], first=100)
    assert [u.rows for u in units["own short"]] == [(101,), (103,)]
    assert [u.rows for u in units["own long"]] == [(104,), (102,)]
    assert {u.most for u in units["first of own long"]} == {2}  # the median of 2 and 3, rounded


def test_the_baseline_is_one_rank_with_all_else_equal(tool):
    rows = [
        row("m", "one", [0.1, 0.2]),
        row("m", "cp2", [0.1, 0.3]),
        row("m", "one", [0.4, 0.4], length="long"),
    ]
    tool.finish(rows)
    assert [r["baseline"] for r in rows] == [0.2, 0.2, 0.4]
    assert rows[1]["ratio"] == pytest.approx(1.5)
    assert rows[1]["name"] == "m / cp2 bf16 / torch tp1 bf16 / short"


# ---- findings


def row(model, learner, maxima, length="short", mean=0.01, k3=0.001, **changes):
    return {
        "model": model,
        "learner": learner,
        "learner_dtype": "bf16",
        "sampler": "torch tp1",
        "sampler_dtype": "bf16",
        "length": length,
        "responses": len(maxima),
        "max": max(maxima),
        "mean": mean,
        "k3": k3,
        "above_half": sum(m > 0.5 for m in maxima),
        "maxima": list(maxima),
        "value": max(maxima),
    } | changes


def finding(tool, rows, words, repeats=None):
    found = tool.findings([*rows, *tool.absent_samplers()], repeats or {"sampler": 0, "learner": 0})
    (one,) = [f for f in found if words in f["published"]]
    return one


SPREAD = [0.1, 0.2, 0.4, 0.3, 0.15, 0.25]


def test_equal_responses_are_compared_one_by_one(tool):
    a, b = row("m", "cp2", [1.1 * x for x in SPREAD]), row("m", "one", SPREAD)
    paired = tool.compare("", a, b)
    assert paired.ratio == pytest.approx(1.1) and paired.low == pytest.approx(1.1)
    other = tool.compare("", a | {"length": "long"}, b)
    assert other.ratio == pytest.approx(1.1) and other.low < 1 < other.high


def test_two_standard_errors_by_hand(tool):
    c = tool.compare("", row("m", "cp2", [0.1, 0.4]), row("m", "one", [0.1, 0.1]))
    # log ratios 0 and log 4: mean log 2, deviation log 4 / sqrt 2, standard error log 4 / 2
    assert c.ratio == pytest.approx(2)
    assert c.low == pytest.approx(2 / 4) and c.high == pytest.approx(2 * 4)


def test_a_split_learner_that_is_worse_agrees_and_an_equal_one_does_not(tool):
    words = "sequence parallelism"
    one, worse = row("m", "one", SPREAD), row("m", "cp2", [2 * x for x in SPREAD])
    assert finding(tool, [one, worse], words)["verdict"] == "agrees"
    assert finding(tool, [one, row("m", "cp2", SPREAD)], words)["verdict"] == "does not"
    both = [one, worse, row("n", "one", SPREAD), row("n", "cp2", SPREAD)]
    assert finding(tool, both, words)["verdict"] == "in part, 1 of 2"
    assert finding(tool, [one], words)["verdict"] == "cannot be tested here"


def test_tensor_parallel_is_better_where_context_parallel_is_worse(tool):
    rows = [row("m", "tp2 sp", SPREAD), row("m", "cp2", [2 * x for x in SPREAD])]
    assert finding(tool, rows, "TP 8 learner")["verdict"] == "agrees"
    swapped = [r | {"learner": {"tp2 sp": "cp2", "cp2": "tp2 sp"}[r["learner"]]} for r in rows]
    assert finding(tool, swapped, "TP 8 learner")["verdict"] == "does not"


def test_mean_and_kl_are_unchanged_within_a_quarter(tool):
    one = row("m", "one", SPREAD)
    words = "stay unchanged"
    assert finding(tool, [one, row("m", "cp2", SPREAD, mean=0.012)], words)["verdict"] == "agrees"
    both = finding(tool, [one, row("m", "cp2", SPREAD, mean=0.02, k3=0.003)], words)
    assert both["verdict"] == "does not" and "mean x2.00" in both["ours"]
    half = finding(tool, [one, row("m", "cp2", SPREAD, mean=0.02)], words)
    assert half["verdict"] == "in part, 1 of 2"


def test_lengths_are_told_apart(tool):
    rows = [
        row("m", "one", SPREAD),
        row("m", "one", [4 * x for x in SPREAD], "5 x short"),
        row("m", "one", [4 * x for x in SPREAD], "long"),
        row("m", "one", SPREAD, "first of long"),
    ]
    assert finding(tool, rows, "20k > 4k")["verdict"] == "agrees"
    assert finding(tool, rows, "20k > 5 x 4k")["verdict"] == "does not"
    assert finding(tool, rows, "first 4k")["verdict"] == "does not"


def test_models_are_told_apart(tool):
    rows = [row(m, "one", [f * x for x in SPREAD]) for m, f in (("random", 1), ("sft", 5))]
    assert finding(tool, rows, "base model")["verdict"] == "agrees"
    moe = [row(m, "one", [f * x for x in SPREAD]) for m, f in (("deep", 5), ("moe", 1))]
    assert finding(tool, moe, "MoE")["verdict"] == "agrees"  # smaller differs too
    same = [row(m, "one", SPREAD) for m in ("deep", "moe")]
    assert finding(tool, same, "MoE")["verdict"] == "does not"


def test_determinism_is_judged_where_both_sides_repeat(tool):
    rows = [row("m", "one", SPREAD)]
    words = "deterministic"
    assert finding(tool, rows, words)["verdict"] == "agrees"
    shaky = {"sampler": 1e-3, "learner": 0.0}
    assert finding(tool, rows, words, shaky)["verdict"] == "cannot be tested here"
    exact = [row("m", "one", [0.0, 0.0])]
    assert finding(tool, exact, words)["verdict"] == "does not"


def test_what_needs_another_sampler_cannot_be_tested(tool):
    for words in ("backend alone", "equal TP", "sampler TP 2 has", "sampler TP 2:"):
        assert finding(tool, [row("m", "one", SPREAD)], words)["verdict"] == "cannot be tested here"
    names = {r["sampler"]: r["note"] for r in tool.absent_samplers()}
    assert set(names) == {"sglang tp1", "sglang tp2", "torch tp2"}
    assert {r["sampler"] for r in tool.absent_samplers(tuple(tool.BACKENDS))} == {"torch tp2"}


def test_the_samplers_backend_and_size_are_judged_by_their_rows(tool):
    one = row("m", "one", SPREAD)
    near = row("m", "one", [1.2 * x for x in SPREAD], sampler="sglang tp1")
    far = row("m", "one", [2 * x for x in SPREAD], sampler="sglang tp1")
    assert finding(tool, [one, near], "backend alone")["verdict"] == "agrees"
    assert finding(tool, [one, far], "backend alone")["verdict"] == "does not"
    split = row("m", "one", [9 * x for x in SPREAD], sampler="sglang tp2")
    assert finding(tool, [one, near, split], "sampler TP 2 has")["verdict"] == "agrees"
    assert finding(tool, [one, far, near | {"sampler": "sglang tp2"}], "TP 2 has")["verdict"] == (
        "does not"
    )
    equal = row("m", "tp2 sp", [0.1, 0.2, 0.3], sampler="sglang tp2")
    assert finding(tool, [one, equal], "equal TP")["verdict"] == "agrees"
    many = row("m", "tp2 sp", [0.1, 0.9, 0.3], sampler="sglang tp2")
    assert finding(tool, [one, many], "equal TP")["verdict"] == "does not"


@pytest.mark.slow
@pytest.mark.ranks(1)
@pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="needs SGLang: bash tools/setup.sh --sglang"
)
def test_sglang_samples_what_the_torch_engine_does(tool, tmp_path):
    folder, size = tmp_path / "m", replace(tool.QUICK, short=6, long=9)
    hf = HFConfig.from_dict(CONFIG)
    tool.save_folder(tool.random_weights(hf, 0), hf, None, folder)
    subject = tool.Subject(name="m", folder=folder, hf=hf, prompts=2, ends=False)
    ours = tool.sample(subject, tool.SAMPLERS["fp32"], size, 0)
    theirs = tool.sample(subject, tool.SAMPLERS["fp32"], size, 0, "sglang tp1")
    assert torch.equal(theirs.batch.tokens, ours.batch.tokens)
    assert torch.allclose(theirs.batch.rollout_log_probs, ours.batch.rollout_log_probs, atol=1e-5)


# ---- through engine and learner


def test_models_are_chosen_by_name_and_an_unknown_one_is_refused(tool, tmp_path):
    hf = HFConfig.from_dict(CONFIG)
    a, b = (tool.Subject(name=n, folder=tmp_path, hf=hf, prompts=1, ends=False) for n in "ab")
    assert tool.chosen([a, b], None) == [a, b] and tool.chosen([a, b], ["b"]) == [b]
    with pytest.raises(ValueError, match="--models c: is not here; take some of a, b"):
        tool.chosen([a, b], ["c"])


def test_the_samplers_axis_alone_has_equal_learners_for_all_samplers(tool, tmp_path):
    hf, size = HFConfig.from_dict(CONFIG), tool.of_samplers(tool.Size())
    subject = tool.Subject(name="m", folder=tmp_path, hf=hf, prompts=1, ends=False)
    cases, refused = tool.plan([subject], size, tuple(tool.BACKENDS))
    assert not refused and {c.layout for c in cases} == {"one", "tp2 sp"}
    every = {f"m {b} {s}" for b in tool.BACKENDS for s in ("bf16", "bf16 fp32-head")}
    assert all(set(c.samples) == every for c in cases)


def test_models_of_one_shape_share_an_engine_and_sample_as_alone(tool, tmp_path, monkeypatch):
    size = replace(tool.QUICK, short=6, long=0, own=0)
    hf, subjects = HFConfig.from_dict(CONFIG), []
    for name, of in (("a", hf), ("b", hf), ("c", hf.with_(max_positions=100))):
        tool.save_folder(tool.random_weights(of, len(subjects)), of, None, tmp_path / name)
        subject = tool.Subject(name=name, folder=tmp_path / name, hf=of, prompts=2, ends=True)
        subjects.append(subject)
    made, make = [], tool.make_engine
    monkeypatch.setattr(tool, "make_engine", lambda *args: made.append(args) or make(*args))
    pairs = tool.samples(subjects, tool.SAMPLERS["fp32"], size, 0, "torch tp1")
    found = {subject.name: sampled for subject, sampled in pairs}
    assert len(made) == 2 and set(found["a"].units) == {"short", "5 x short"}
    alone = tool.sample(subjects[1], tool.SAMPLERS["fp32"], size, 0).batch
    assert torch.equal(found["b"].batch.tokens, alone.tokens)
    assert torch.equal(found["b"].batch.rollout_log_probs, alone.rollout_log_probs)
    assert not torch.equal(found["a"].batch.tokens, alone.tokens)


def test_one_rank_scores_what_the_engine_sampled(tool, tmp_path, capsys):
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    hf = HFConfig.from_dict(CONFIG | {"architectures": ["Qwen3MoeForCausalLM"], **moe})
    folder = tmp_path / "models" / "m"
    tool.save_folder(tool.random_weights(hf, 0), hf, None, folder)
    subject = tool.Subject(name="m", folder=folder, hf=hf, prompts=2, ends=True)
    size = replace(tool.QUICK, short=8, long=20, own=6, layouts=("one", "tp2"))
    cases, refused = tool.plan([subject], size)
    every = [("one", dtype, replays) for dtype in ("fp32", "bf16") for replays in (False, True)]
    assert [(c.layout, c.dtype, c.replays) for c in cases] == every
    assert refused[0]["learner"] == "tp2" and "--train.tp 2" in refused[0]["note"]

    made = {s: tool.sample(subject, tool.SAMPLERS[s], size, 0) for s in ("fp32", "bf16")}
    for sampler, sampled in made.items():
        tool.save_batch(sampled.batch, tmp_path / f"m {sampler}")
    cases = [replace(c, samples=("m fp32", "m bf16")) for c in cases]
    tool.score(tmp_path, cases, 120.0)
    rows = []
    for number, case in enumerate(cases):
        for name, logp in torch.load(tmp_path / f"{number}.pt", weights_only=True).items():
            model = "m R3" if case.replays else "m"
            labels = {"model": model, "learner": "one", "learner_dtype": case.dtype}
            labels |= {"sampler": "torch tp1", "sampler_dtype": name.removeprefix("m ")}
            rows += tool.rows_of(made[labels["sampler_dtype"]], logp, labels, [*tool.SPLIT])
    tool.finish(rows)
    table = tool.Table(rows)
    wide = table.get("m", learner_dtype="fp32", sampler_dtype="fp32")
    assert (wide["responses"], wide["tokens"]) == (10, 80)
    assert wide["median"] < 1e-5
    assert table.get("m")["median"] > 1e-4
    assert table.get("m R3")["max"] <= table.get("m")["max"]
    assert table.get("m", length="long")["tokens"] == 40
    assert table.get("m", length="first of long")["tokens"] == 16

    rows += [*refused, *tool.absent_samplers()]
    found = tool.findings(rows, {"sampler": 0.0, "learner": 0.0})
    tool.write_json(tmp_path / "out.json", {"what": "test"}, rows, found)
    read = json.loads((tmp_path / "out.json").read_text())
    assert len(read["rows"]) == len(rows) and len(read["findings"]) == len(found)
    assert {"name", "value", "unit", "baseline", "ratio"} <= read["rows"][0].keys()
    assert "--sglang measures it" in "\n".join(tool.table_lines(rows))
    tool.draw(rows, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_a_rank_that_fails_is_reported_with_its_last_words(tool, tmp_path):
    case = tool.Case(model="absent", layout="one", dtype="fp32", samples=())
    with pytest.raises(RuntimeError, match=r"rank 0 of 1 failed(.|\n)*no such folder"):
        tool.score(tmp_path, [case], 120.0)
