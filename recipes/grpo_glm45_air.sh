#!/usr/bin/env bash
__doc__=r'''GRPO on GLM-4.5-Air, a mixture of 128 experts, 8 nodes of 8 GPUs of 80 GB: TP 4, PP 2, EP 8, engines
of eight GPUs, responses of 16k. Routing replay; biases of experts adapt.
Not run at this size: no number to expect is known.

    torchrun --nnodes 8 ... recipes/grpo_glm45_air.sh                    # your own torchrun
    sbatch --nodes 8 recipes/slurm/job.sbatch recipes/grpo_glm45_air.sh  # Slurm
    NODE_RANK=0 HEAD_ADDR=node0 bash recipes/grpo_glm45_air.sh           # by hand, on every node
    bash recipes/grpo_glm45_air.sh --dry-run                             # memory plan; runs nothing

Set MODEL_PATH, TRAIN_DATA and VAL_DATA, or give --model.path, --data.train and --data.val. The data
are JSON lines (or parquet) with the fields question and answer.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
NODES=${NODES:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
source "$RECIPES/models/glm4_5_air.sh"

LAYOUT=(
  --train.tp 4
  --train.pp 2
  --train.ep 8 # inside a node; 4 copies of each expert
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
  --rollout.tp 8
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 16384
  --rollout.stall_timeout_s 7200
)
REWARD=(
  --reward math
)
ALGO=(
  --algo grpo
  --algo.clip_high 0.28         # asymmetric clip, as in DAPO
  --algo.routing_replay rollout # experts as SGLang chose them
)
TRAIN=(
  --train.tokens_per_micro_batch 18432
  --train.head_chunk_tokens 4096 # of logits at a time
  --train.lr 1e-6
  --train.moe_bias_update_rate 1e-3 # experts with fewer tokens than the mean are chosen more
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
