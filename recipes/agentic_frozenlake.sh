#!/usr/bin/env bash
__doc__=r'''GRPO on walks over frozen lakes, in words: Qwen2.5-7B, one node of 8 GPUs of 80 GB.
The model reads the board as a message of the user, thinks, names a move, and reads the board after
it; only what it wrote itself is trained. More episodes are started than a step takes, so nobody
waits for the slowest environments. frozenlake_tiny.sh is the same on a CPU.
Not run at this size: no number to expect is known.

    bash recipes/agentic_frozenlake.sh
    bash recipes/agentic_frozenlake.sh --env.slippery             # moves may go astray
    bash recipes/agentic_frozenlake.sh --mode async --async.alpha 1 --cluster.rollout_ranks 4 \
      --env.num_groups 0
    bash recipes/agentic_frozenlake.sh --dry-run                  # memory plan; runs nothing

Set MODEL_PATH, or give --model.path.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
source "$RECIPES/models/qwen2_5_7b.sh"

ENV=(
  --env frozenlake
  --env.max_turns 10
  --env.max_turn_tokens 512
  --env.num_groups 36 # the first 32 that are complete count
  --env.group_size 9  # of each the first 8
)
LAYOUT=(
  --train.tp 2
  --train.recompute selective
  --train.offload true # engine and learner take turns on the GPU
)
DATA=(
  --data.prompts_per_step 32
  --data.num_val_prompts 256
  --data.template chat
  --data.system "You (P) walk over a frozen lake to the goal (G). A dot is ice, an O is a hole: stay out of it. After every move you are shown the lake. Think, then end with one word: Left, Down, Right or Up."
)
ROLLOUT=(
  --rollout.engine sglang
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 6144
)
ALGO=(
  --algo grpo
  --algo.clip_high 0.28 # asymmetric clip, as in DAPO
  --algo.equal_reward_groups drop
)
TRAIN=(
  --train.tokens_per_micro_batch 8192
  --train.lr 1e-6
)
RUN=(
  --run.steps 200
  --eval.every 20
  --checkpoint.every 50
)

launch "${ENV[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${ALGO[@]}" \
  "${TRAIN[@]}" "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
