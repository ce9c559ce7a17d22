"""Real input through the recipe: GSM8K rows, the Qwen tokenizer and its vocabulary, two steps of a
random model of two layers on the CPU."""

import json
import shutil
from pathlib import Path

import pytest

from tests import runs
from tests.recipes.conftest import QWEN, RECIPES, Bench

ARGS = {
    "model.random_init": None,
    "model.dtype": "float32",  # a CPU without bfloat16 products takes minutes
    "run.steps": 2,
    "eval.every": 0,
    "data.num_prompts": 64,
    "data.num_val_prompts": 4,
    "data.max_prompt_tokens": 120,
    "data.prompts_per_step": 2,
    "rollout.samples_per_prompt": 2,
    "rollout.max_tokens": 16,
    "train.samples_per_update": 0,
    "train.tokens_per_micro_batch": 512,
    "algo.entropy_coef": 0.01,  # all rewards are 0: something must have a gradient
    "checkpoint.no_at_end": None,
    "checkpoint.no_export_hf": None,
    "log.no_tensorboard": None,
}


def qwen_folder(folder: Path, data: Path) -> Path:
    """Qwen2.5-0.5B's config.json with two layers, and its tokenizer."""
    folder.mkdir()
    for file in (data / "tokenizer_qwen").glob("*.json"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(QWEN | {"num_hidden_layers": 2}))
    return folder


@pytest.mark.slow  # a minute or more, of it most in the vocabulary's products
@pytest.mark.ranks(1)
@pytest.mark.timeout(1000)
def test_two_steps_on_gsm8k_with_the_real_vocabulary(bench: Bench, real_data: Path) -> None:
    rows = real_data / "math" / "gsm8k_train.jsonl"
    words = [str(w) for k, v in ARGS.items() for w in (f"--{k}", v) if w is not None]
    process = bench.start(
        "bash",
        RECIPES / "grpo_gsm8k_0.5b.sh",
        "--run.dir",
        bench.folder / "runs",
        *words,
        PYTHONPATH="",  # the package, not the stand-in
        GPUS_PER_NODE="1",
        MODEL_PATH=str(qwen_folder(bench.folder / "qwen", real_data)),
        TRAIN_DATA=str(rows),
        VAL_DATA=str(rows),
    )
    rc, out = bench.end(process, timeout_s=900)
    assert rc == 0, out[-6000:]
    assert "using ChatML" in out
    assert "prompts longer than --data.max_prompt_tokens 120" in out
    found = runs.rows(bench.folder / "runs" / "grpo_gsm8k_0.5b")
    assert list(found) == [0, 1, 2]
    assert found[0]["val-aux/gsm8k_train/num_prompts"] == 4
    for step in (1, 2):
        row = found[step]
        assert row["actor/entropy"] == pytest.approx(11.9, abs=0.3)  # ln 151,936
        assert row["actor/grad_norm"] > 0
        assert row["reward/errors"] == 0
        assert abs(row["rollout_corr/kl"]) < 0.01  # the same weights on both sides
    summary = json.loads((bench.folder / "runs/grpo_gsm8k_0.5b/summary.json").read_text())
    assert summary["perf/max_rss_gb_rank0"] < 6
    lines = (bench.folder / "runs/grpo_gsm8k_0.5b/rollouts.jsonl").read_text().splitlines()
    prompt = json.loads(lines[0])["prompt"]
    assert prompt.endswith("put the final answer within \\boxed{}.")
