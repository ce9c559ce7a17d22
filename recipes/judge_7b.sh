#!/usr/bin/env bash
__doc__=r'''GRPO on Qwen2.5-7B, judged by Qwen2.5-7B on the same GPUs: 2 nodes of 8 GPUs of 80 GB.
Layout and lengths are those of RollPacker (arXiv 2509.21009): TP 2, engines of one GPU, responses of
8k, half of the layers of the judge on the GPU, CUDA MPS.
Not run at this size: no number to expect is known.

    torchrun --nnodes 2 ... recipes/judge_7b.sh                    # your own torchrun
    sbatch --nodes 2 recipes/slurm/job.sbatch recipes/judge_7b.sh  # Slurm
    bash recipes/judge_7b.sh --dry-run                             # memory plan; runs nothing

Set MODEL_PATH, JUDGE_PATH, TRAIN_DATA and VAL_DATA, or give --model.path, --reward.model,
--data.train and --data.val. The data are JSON lines (or parquet) with the fields question and answer.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
NODES=${NODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
source "$RECIPES/models/qwen2_5_7b.sh"
export JUDGE_CONFIG=$RECIPES/models/qwen2_5_7b.json # for --dry-run without the folder

LAYOUT=(
  --train.tp 2
  --train.recompute selective
  --train.offload true # engine and learner take turns on the GPU
)
DATA=(
  --data.train "${TRAIN_DATA:-data/judge/train.jsonl}"
  --data.val "${VAL_DATA:-data/judge/val.jsonl}"
  --data.prompts_per_step 128
  --data.max_prompt_tokens 2048
)
ROLLOUT=(
  --rollout.engine sglang
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 8192
  --rollout.gpu_memory_utilization 0.65 # the judge has its part
  --rollout.stall_timeout_s 7200
)
REWARD=(
  --reward judge
  --reward.model "${JUDGE_PATH:-models/Qwen2.5-7B-Instruct}"
  --reward.resident_ratio 0.5
  --reward.max_tokens 12288
  --reward.timeout_s 120
  --reward.mps auto
)
ALGO=(
  --algo grpo
  --algo.clip_high 0.28 # asymmetric clip, as in DAPO
)
TRAIN=(
  --train.tokens_per_micro_batch 10240
  --train.lr 1e-6
)
RUN=(
  --run.steps 300
  --eval.every 20
  --checkpoint.every 20
  --cluster.timeout_s 1800
)

launch "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGO[@]}" \
  "${TRAIN[@]}" "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
