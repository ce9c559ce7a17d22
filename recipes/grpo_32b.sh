#!/usr/bin/env bash
__doc__=r'''GRPO on Qwen3-32B, 4 nodes of 8 H200. Not run at full size yet: no number known.

    torchrun --nnodes 4 ... recipes/grpo_32b.sh                         # your own torchrun
    sbatch --nodes 4 recipes/slurm/job.sbatch recipes/grpo_32b.sh       # Slurm
    NODE_RANK=0 HEAD_ADDR=node0 bash recipes/grpo_32b.sh                # by hand, on every node
    bash recipes/grpo_32b.sh --algo.clip_high 0.3                      # one node; the last key wins

Set MODEL_PATH, TRAIN_DATA and VAL_DATA, or give --model.path, --data.train and --data.val.
The layout fits one node too: the four data-parallel replicas of TP 8 become one.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
NODES=${NODES:-4}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
source "$RECIPES/models/qwen3_32b.sh"

LAYOUT=(
  --train.tp 8 # inside a node; 4 data-parallel replicas
  --train.recompute selective
  --train.offload true # the engine has the memory while it samples
)
DATA=(
  --data.train "${TRAIN_DATA:-data/math/train.jsonl}"
  --data.val "${VAL_DATA:-data/math/val.jsonl}"
  --data.prompts_per_step 128
  --data.max_prompt_tokens 2048
  --data.suffix " Put the final answer within \boxed{}."
)
ROLLOUT=(
  --rollout.engine torch # TP 1: one copy of the weights, 64 GB, per GPU
  --rollout.samples_per_prompt 16
  --rollout.max_tokens 16384
  --rollout.max_running 64
  --rollout.cache_tokens 131072 # 34 GB: 256 KB a token
  --rollout.deadline_s 7200
)
REWARD=(
  --reward math
)
ALGO=(
  --algo grpo
  --algo.clip_high 0.28 # asymmetric clip, as in DAPO
  --algo.equal_reward_groups drop
)
TRAIN=(
  --train.samples_per_update 512 # four updates per step
  --train.tokens_per_micro_batch 20480
  --train.lr 1e-6
  --train.lr_warmup_updates 10
)
RUN=(
  --run.steps 300
  --eval.every 20
  --eval.samples_per_prompt 4
  --checkpoint.every 20
  --cluster.timeout_s 1800
)

launch "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGO[@]}" \
  "${TRAIN[@]}" "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
