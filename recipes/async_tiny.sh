#!/usr/bin/env bash
__doc__=r'''Asynchronous GRPO on the tiny task: one process samples, one trains. 2 CPU cores.
Samples are at most 2 policy versions old. Figures: tools/bench_async.py.

    bash recipes/async_tiny.sh                              # sets itself up, then trains
    bash recipes/async_tiny.sh --async.alpha 0              # the synchronous run, bit for bit
    bash recipes/async_tiny.sh --async.weight_update in_place      # the cache survives a push
    bash recipes/async_tiny.sh --mode sync                  # the same ranks, in turn

RhymeRL whole, drafts from history and HistoPipe, on 3 processes: rlcore/rollout/RHYMERL.md.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=${GPUS_PER_NODE:-$(processes 2 2)}
source "$RECIPES/models/tiny_qwen3.sh"

ASYNC=(
  --mode async
  --async.alpha 2
  --cluster.rollout_ranks 1
)
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
  --algo.clip_high 0.28
  --algo.rollout_is token # weighs staleness too: old log-probs are those of the update
  --algo.equal_reward_groups drop
)
TRAIN=(
  --train.samples_per_update 128 # two updates per step
  --train.tokens_per_micro_batch 4096
  --train.lr 2e-4
  --train.lr_schedule linear
  --train.lr_warmup_updates 10
  --train.min_lr 6e-5
)
RUN=(
  --run.steps 200
  --eval.every 20
)

launch "${ASYNC[@]}" "${MODEL[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" \
  "${ALGO[@]}" "${TRAIN[@]}" "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
