#!/usr/bin/env bash
__doc__=r'''Asynchronous GRPO on Qwen3-8B, 5 nodes of 8 GPUs of 80 GB: 16 ranks train, 24 sample, as in
ROLL Flash (arXiv 2510.11345). Samples are at most 2 policy versions old.
Not run at this size: no number to expect is known.

    torchrun --nnodes 5 ... recipes/async_8b.sh                    # your own torchrun
    sbatch --nodes 5 recipes/slurm/job.sbatch recipes/async_8b.sh  # Slurm
    bash recipes/async_8b.sh --dry-run                             # memory plan; runs nothing

Set MODEL_PATH, TRAIN_DATA and VAL_DATA, or give --model.path, --data.train and --data.val. The data
are JSON lines (or parquet) with the fields question and answer.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
NODES=${NODES:-5}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
source "$RECIPES/models/qwen3_8b.sh"

ASYNC=(
  --mode async
  --async.alpha 2 # near the most that staleness gives
  --cluster.rollout_ranks 24
)
LAYOUT=(
  --train.tp 2
  --train.cp 2
  --train.recompute selective
)
DATA=(
  --data.train "${TRAIN_DATA:-data/math/train.jsonl}"
  --data.val "${VAL_DATA:-data/math/val.jsonl}"
  --data.prompts_per_step 128
  --data.max_prompt_tokens 2048
  --data.suffix " Put the final answer within \boxed{}."
)
ROLLOUT=(
  --rollout.engine sglang
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 16384
  --rollout.stall_timeout_s 7200
)
REWARD=(
  --reward math
)
ALGO=(
  --algo grpo
  --algo.clip_high 0.28   # asymmetric clip, as in DAPO
  --algo.rollout_is token # weighs staleness too: old log-probs are those of the update
)
TRAIN=(
  --train.tokens_per_micro_batch 18432
  --train.head_chunk_tokens 4096
  --train.lr 1e-6
)
RUN=(
  --run.steps 300
  --eval.every 20
  --eval.samples_per_prompt 4
  --checkpoint.every 20
  --cluster.timeout_s 1800
)

launch "${ASYNC[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" \
  "${ALGO[@]}" "${TRAIN[@]}" "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
