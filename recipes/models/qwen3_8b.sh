# shellcheck shell=bash
# Qwen3-8B: 36 layers, hidden 4096, 32 heads of 128, 8 key-value heads, vocabulary 151,936. TP is 1,
# 2, 4 or 8.
export MODEL_CONFIG=$RECIPES/models/qwen3_8b.json # for --dry-run without the folder
# shellcheck disable=SC2034 # the recipe reads it
MODEL=(
  --model.path "${MODEL_PATH:-models/Qwen3-8B}" # a Hugging Face folder
  --model.dtype bfloat16
)
