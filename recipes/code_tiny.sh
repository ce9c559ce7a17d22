#!/usr/bin/env bash
__doc__=r'''GRPO on the tiny code task: 0.4 M weights write functions of one line, and the sandbox runs
their tests; 2 CPU cores. The prompt is a chain of operations such as +3*5-2, a right answer is
f=lambda x:(x+3)*5-2 or whatever else passes; see rlcore/data and rlcore/sandbox. Held-out accuracy
goes from 0.51 to 0.61 (256 prompts, standard error .03; seed 0) in the 100 steps.

    bash recipes/code_tiny.sh                               # sets itself up, then trains
    bash recipes/code_tiny.sh --reward.require_isolation namespaces    # refuses to start without namespaces
    bash recipes/code_tiny.sh --reward.partial_credit              # the share of the tests that pass
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=${GPUS_PER_NODE:-$(processes 1 1)}
TASK=oneline
source "$RECIPES/models/tiny_qwen3.sh"

DATA=(
  --data.train oneline # endless; see rlcore/data
  --data.val oneline
  --data.num_val_prompts 256
  --data.prompts_per_step 16
)
ROLLOUT=(
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 48
  --rollout.temperature 1
)
REWARD=(
  --reward code
  --reward.workers 2 # sandbox slots
  --reward.timeout_s 5
)
ALGO=(
  --algo grpo
  --algo.clip_high 0.28 # asymmetric clip, as in DAPO
  --algo.equal_reward_groups drop
)
TRAIN=(
  --train.tokens_per_micro_batch 4096
  --train.lr 2e-4
  --train.lr_schedule linear
  --train.lr_warmup_updates 10
  --train.min_lr 6e-5
)
RUN=(
  --run.steps 100
  --eval.every 25
)

launch "${MODEL[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGO[@]}" "${TRAIN[@]}" \
  "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
