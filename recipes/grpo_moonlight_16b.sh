#!/usr/bin/env bash
__doc__=r'''GRPO on Moonlight-16B-A3B, a mixture of 64 experts, 2 nodes of 8 GPUs of 80 GB: EP 8, latent
attention, engines of one GPU, responses of 6k.
Not run at this size: no number to expect is known.

    torchrun --nnodes 2 ... recipes/grpo_moonlight_16b.sh                    # your own torchrun
    sbatch --nodes 2 recipes/slurm/job.sbatch recipes/grpo_moonlight_16b.sh  # Slurm
    NODE_RANK=0 HEAD_ADDR=node0 bash recipes/grpo_moonlight_16b.sh           # by hand, on every node
    bash recipes/grpo_moonlight_16b.sh --dry-run                             # memory plan; runs nothing

Set MODEL_PATH, TRAIN_DATA and VAL_DATA, or give --model.path, --data.train and --data.val. The data
are JSON lines (or parquet) with the fields question and answer.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
NODES=${NODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
source "$RECIPES/models/moonlight_16b_a3b.sh"

LAYOUT=(
  --train.ep 8 # inside a node; 2 copies of each expert
  --train.recompute full
  --train.offload true # engine and learner take turns on the GPU
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
  --rollout.tp 1
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 6144
  --rollout.stall_timeout_s 7200
)
REWARD=(
  --reward math
)
ALGO=(
  --algo grpo
  --algo.clip_high 0.28 # asymmetric clip, as in DAPO
)
TRAIN=(
  --train.tokens_per_micro_batch 8192
  --train.head_chunk_tokens 4096 # of logits at a time
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
