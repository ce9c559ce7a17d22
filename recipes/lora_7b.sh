#!/usr/bin/env bash
__doc__=r'''GRPO with LoRA of rank 32 on Qwen2.5-7B-Instruct, one node of 8 GPUs of 80 GB.
Not run at this size: no number to expect is known.

    bash recipes/lora_7b.sh --data.train my.parquet --data.val my_val.parquet
    bash recipes/lora_7b.sh --dry-run                      # memory plan; runs nothing
    bash recipes/lora_7b.sh --lora.targets q_proj v_proj   # fewer adapters
    sbatch --nodes 1 recipes/slurm/job.sbatch recipes/lora_7b.sh
    GPUS_PER_NODE=4 bash recipes/lora_7b.sh ...            # fewer GPUs

Rows are JSON lines or parquet with the fields question and answer.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}
source "$RECIPES/models/qwen2_5_7b.sh"
ENGINE=${ENGINE:-sglang}

LAYOUT=(
  --train.tp 1 # gradients and optimizer states are those of adapters alone
  --train.recompute selective
  --train.offload true # engine and learner take turns on the GPU
)
DATA=(
  --data.train "${TRAIN_DATA:-data/train.parquet}"
  --data.val "${VAL_DATA:-data/val.parquet}"
  --data.prompts_per_step 128
  --data.max_prompt_tokens 1024
  --data.suffix " Put the final answer within \boxed{}."
)
ROLLOUT=(
  --rollout.engine "$ENGINE"
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 4096
)
REWARD=(
  --reward math
)
ALGO=(
  --algo grpo
  --algo.clip_high 0.28 # asymmetric clip, as in DAPO
)
LORA=(
  --lora.rank 32
  --lora.alpha 32
)
TRAIN=(
  --train.samples_per_update 512 # two updates per step
  --train.tokens_per_micro_batch 8192
  --train.lr 1e-5 # ten times that of all weights
  --train.lr_warmup_updates 10
)
RUN=(
  --run.steps 200
  --eval.every 10
)

launch "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGO[@]}" \
  "${LORA[@]}" "${TRAIN[@]}" "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
