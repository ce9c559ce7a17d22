#!/usr/bin/env bash
__doc__=r'''GRPO through the endpoint for agents: the client of OpenAI, streams, a tool; 2 CPU cores.
The agent of endpoint_tiny.py asks for a sum such as 37+54-68 and offers a calculator. The model
(0.4 M weights) must call it with the right sum and answer with its result; after the warm start it
mostly guesses. Held-out accuracy goes from 0.50 to 0.88 and from 0.36 to 0.88 (64 prompts, standard
error .04 to .06; seeds 0 and 1) in the 24 steps. See rlcore/envs/ENDPOINT.md.

    bash recipes/endpoint_tiny.sh                           # sets itself up, then trains
    bash recipes/endpoint_tiny.sh --env.reuse template      # any key; the last one wins
    bash recipes/endpoint_tiny.sh --env.command "my-agent --task {task}"
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=${GPUS_PER_NODE:-$(processes 1 1)}
EXTRA=openai
TASK=calc
WARM_START=(--target 0.33 --probe_from 150 --probe_every 25 --probe_prompts 128) # most guess
source "$RECIPES/models/tiny_qwen3.sh"

prepare() {
  prepare_model "$@"
  read -r -t 300 AGENT < <(exec "$PYTHON" "$RECIPES/endpoint_tiny.py" serve) ||
    die "the agent has not started: the lines above say why"
  export PYTHON RECIPES AGENT
}

# shellcheck disable=SC2016 # the shell of the harness expands them
ENV=(
  --env endpoint
  --env.command '"$PYTHON" -I -S "$RECIPES/endpoint_tiny.py" play "$AGENT"'
  --env.max_running_episodes 16
  --env.max_turns 4
  --env.max_turn_tokens 60
)
DATA=(
  --data.train calc # endless; see rlcore/data
  --data.val calc
  --data.num_val_prompts 64
  --data.prompts_per_step 8
  --data.template chat
)
ROLLOUT=(
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 200 # all turns of an episode, and what is between them
)
ALGO=(
  --algo grpo
  --algo.clip_high 0.28 # asymmetric clip, as in DAPO
  --algo.equal_reward_groups drop
)
TRAIN=(
  --train.tokens_per_micro_batch 4096
  --train.lr 4e-4
  --train.lr_schedule linear
  --train.lr_warmup_updates 5
  --train.min_lr 1e-4
)
RUN=(
  --run.steps 24
  --eval.every 0
)

launch "${ENV[@]}" "${MODEL[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${ALGO[@]}" "${TRAIN[@]}" \
  "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
