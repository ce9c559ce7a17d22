#!/usr/bin/env bash
__doc__=r'''GRPO with LoRA on the tiny task of grpo_tiny.sh, 2 CPU cores: 49,152 parameters are
trained. Held-out accuracy goes from 0.52 to 0.86 (1,024 prompts, standard error .011; seed 0, AMD
EPYC); all weights reach 0.86 with this seed.

    bash recipes/lora_tiny.sh                               # sets itself up, then trains
    bash recipes/lora_tiny.sh --lora.rank 2                 # any key; the last one wins
    python -m rlcore export runs/lora_tiny --adapters       # the adapters, in PEFT format
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=${GPUS_PER_NODE:-$(processes 2 2)}
source "$RECIPES/models/tiny_qwen3.sh"

DATA=(
  --data.train label # endless; see rlcore/data
  --data.val label
  --data.prompts_per_step 32
)
ROLLOUT=(
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 144
  --rollout.temperature 1
)
REWARD=(
  --reward exact
  --reward.answer_marker ">" # the answer stands behind the first one
)
ALGO=(
  --algo grpo
  --algo.clip_low 0.2
  --algo.clip_high 0.28 # asymmetric clip, as in DAPO
  --algo.equal_reward_groups drop
)
LORA=(
  --lora.rank 8
  --lora.alpha 16
)
TRAIN=(
  --train.samples_per_update 128 # two updates per step
  --train.tokens_per_micro_batch 4096
  --train.lr 2e-3 # ten times that of all weights
  --train.lr_schedule linear
  --train.lr_warmup_updates 10
  --train.min_lr 6e-4
)
RUN=(
  --run.steps 200
  --eval.every 20
)

launch "${MODEL[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGO[@]}" "${LORA[@]}" \
  "${TRAIN[@]}" "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
