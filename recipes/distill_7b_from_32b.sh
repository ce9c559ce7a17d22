#!/usr/bin/env bash
__doc__=r'''Distillation of Qwen2.5-7B-Instruct from Qwen2.5-32B-Instruct, 8 GPUs of 80 GB. The node has
1 TB of host memory, which holds the layers of the teacher; the policy is scored on its own samples.
Not run at this size: no number to expect is known.

    bash recipes/distill_7b_from_32b.sh --data.train my.parquet --data.val my_val.parquet
    bash recipes/distill_7b_from_32b.sh --dry-run                # memory plan; runs nothing
    bash recipes/distill_7b_from_32b.sh --algo gkd --algo.beta 1 # divergence of distributions
    bash recipes/distill_7b_from_32b.sh --teacher.models http://node7:30000/generate # SGLang
    sbatch --nodes 1 recipes/slurm/job.sbatch recipes/distill_7b_from_32b.sh

Rows are JSON lines or parquet with the fields question and answer; answers are only for measuring.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}
source "$RECIPES/models/qwen2_5_7b.sh"
TEACHER_PATH=${TEACHER_PATH:-Qwen/Qwen2.5-32B-Instruct}
export TEACHER_CONFIG=$RECIPES/models/qwen2_5_32b.json # for --dry-run without the folder
ENGINE=${ENGINE:-sglang}

LAYOUT=(
  --train.tp 2
  --train.recompute selective
  --train.offload true # engine and learner take turns on the GPU
)
DATA=(
  --data.train "${TRAIN_DATA:-data/train.parquet}"
  --data.val "${VAL_DATA:-data/val.parquet}"
  --data.prompts_per_step 256
  --data.max_prompt_tokens 1024
  --data.suffix " Put the final answer within \boxed{}."
)
ROLLOUT=(
  --rollout.engine "$ENGINE"
  --rollout.samples_per_prompt 1 # every token has a signal of its own; no group is needed
  --rollout.max_tokens 4096
)
REWARD=(
  --reward math # only measured
)
ALGO=(
  --algo opd
  --teacher.models "$TEACHER_PATH"
)
TRAIN=(
  --train.tokens_per_micro_batch 8192
  --train.lr 2e-6
  --train.lr_warmup_updates 10
)
RUN=(
  --run.steps 200
  --eval.every 10
)

launch "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGO[@]}" \
  "${TRAIN[@]}" "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
