# shellcheck shell=bash
# Qwen2.5-7B: 28 layers, hidden 3584, 28 heads of 128, 4 key-value heads, vocabulary 152,064.
# TP is 1, 2 or 4: it divides the 4 key-value heads.
export MODEL_CONFIG=$RECIPES/models/qwen2_5_7b.json # for --dry-run without the folder
# shellcheck disable=SC2034 # the recipe reads it
MODEL=(
  --model.path "${MODEL_PATH:-models/Qwen2.5-7B}" # a Hugging Face folder
  --model.dtype bfloat16
)
