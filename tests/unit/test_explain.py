"""The arithmetic of a batch, and the expected time of a step."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.cli import dry_run, explain, settings, sim, splits
from rlcore.hf.config import HFConfig
from rlcore.mcore.layout import layout_of
from rlcore.sim import expect
from rlcore.sim.cost import hf_named
from rlcore.utils import gpus
from tests import kit

KEYS = (
    "--model.path m --data.train label --eval.every 0 --data.prompts_per_step 32 "
    "--rollout.samples_per_prompt 8 --train.samples_per_update 64"
)


def _big(**changes: Any) -> HFConfig:
    sizes = {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    return HFConfig.from_dict(kit.tiny_config("qwen2", **(sizes | changes)))


def test_the_arithmetic_of_a_batch_by_hand(monkeypatch, capsys):
    monkeypatch.setenv("NODES", "2")
    monkeypatch.setenv("GPUS_PER_NODE", "4")
    more = "--train.tp 2 --rollout.max_tokens 1000 --data.max_prompt_tokens 24 --run.steps 10"
    assert explain.main([*KEYS.split(), *more.split(), "--rollout.max_running_requests", "16"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "32 prompts x 8 responses = 256 samples" in lines["step"]
    assert "4 of 64 samples, 1 epoch(s): 4 optimizer steps" in lines["update"]
    assert "16 samples per update on each of 4 data-parallel ranks" in lines["rank"]
    assert "24 + 1000 = 1024 per sample, 262 k per step, 16 k per update" in lines["tokens"]
    assert "8 engine(s) of 1 rank(s)" in lines["decoding"] and "2 wave(s)" in lines["decoding"]
    assert "actor.ppo_mini_batch_size 8" in out


def test_ranks_that_only_sample_have_the_engines_and_no_share_of_an_update(monkeypatch, capsys):
    monkeypatch.setenv("GPUS_PER_NODE", "8")
    keys = "--mode async --cluster.rollout_ranks 6 --rollout.tp 2 --rollout.max_running_requests 16"
    assert explain.main([*KEYS.split(), *keys.split()]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "32 samples per update on each of 2 data-parallel ranks" in lines["rank"]
    assert "3 engine(s) of 2 rank(s), 16 requests each: 6 wave(s)" in lines["decoding"]


@pytest.mark.parametrize(
    ("keys", "train_ranks", "world", "said"),
    [
        (
            "--train.tp 4 --train.cp 2",
            32,
            32,
            "tp + 4 x cp + 8 x dp, counted from 0; first rank of an engine",
        ),
        ("--train.pp 2", 8, 8, "dp + 4 x pp, counted from 0; first rank of an engine = 2 x engine"),
        ("--train.tp 2", 4, 16, "tp + 2 x dp, counted from 0; first rank of an engine = 4 + 2 x"),
        (
            "--train.ep 4",
            8,
            8,
            "dp, counted from 0; experts are sharded over 4 neighbours of a stage",
        ),
        ("", 1, 1, "rank = 0, counted from 0"),
    ],
)
def test_the_rank_map_is_that_of_the_layout(keys, train_ranks, world, said):
    layout = layout_of(settings.parse(keys.split()).train, train_ranks, 0)
    assert said in dry_run.rank_map(layout, world, 8, 2)


def test_the_terms_of_the_rank_map_give_every_rank():
    train = settings.parse(["--train.tp", "2", "--train.cp", "3", "--train.pp", "2"]).train
    said = dry_run.rank_map(layout_of(train, 48, 0), 48, 8, 1)
    assert "rank = tp + 2 x cp + 6 x dp + 24 x pp" in said
    for rank in range(48):
        at = layout_of(train, 48, rank)
        assert rank == at.tp_rank + 2 * at.cp_rank + 6 * at.dp_rank + 24 * at.pp_rank


def test_a_key_that_is_not_there_is_refused(capsys):
    assert explain.main(["--data.prompt_per_step", "3"]) == 2
    assert "did you mean --data.prompts_per_step" in capsys.readouterr().err


def test_a_batch_without_arithmetic_is_refused_in_a_sentence(capsys):
    assert explain.main(["--rollout.samples_per_prompt", "0"]) == 2
    assert capsys.readouterr().err == "--rollout.samples_per_prompt 0: must be above 0\n"


def test_a_step_of_seven_billion_weights_is_estimated_and_more_gpus_are_faster():
    more = "--rollout.max_tokens 2048 --data.prompts_per_step 512 --train.samples_per_update 0"
    cfg = settings.parse([*KEYS.split(), *more.split()])
    few, many = (dry_run.expected(cfg, _big(), n) for n in (8, 32))
    seconds = [float(line.split()[1]) for line in (few, many)]
    assert "(gen " in few and "cut at 2048" in few and "simulated without rewards" in few
    assert 0 < seconds[1] < seconds[0]


def test_a_job_takes_the_same_seconds_behind_every_door(tmp_path: Path, capsys):
    """`--dry-run`, its planner, `sim run`, `sim splits` and a table's own job."""
    words = (
        "--rollout.engine sglang --rollout.max_tokens 16384 --data.max_prompt_tokens 300 "
        "--data.prompts_per_step 16 --rollout.samples_per_prompt 4 --mode async "
        "--cluster.rollout_ranks 4 --async.alpha 1 --train.tokens_per_micro_batch 16684"
    )
    keys = words.split()
    cfg = settings.parse(["--model.path", "m", "--data.train", "label", "--eval.every", "0", *keys])
    hf = hf_named("7B")
    dry = float(dry_run.expected(cfg, hf, 8).split()[1])
    planner = float(dry_run.split(cfg, hf, 8, 8).split(": ")[1].split()[0])
    path = tmp_path / "sim.json"
    more = ["--gpus", "8", "--model", "7b", "--steps", str(expect.STEPS), "--json", str(path)]
    assert sim.main(["run", *more, "--baseline", "none", *keys]) == 0
    (arm,) = json.loads(path.read_text())["arms"].values()
    assert sim.main(["splits", *more, "--alpha", "1", *keys]) == 0
    rows = {row["cell"]: row["step_s"] for row in json.loads(path.read_text())["rows"]}
    split = rows["4 train, 4 sample: samples/s"]
    assert dry == pytest.approx(arm["seconds"], abs=0.06)
    assert planner == pytest.approx(arm["seconds"], rel=5e-3)
    assert split == pytest.approx(arm["seconds"], abs=6e-3)


