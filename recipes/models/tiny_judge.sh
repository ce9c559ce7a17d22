# shellcheck shell=bash
# 0.1 M parameters, Qwen3 architecture, made here: a judge for the task of tiny_qwen3.sh, distilled
# from the rule that answer and result are equal. JUDGE_STEPS=0 leaves its weights random.
JUDGE_STEPS=${JUDGE_STEPS:-600}
JUDGE_PATH=${JUDGE_PATH:-$(option run.dir runs "$@")/models/judge-s$SEED-$JUDGE_STEPS}

prepare_judge() {
  [[ $(option reward.model "$JUDGE_PATH" "$@") == "$JUDGE_PATH" ]] || return 0 # the user has another
  GPUS_PER_NODE=1 make_once "$JUDGE_PATH" judge --seed "$SEED" --steps "$JUDGE_STEPS"
}

# shellcheck disable=SC2034 # the recipe reads it
JUDGE=(
  --reward judge
  --reward.model "$JUDGE_PATH"
  --reward.rubric "$JUDGE_PATH/rubric.jinja"
  --reward.good "*"
  --reward.bad "-"
  --reward.dtype float32
)
