#!/usr/bin/env bash
__doc__=r'''GRPO on the tiny task with a language model as the judge: 0.4 M weights learn from the
verdicts of 0.1 M weights, 2 CPU cores. The judge is distilled on the spot from the rule that the
answer is right (a minute at most); half of its layers stream from its file. Held-out accuracy, by
the verdicts of the judge, goes from 0.50 to 0.78 (1024 prompts, standard error .013; seed 0).

    bash recipes/judge_tiny.sh
    JUDGE_STEPS=0 bash recipes/judge_tiny.sh --run.steps 3          # random judge: only the plumbing
    bash recipes/judge_tiny.sh --reward.resident_ratio 1 --run.name resident
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=${GPUS_PER_NODE:-$(processes 1 1)}
source "$RECIPES/models/tiny_qwen3.sh"
source "$RECIPES/models/tiny_judge.sh"

prepare() { # both models
  prepare_model "$@"
  prepare_judge "$@"
}

DATA=(
  --data.train label
  --data.val label
  --data.prompts_per_step 32
)
ROLLOUT=(
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 144
)
ALGO=(
  --algo grpo
  --algo.clip_high 0.28 # asymmetric clip, as in DAPO
  --algo.equal_reward_groups drop
)
TRAIN=(
  --train.samples_per_update 128
  --train.tokens_per_micro_batch 4096
  --train.lr 2e-4
  --train.lr_schedule linear
  --train.lr_warmup_updates 10
  --train.min_lr 6e-5
)
RUN=(
  --run.steps 100
  --eval.every 20
)

launch "${MODEL[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${JUDGE[@]}" "${ALGO[@]}" "${TRAIN[@]}" \
  "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
