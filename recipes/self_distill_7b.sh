#!/usr/bin/env bash
__doc__=r'''Self-distillation of Qwen2.5-7B-Instruct, one node of 8 GPUs of 80 GB. The teacher is the same
model, which reads the solution beside the question.
Not run at this size: no number to expect is known.

    bash recipes/self_distill_7b.sh --data.train my.parquet --data.val my_val.parquet
    bash recipes/self_distill_7b.sh --dry-run                # memory plan; runs nothing
    bash recipes/self_distill_7b.sh --algo gkd --algo.beta 0 # divergence of distributions
    sbatch --nodes 1 recipes/slurm/job.sbatch recipes/self_distill_7b.sh

Rows are JSON lines or parquet with the fields question, answer and question_with_solution. The last
one is a prompt, too, such as the question, "One solution is:", the solution, and "Solve the
question in your own words.". Rows of validation need no such field.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}
source "$RECIPES/models/qwen2_5_7b.sh"
TEACHER_PATH=${TEACHER_PATH:-$MODEL_PATH}
export TEACHER_CONFIG=$MODEL_CONFIG # for --dry-run without the folder
ENGINE=${ENGINE:-sglang}

LAYOUT=(
  --train.tp 2
  --train.recompute selective
  --train.offload true # engine and learner take turns on the GPU
)
DATA=(
  --data.train "${TRAIN_DATA:-data/train.parquet}"
  --data.val "${VAL_DATA:-data/val.parquet}"
  --data.teacher_prompt_field question_with_solution
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
  --train.lr 1e-6
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
