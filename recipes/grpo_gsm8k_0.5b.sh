#!/usr/bin/env bash
__doc__=r'''GRPO on GSM8K with Qwen2.5-0.5B, one GPU or more of one node; sampled by SGLang where
there are GPUs, by the torch engine elsewhere. Not run at full size: no number to expect is known.

    export MODEL_PATH=~/models/Qwen2.5-0.5B TRAIN_DATA=train.jsonl VAL_DATA=test.jsonl
    bash recipes/grpo_gsm8k_0.5b.sh                         # all GPUs of this node
    GPUS_PER_NODE=1 bash recipes/grpo_gsm8k_0.5b.sh         # one of them
    bash recipes/grpo_gsm8k_0.5b.sh --report DIR            # checks, evaluates, writes DIR/report.md
    torchrun --nproc-per-node 8 recipes/grpo_gsm8k_0.5b.sh  # your own torchrun
    bash recipes/grpo_gsm8k_0.5b.sh --train.lr 5e-7         # any key; the last one wins

The data are JSON lines (or parquet) with the fields question and answer, where answer is the number
(or a text that ends in #### and the number).
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=${GPUS_PER_NODE:-$(processes 8 2)}
source "$RECIPES/models/qwen2_5_0_5b.sh"
ENGINE=${ENGINE:-$( (($(processes 1 0))) && echo sglang || echo torch)}

DATA=(
  --data.train "${TRAIN_DATA:-data/gsm8k/train.jsonl}"
  --data.val "${VAL_DATA:-data/gsm8k/test.jsonl}"
  --data.prompts_per_step 128
  --data.max_prompt_tokens 512
  --data.suffix " Reason step by step and put the final answer within \boxed{}."
)
ROLLOUT=(
  --rollout.engine "$ENGINE"
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 512
  --rollout.temperature 1
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
  --train.tokens_per_micro_batch 16384
  --train.offload true # engine and learner take turns on the GPU
  --train.lr 1e-6
  --train.lr_warmup_updates 10
)
RUN=(
  --run.steps 200
  --eval.every 20
)

launch "${MODEL[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGO[@]}" "${TRAIN[@]}" \
  "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
