#!/usr/bin/env bash
__doc__=r'''Any algorithm on the tiny task: 0.4 M weights, one CPU core, 100 steps in about 2 minutes.
The table of seeds is in rlcore/algos/README.md (tools/studies/seeds_algos.py). PPO learns its
critic from nothing.

    bash recipes/algo_tiny.sh --algo cispo
    bash recipes/algo_tiny.sh --algo ppo --critic.lr 3e-4   # any key; the last one wins
    bash recipes/algo_tiny.sh --algo my_pkg.my_loss         # yours, see rlcore/algos/README.md
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=${GPUS_PER_NODE:-$(processes 1 1)}
source "$RECIPES/models/tiny_qwen3.sh"

DATA=(
  --data.train label
  --data.val label
  --data.prompts_per_step 32
)
ROLLOUT=(
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 144
)
REWARD=(
  --reward exact
  --reward.answer_marker ">"
)
ALGO=(
  --algo grpo
)
TRAIN=(
  --train.samples_per_update 128 # two updates per step: the second one is off-policy
  --train.tokens_per_micro_batch 4096
  --train.lr 2e-4
  --train.lr_schedule linear
  --train.lr_warmup_updates 10
  --train.min_lr 6e-5
)
CRITIC=( # of ppo alone
  --critic.lr 5e-4
  --critic.warmup_steps 5
)
RUN=(
  --run.steps 100
  --eval.every 20
)

launch "${MODEL[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGO[@]}" "${TRAIN[@]}" \
  "${CRITIC[@]}" "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
