# shellcheck shell=bash
# Qwen2.5-32B: 64 layers, hidden 5120, 40 heads of 128, 8 key-value heads, vocabulary 152,064.
# TP is 1, 2, 4 or 8: it divides the 8 key-value heads.
export MODEL_CONFIG=$RECIPES/models/qwen2_5_32b.json # for --dry-run without the folder
# shellcheck disable=SC2034 # the recipe reads it
MODEL=(
  --model.path "${MODEL_PATH:-models/Qwen2.5-32B}" # a Hugging Face folder
  --model.dtype bfloat16
)
