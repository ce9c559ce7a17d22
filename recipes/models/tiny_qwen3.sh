# shellcheck shell=bash
# 0.4 M parameters, Qwen3 architecture, a token per character of the task TASK, made here: no
# download. The first run of a seed warm-starts it by supervised training (rlcore tiny) and keeps it
# in the folder of the runs.
TASK=${TASK:-label}
[[ -v WARM_START ]] || WARM_START=() # further arguments of the warm start
SEED=$(option run.seed 0 "$@")
MODEL_PATH=${MODEL_PATH:-$(option run.dir runs "$@")/models/$TASK-s$SEED}

prepare_model() {
  [[ $(option model.path "$MODEL_PATH" "$@") == "$MODEL_PATH" ]] || return 0 # the user has another
  make_once "$MODEL_PATH" tiny --seed "$SEED" --task "$TASK" "${WARM_START[@]}"
}
prepare() { prepare_model "$@"; }

export MODEL_CONFIG=$RECIPES/models/tiny_qwen3.json # what --dry-run reads until it is made
# shellcheck disable=SC2034 # the recipe reads it
MODEL=(
  --model.path "$MODEL_PATH"
  --model.dtype float32
)