def test_lengths_of_an_earlier_run_are_gone_by(tmp_path: Path):
    rows = [{"step": 1, "id": f"t{i // 8}.{i % 8}", "num_tokens": 10 + i} for i in range(80)]
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = settings.parse(KEYS.split())
    found, _ = expect.lengths(cfg, file)
    assert found.cap == 89
    assert expect.lengths(cfg, tmp_path / "none")[0].cap == cfg.rollout.max_tokens


def test_what_cannot_be_estimated_says_why():
    cfg = settings.parse(KEYS.split())
    tiny = HFConfig.from_dict(kit.tiny_config())
    assert "too few for a GPU's data sheet" in dry_run.expected(cfg, tiny, 2)
    assert "expected     " in dry_run.expected(cfg, hf_named("30B-A3B"), 8)
    assert "the weights take" in dry_run.expected(cfg, hf_named("32B"), 8)
    one = settings.parse([*KEYS.split(), "--rollout.max_tokens", "2000000"])
    with pytest.raises(ValueError, match="has room for"):
        expect.step(one, _big(), 8, gpus.GPUS["H100"], Path("none"))


def test_a_gpu_is_known_by_the_name_that_its_driver_gives():
    found = gpus.gpu_named("NVIDIA H100 80GB HBM3")
    assert found is not None and found.name == "H100"
    assert gpus.gpu_named("NVIDIA A100-SXM4-80GB") == gpus.GPUS["A100"]
    assert gpus.gpu_named("Tesla T4") is None


SPLIT = (
    "--rollout.engine sglang --mode async --cluster.rollout_ranks 4 --rollout.tp 2 --train.tp 4 "
    "--run.name split"
)


def test_splits_are_whole_engines_and_whole_model_replicas():
    cfg = settings.parse([*KEYS.split(), *SPLIT.split()])
    assert splits.possible(cfg, 16, 8) == [4, 8, 12]


def test_a_split_is_proposed_by_the_data_sheet_and_then_by_the_last_steps(tmp_path: Path):
    more = "--rollout.max_tokens", "1024", "--run.dir", str(tmp_path)
    cfg = settings.parse([*KEYS.split(), *SPLIT.split(), *more])
    said = dry_run.split(cfg, _big(), 16, 8)
    assert said.startswith("balance      12 ranks train and 4 sample: ") and "H100" in said
    folder = tmp_path / "split"
    folder.mkdir()
    row = {
        "step": 3,
        "timing_s/step": 10.0,
        "sched/trainer_idle": 0.6,
        "sched/busy_s": 20.0,
        "sched/decode_steps": 2000,
        "sched/decode_tokens": 20000,
        "response_length/max": 100.0,
        "perf/throughput": 50.0,
        "perf/total_num_tokens": 8000.0,
    }
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "config.json").write_text('{"cluster": {"rollout_ranks": 4}}')
    said = dry_run.split(cfg, _big(), 16, 8)
    assert "by the last steps" in said  # 48 s of training; engines have room for many more
    (folder / "config.json").write_text('{"cluster": {"rollout_ranks": 8}}')
    assert "by simulation on 16 x H100" in dry_run.split(cfg, _big(), 16, 8)


def test_where_nothing_is_known_of_other_splits_it_says_why(tmp_path: Path):
    cfg = settings.parse([*KEYS.split(), *SPLIT.split(), "--run.dir", str(tmp_path)])
    tiny = HFConfig.from_dict(kit.tiny_config())
    said = dry_run.split(cfg, tiny, 16, 8)
    assert (
        said.startswith("balance      no estimate of other numbers of rollout ranks:")
        and "too few" in said
    )
