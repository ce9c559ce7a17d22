#!/usr/bin/env bash
__doc__=r'''GRPO on GSM8K on one GPU of 24 GB or more, with the largest model that fits it. The memory
plan of the dry run chooses model, micro-batch and recomputation, largest first:

    24 GB  Qwen3-0.6B      48 GB  Qwen3-1.7B      80 GB  Qwen2.5-3B      141 GB  Qwen3-4B

Not run at these sizes: no number to expect is known.

    bash recipes/grpo_1gpu.sh --dry-run                              # which model, and why
    bash recipes/grpo_1gpu.sh --dry-run --cluster.gpu_memory_gb 24   # for another GPU
    export MODEL_PATH=~/models/Qwen3-1.7B-Base                       # yours: chooses only sizes
    bash recipes/grpo_1gpu.sh --data.train train.jsonl --data.val test.jsonl
    bash recipes/grpo_1gpu.sh --rollout.engine torch                 # without SGLang

Without MODEL_PATH the model is a folder of models/, such as models/Qwen3-1.7B-Base. The data are as
in grpo_gsm8k_0.5b.sh.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=1
CHOICES=(qwen2_5_7b qwen3_4b qwen2_5_3b qwen3_1_7b qwen3_0_6b) # models, largest first
SIZES=(16384:none 8192:none 4096:none 16384:full 4096:full)    # tokens:recompute, fastest first

DATA=(
  --data.train "${TRAIN_DATA:-data/gsm8k/train.jsonl}"
  --data.val "${VAL_DATA:-data/gsm8k/test.jsonl}"
  --data.prompts_per_step 128
  --data.max_prompt_tokens 512
  --data.suffix " Reason step by step and put the final answer within \boxed{}."
)
ROLLOUT=(
  --rollout.engine sglang
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 512
  --rollout.gpu_memory_utilization 0.6 # leaves room for CUDA graphs and contexts
)
REWARD=(
  --reward math
)
ALGO=(
  --algo grpo
  --algo.clip_high 0.28 # asymmetric clip, as in DAPO
)
TRAIN=(
  --train.samples_per_update 256 # four updates per step
  --train.offload true           # engine and learner take turns on the GPU
  --train.lr 1e-6
  --train.lr_warmup_updates 10
)
RUN=(
  --run.steps 200
  --eval.every 20
)

WORDS=("${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGO[@]}" "${TRAIN[@]}" "${RUN[@]}")
OWN=$(option model.path "${MODEL_PATH:-}" "$@")
[[ -z $OWN ]] || CHOICES=("$OWN")
find_python "${WORDS[@]}" "$@"
CHOICE=$("$PYTHON" "$RECIPES/largest_fit.py" "${CHOICES[@]}" -- "${SIZES[@]}" -- "${WORDS[@]}" "$@") ||
  die "no model was chosen for this GPU: see above"
read -r TOKENS RECOMPUTE NAME <<<"$CHOICE"
if [[ -n $OWN ]]; then
  MODEL=(--model.path "$OWN")
else
  # shellcheck source=models/qwen3_4b.sh
  source "$RECIPES/models/$NAME.sh"
fi

launch "${MODEL[@]}" --train.tokens_per_micro_batch "$TOKENS" --train.recompute "$RECOMPUTE" \
  "${WORDS[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
