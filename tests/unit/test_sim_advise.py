"""Advice from a recorded run and from a model, the ladder, and the constants of the cost model."""

import json
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rlcore.cli import settings, sim
from rlcore.config import resolve, rules
from rlcore.config.schema import DraftConfig
from rlcore.records import Sampling
from rlcore.rollout.round_log import LoggedRound, Started
from rlcore.sched.completion_order import Counted
from rlcore.sim import advise, calibrate, ladder, recorded, replay
from rlcore.sim.cost import CONSTANTS, ERROR, Constants, EngineCost, engine_cost, model_named
from rlcore.sim.drafts import DraftGain
from rlcore.sim.engine import SimRequest
from rlcore.sim.phases import (
    Layout,
    offload_s,
    resize_s,
    train_row,
    training_cost,
    update_weights_s,
)
from rlcore.sim.published import SYSTEMS
from rlcore.utils.gpus import GPUS
from tests import kit
from tests.unit.test_sim_run import small

ROOT = Path(__file__).resolve().parents[2]

# ---- a recorded run


def record(
    folder: Path,
    steps: int = 12,
    prompt: int = 10,
    shares: bool = False,
    keys: str = "",
    latency_s: float = 0.0,
    **changes: object,
) -> Path:
    """The files of a run of two ranks whose seconds follow a law: a decode step takes 20 ms and
    .1 ms a request, training .5 s and 1 ms a computed token, a push 50 ms, the rest .1 s. Responses
    are scored as they end, each in `latency_s`. `keys`: further keys of the run."""
    model = folder / "hf"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(kit.tiny_config()))
    words = [
        *("--model.path", "model", "--data.train", "data", "--eval.every", "0"),
        *("--data.prompts_per_step", "4", "--rollout.samples_per_prompt", "4"),
        *("--rollout.engine", "torch", "--rollout.max_tokens", "200"),
        *("--rollout.routing", "response", "--data.max_prompt_tokens", str(prompt)),
        *keys.split(),
    ]
    cfg = settings.parse(words)
    assert not rules.broken(cfg)
    saved = json.loads(resolve.to_json(cfg))
    saved["select"] |= changes
    (folder / "config.json").write_text(json.dumps(saved))
    dice, rows, rounds = np.random.default_rng(0), [], []
    for step in range(1, steps + 1):
        lengths = dice.integers(5, 60 + 70 * (step % 3), (4, 4))  # some steps are longer
        engines = lengths[:, :2], lengths[:, 2:]
        decode, tokens = sum(int(e.max()) for e in engines), int(lengths.sum())
        trained = 0.5 + 1e-3 * (tokens + 16 * prompt - shares * 12 * (prompt - 1))
        gen = max(0.02 * e.max() + 1e-4 * e.sum() for e in engines) + latency_s
        rows.append(
            {
                "step": step,
                "training/global_step": step,
                "sched/decode_steps": decode,
                "sched/decode_tokens": tokens,
                "sched/busy_s": 0.02 * decode + 1e-4 * tokens,
                "prompt_length/mean": float(prompt),
                "perf/total_num_tokens": tokens + 16 * prompt,
                "perf/throughput": (tokens + 16 * prompt) / 2 / (gen + trained + 0.15),
                "reward/latency_s/mean": latency_s,
                "timing_s/gen": gen,
                "timing_s/update_actor": trained,
                "timing_s/update_weights": 0.05,
                "timing_s/step": gen + trained + 0.15,
            }
        )
        if shares:
            rows[-1]["actor/shared_tokens"] = 12 * (prompt - 1) / (tokens + 16 * prompt)
        started = [Started(f"t{step}{k}", 4 * step + k, 0, 4, 4) for k in range(4)]
        counted = [
            Counted(f"t{step}{k}.{i}", int(lengths[k, i]), 1.0) for k in range(4) for i in range(4)
        ]
        rounds.append(
            LoggedRound(
                step=step,
                seed=0,
                sampling=Sampling(max_tokens=200),
                started=tuple(started),
                counted=tuple(counted),
                kept=tuple(s.id for s in started),
            )
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = b"".join(msgspec.json.encode(r) + b"\n" for r in rounds)
    (folder / "rounds.jsonl").write_bytes(lines)
    return folder


def test_a_recorded_run_has_its_own_lengths_and_seconds(tmp_path: Path):
    found = recorded.read(record(tmp_path / "run"))
    job = found.job
    assert (found.steps, job.gpus, len(job.workload.by_prompt)) == (10, 2, 40)
    cost = job.engine(1)
    assert cost.step_s == pytest.approx(0.02, rel=1e-6)
    assert cost.sequence_s == pytest.approx(1e-4, rel=1e-4)
    assert job.training.token_s == pytest.approx(1e-3, rel=1e-4)
    # what the phases leave of a step stays, so the recorded settings take the measured seconds;
    # engines wait for it, since they go on when the step is over
    assert job.training.sync_s == pytest.approx(0.05 + 0.1, rel=0.1)
    again = recorded.simulate(job, found.steps)
    assert again.seconds == pytest.approx(found.measured_s, rel=0.02)
    assert job.training_on(1).token_s == pytest.approx(2e-3, rel=1e-4)


@pytest.mark.parametrize(
    "keys",
    [
        "--reward.workers 32",
        "--reward math:1,exact:1 --reward.workers 32 --algo.adv_estimator gdpo",
        "--reward.workers 32 --algo opd --teacher.models t",
        "--reward.workers 32 --algo.teacher_kl_coef 0.1 --teacher.models t --teacher.top_k 8",
        "--reward.workers 32 --algo gkd --teacher.models t --data.teacher_prompt_field hint",
        "--reward.workers 32 --env frozenlake --data.train --data.suffix x",
    ],
)
def test_rewards_teachers_and_environments_of_a_recorded_run_are_met(tmp_path: Path, keys: str):
    found = recorded.read(record(tmp_path / "run", keys=keys, latency_s=0.5))
    assert found.job.training.sync_s == pytest.approx(0.05 + 0.1, rel=0.1)
    again = recorded.simulate(found.job, found.steps)
    assert again.seconds == pytest.approx(found.measured_s, rel=0.02)


def test_a_recorded_run_has_its_own_drafts_where_they_are_switched_on(tmp_path: Path):
    keys = "--rollout.draft ngram --draft.max_length 16 --draft.no_adaptive"
    found = recorded.read(record(tmp_path / "run", keys=keys))
    assert found.job.cfg.draft == DraftConfig() and found.job.cfg.rollout.draft == "none"
    own = ("--draft.max_length", "16", "--draft.no_adaptive")
    assert found.drafts == (*ladder.DRAFTS, *own)
    systems = [arm.systems for arm in advise.arms(found.job, found.drafts)]
    assert {x["drafts"] for x in systems if "drafts" in x} == {found.drafts}
    made = found.job.with_("drafts", *found.drafts, gain=DraftGain((0,), (2.0,), 3))
    assert made.cfg.draft == DraftConfig(max_length=16, adaptive=False)
    assert recorded.simulate(made, 1).seconds < recorded.simulate(found.job, 1).seconds


def test_a_run_that_shares_prefixes_is_met_with_its_computed_tokens(tmp_path: Path):
    found = recorded.read(record(tmp_path / "run", prompt=200, shares=True))
    assert found.job.training.shares_prefix
    assert found.job.training.token_s == pytest.approx(1e-3, rel=1e-4)
    assert found.job.training.sync_s == pytest.approx(0.05 + 0.1, rel=0.1)
    work = found.job.training.work(found.job.drawn())
    lengths = sum(row.num_tokens for row in found.job.drawn())
    assert work.tokens == lengths + 4 * 199 + 16  # four groups of four


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "async"}, "was recorded with --mode async --schedule all; record some steps"),
        ({"steps": 4}, "has 2 steps after the first 2; record at least 5"),
    ],
)
def test_a_run_that_cannot_be_used_says_why(tmp_path: Path, capsys, changes, words):
    folder = record(tmp_path / "run", **changes)
    assert sim.main(["advise", "--run", str(folder)]) == 2
    assert words in capsys.readouterr().err
    assert sim.main(["advise", "--run", str(tmp_path / "none")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_advice_on_a_recorded_run_is_keys_to_set(tmp_path: Path, capsys):
    out = tmp_path / "advice.json"
    folder = record(tmp_path / "run")
    assert sim.main(["advise", "--run", str(folder), "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "drafts: not known" in said and "the best 3, as keys:" in said
    rows = json.loads(out.read_text())["rows"]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    names = {row["name"]: row for row in rows}
    assert {"synchronous", "tail", "async 1", "async 2"} <= names.keys()
    assert not any("drafts" in name for name in names)  # their gain is not known
    assert names["tail"]["keys"] == ["--schedule", "tail_batching"]
    assert names["tail"]["contributions"]["tail"] == pytest.approx(names["tail"]["speed_up"])


def test_advice_needs_one_subject(capsys):
    assert sim.main(["advise"]) == 2
    assert "either a model or --run DIR" in capsys.readouterr().err


# ---- drafts by replay


def test_what_was_said_before_is_drafted_and_what_was_not_is_not():
    dice, job = np.random.default_rng(0), small()
    texts = [dice.integers(0, 1000, 300).astype(np.int32) for _ in range(4)]
    same = [(step, k, text) for step in (1, 2) for k, text in enumerate(texts)]
    found = replay.gain(same, DraftConfig(), job, 1)
    assert found is not None and found.gains[-1] > 3
    other = [(2, k, dice.integers(0, 1000, 300).astype(np.int32)) for k in range(4)]
    new = replay.gain(same[:4] + other, DraftConfig(), job, 1)
    assert new is not None and max(new.gains) < 1.1
    assert replay.gain(same[:4], DraftConfig(), job, 1) is None  # no prompt came twice
    assert replay.gain(same, DraftConfig(), job, 3) is None  # no step is left
    first_epoch = [*same[:7], (2, 9, same[0][2])]  # step 2 has a prompt without history
    assert replay.gain(first_epoch, DraftConfig(), job, 1) is None


def test_a_draft_is_short_where_many_run_and_products_bind():
    dice = np.random.default_rng(0)
    texts = [dice.integers(0, 1000, 100).astype(np.int32) for _ in range(32)]
    rows = [(step, k, text) for step in (1, 2) for k, text in enumerate(texts)]
    free = replay.gain(rows, DraftConfig(), small(cost=EngineCost(step_s=1.0)), 1)
    dear = replay.gain(rows, DraftConfig(), small(cost=EngineCost(step_s=0.01, sequence_s=0.1)), 1)
    assert free is not None and dear is not None
    assert dear.width < 0.5 * free.width and dear.gains[-1] < free.gains[-1]


def test_a_prompt_whose_responses_repeat_is_decoded_faster_than_one_whose_do_not():
    dice = np.random.default_rng(0)
    told, new = dice.integers(0, 1000, 200), [dice.integers(0, 1000, 200) for _ in range(2)]
    rows = [(step, k, text) for step in (1, 2) for k, text in enumerate((told, new[step - 1]))]
    found = replay.gain(
        [(step, k, text.astype(np.int32)) for step, k, text in rows], DraftConfig(), small(), 1
    )
    assert found is not None
    quick, slow = found.pace(0, 200, 0), found.pace(1, 200, 0)
    assert quick < 0.5 and slow > 1.4
    # with its pace, an engine takes the forwards that the replay has counted
    assert SimRequest(id="t1.0", prompt=9, length=200, pace=slow).left(found) == 200
    few = SimRequest(id="t0.0", prompt=9, length=200, pace=quick)
    few.settle(few.left(found), found)
    assert few.have == 200 and few.left(found) == 1
    assert few.again().pace == quick
    assert found.pace(7, 200, 0) == slow  # rows repeat, as those of a workload do
    assert DraftGain(starts=(0,), gains=(2.0,), width=3).pace(0, 9, 0) == 1
    pair = replace(found, paces=(((10, 0.5), (20, 1.0), (20, 2.0)),))
    assert {pair.pace(0, 30, seed) for seed in range(9)} == {1.0, 2.0}


# ---- a model


def test_advice_on_a_model_fits_its_gpus(tmp_path: Path, capsys):
    out = tmp_path / "advice.json"
    words = "advise 7b --gpus 8 --lengths 8k --data.prompts_per_step 8 --json"
    assert sim.main([*words.split(), str(out)]) == 0
    said = capsys.readouterr().out
    assert "strictly on-policy" in said and "GB of a GPU" in said and "x/÷" in said
    keys = said.split("as keys:")[1].splitlines()[3].split()
    assert {"--rollout.routing", "--train.offload", "--rollout.kv_cache_tokens"} <= set(keys)
    settings.parse(["--model.path", "m", "--data.train", "label", *keys])  # a run takes them
    rows = json.loads(out.read_text())["rows"]
    assert rows[0]["speed_up"] > 1 and "drafts" in rows[0]["contributions"]
    assert sim.main(["advise", "7b", "--gpus", "0"]) == 2
    assert "--gpus 0: must be at least 1" in capsys.readouterr().err
    assert sim.main(["advise", "32b", "--gpus", "2", "--lengths", "8k"]) == 2
    assert "no layout of 2 x H100 fits" in capsys.readouterr().err


# ---- the ladder


def test_the_ladder_has_every_composition_that_rules_allow(monkeypatch):
    size = replace(ladder.SIZES[0], prompts=4)
    base = ladder.job(size, 0)
    arms = ladder.on_policy(base) | ladder.bounded(base)
    assert len(ladder.on_policy(base)) == 16 and set(ladder.RUNGS) <= arms.keys()
    monkeypatch.setattr(ladder, "STEPS", 1)
    monkeypatch.setattr(ladder, "EPOCH", 2)
    monkeypatch.setattr(ladder, "ALPHAS", (1, 2, 4))
    rows = ladder.table([0], lambda said: None, [size]).rows
    assert {row["part"] for row in rows} == {"rung", "arm", "best", "gain"}
    assert rows[0]["simulated"] == 1
    best = [row for row in rows if row["part"] == "best"]
    assert [row["kind_of_best"] for row in best] == ["on-policy", "bounded staleness"]
    assert best[0]["simulated"] >= max(
        row["simulated"] for row in rows if row["part"] == "rung" and "async" not in row["arm"]
    )


# ---- constants


def test_the_constants_in_use_are_those_of_the_calibration():
    found = json.loads((ROOT / "tools" / "results" / "sim_calibrate.json").read_text())
    for name in calibrate.PRIOR:
        assert getattr(CONSTANTS, name) == pytest.approx(found["constants"][name], rel=0.01)
    assert found["constants"]["error"] == pytest.approx(ERROR, rel=0.02)
    assert found["constants"]["median"] < 0.15
    told = [row["published"] for row in found["rows"]]
    assert told == [round(p.published, 3) for p in calibrate.points()]


def costs(c: Constants) -> dict[str, float]:
    """Seconds of the parts of every published system, by name."""
    out = {}
    for name, system in SYSTEMS.items():
        model, gpu = model_named(system.model), GPUS["H800"]
        tp, pp, cp = system.layout
        layout = Layout(gpus=system.gpus, tp=tp, pp=pp, cp=cp)
        cost = engine_cost(model, gpu, system.tp, constants=c)
        training = training_cost(model, gpu, layout, constants=c)
        rows = [train_row("t0", 300, 3700)] * 64
        out |= {
            f"{name}: decode": cost.decode_s(8, 8000, 1),
            f"{name}: prefill": cost.prompt_s(4000),
            f"{name}: training": training.update_s(training.work(rows)) + training.step_s,
            f"{name}: padding": c.padding * training.token_s,
            f"{name}: overhead": c.overhead_s,
            f"{name}: turns": offload_s(model, gpu, system.gpus, c),
            f"{name}: push": update_weights_s(model, gpu, layout, system.tp, constants=c),
            f"{name}: resize": resize_s(model, gpu, system.tp, c),
        }
    moe, gpu = model_named("30B-A3B"), GPUS["H100"]
    for gpus in (32, 64):
        layout = Layout(gpus=gpus, tp=2, ep=8)
        out[f"30B-A3B/{gpus}: training"] = training_cost(moe, gpu, layout, constants=c).token_s
        out[f"30B-A3B/{gpus}: decode"] = engine_cost(moe, gpu, 4, constants=c).sequences_s(8)
    return out


def test_no_constant_belongs_to_one_cell(record_property):
    """Every constant of the cost model, with the published systems that it touches."""
    plain = costs(CONSTANTS)
    for f in fields(Constants):
        value = getattr(CONSTANTS, f.name)
        other = costs(replace(CONSTANTS, **{f.name: 1.5 * value}))
        touched = [cell for cell in plain if abs(other[cell] / plain[cell] - 1) > 1e-4]
        record_property(f.name, ", ".join(touched))
        systems = {cell.partition(":")[0] for cell in touched}
        assert len(systems) >= 2, (f.name, touched)


def test_the_best_three_have_an_on_policy_one():
    sync, fast = small(), small("--mode", "async", "--cluster.rollout_ranks", "2")
    one = recorded.simulate(sync, 1)
    useless = advise.Advice(sync, (), one, {"queue": 1.0})
    found = [useless, *[advise.Advice(fast, (), one, {})] * 3, advise.Advice(sync, (), one, {})]
    assert [x.is_on_policy for x in advise.best(found)] == [False, False, True]
    assert useless not in advise.best(found)
