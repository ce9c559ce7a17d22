"""The GSM8K recipe, two steps on CPU: real rows, the real Qwen tokenizer, the real vocabulary
of 151,936 and a model of two random layers. Learning is not covered: random weights score nothing.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.recipes.conftest import QWEN

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RLCORE_DATA", ROOT / "../shared/data"))
OVERRIDES = [
    "--run.steps",
    "2",
    "--eval.at_end",
    "false",
    "--data.num_prompts",
    "64",
    "--data.num_val_prompts",
    "2",
    "--model.random_init",
    "true",
    "--model.num_layers",
    "2",
    "--model.dtype",
    "float32",
    "--data.prompts_per_step",
    "2",
    "--data.max_prompt_tokens",
    "80",
    "--rollout.samples_per_prompt",
    "2",
    "--rollout.max_tokens",
    "8",
    "--train.samples_per_update",
    "4",
    "--train.tokens_per_micro_batch",
    "1024",
    "--checkpoint.at_end",
    "false",
    "--checkpoint.export_hf",
    "false",
]


@pytest.mark.ranks(1)
@pytest.mark.skipif(not DATA.exists(), reason=f"no real data: RLCORE_DATA or {DATA}")
def test_two_steps_of_the_gsm8k_recipe_on_cpu(bench):
    model = bench.folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "tokenizer_qwen" / name, model)
    rows = str((DATA / "math/gsm8k_train.jsonl").resolve())
    rc, out = bench.run(
        *("bash", ROOT / "recipes/grpo_gsm8k_0.5b.sh", *OVERRIDES),
        timeout_s=280,
        PYTHONPATH=str(ROOT),
        GPUS_PER_NODE="1",
        MODEL_PATH=str(model),
        TRAIN_DATA=rows,
        VAL_DATA=rows,
    )
    assert rc == 0, out
    assert "64 prompts" in out
    assert "left out" in out, "prompts over --data.max_prompt_tokens are reported"
    assert "using ours (ChatML)" in out
    run = bench.folder / "runs/grpo_gsm8k_0.5b"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    samples = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    prompts = [s["prompt"] for s in samples if "prompt" in s]
    assert prompts
    assert all("within \\boxed{}." in p for p in prompts)
