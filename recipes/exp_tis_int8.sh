#!/usr/bin/env bash
__doc__=r'''GRPO on the tiny task with a quantised sampler, as in the TIS paper.
The engine rounds the weights of every push to int8 and samples from that model; the learner
corrects by truncated importance sampling. One process, so two runs fit side by side on two cores.

    bash recipes/exp_tis_int8.sh                                          # int8, TIS with C = 2
    bash recipes/exp_tis_int8.sh --algo.rollout_is none --run.name plain  # not corrected
    bash recipes/exp_tis_int8.sh --rollout.quantize int3                  # a gap as in the paper
    .venv/bin/python tools/studies/exp_tis.py --json FILE --jobs 2        # all arms and seeds

The last line makes the whole table and the picture: it starts this recipe with the keys of each
arm. Eight bits leave hardly a gap in a model of 0.4 M weights: the largest |p_sampler - p_learner|
in 256 responses of the warm-started model is 0.03 in int8 and 0.12 in fp8. So the arms of the table
round to three bits, int3 (0.93) and fp3 (0.81); tools/studies/exp_tis.py --formats FOLDER
measures it.
Accuracy and reward in metrics.jsonl are those of the quantised sampler; the table adds what the
trained weights reach in full precision.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=${GPUS_PER_NODE:-1}
source "$RECIPES/models/tiny_qwen3.sh"

DATA=(
  --data.train label # endless; see rlcore/data
  --data.val label
  --data.prompts_per_step 32
)
ROLLOUT=(
  --rollout.quantize int8 # none, int8, int8_tensor, int8_w8a8, int4, int3, fp8, fp4, fp3
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
  --algo.clip_high 0.28           # asymmetric clip, as in DAPO
  --algo.equal_reward_groups keep # the estimate of the score is over trained responses: all
  --algo.rollout_is token         # none: no correction
  --algo.rollout_is_threshold 2   # the cap C; inf: vanilla importance sampling
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

launch "${MODEL[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGO[@]}" "${TRAIN[@]}" \
  "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
