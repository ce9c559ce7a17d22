#!/usr/bin/env bash
__doc__=r'''DAPO on Qwen2.5-32B, 8 nodes of 8 GPUs of 80 GB. Batch, clips and lengths are those
of the paper (arXiv 2503.14476), and groups without spread are replaced, at most 4 x 512 in a step.
Not run at this size: no number to expect is known.

    torchrun --nnodes 8 ... recipes/dapo_32b.sh                    # your own torchrun
    sbatch --nodes 8 recipes/slurm/job.sbatch recipes/dapo_32b.sh  # Slurm
    NODE_RANK=0 HEAD_ADDR=node0 bash recipes/dapo_32b.sh           # by hand, on every node
    bash recipes/dapo_32b.sh --dry-run                             # memory plan; runs nothing

Set MODEL_PATH, TRAIN_DATA and VAL_DATA, or give --model.path, --data.train and --data.val. The data
are JSON lines (or parquet) with the fields question and answer.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
NODES=${NODES:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
source "$RECIPES/models/qwen2_5_32b.sh"

LAYOUT=(
  --train.tp 4
  --train.cp 4 # 34k tokens of one sequence over four GPUs
  --train.recompute full
  --train.offload true # engine and learner take turns on the GPU
)
DATA=(
  --data.train "${TRAIN_DATA:-data/math/train.jsonl}"
  --data.val "${VAL_DATA:-data/math/val.jsonl}"
  --data.prompts_per_step 512
  --data.max_prompt_tokens 2048
  --data.suffix " Put the final answer within \boxed{}."
)
ROLLOUT=(
  --rollout.engine sglang
  --rollout.tp 2
  --rollout.samples_per_prompt 16
  --rollout.max_tokens 20480 # the last fifth costs reward
  --rollout.stall_timeout_s 7200
)
REWARD=(
  --reward math
)
ALGO=(
  --algo dapo
)
TRAIN=(
  --train.samples_per_update 512 # 16 updates per step
  --train.lr_warmup_updates 320  # 20 steps
  --train.tokens_per_micro_batch 22528
  --train.head_chunk_tokens 2048 # of logits at a time
  --train.weight_decay 0.1
  --train.lr 1e-6
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
