# shellcheck shell=bash
# Qwen3-0.6B-Base: 28 layers, hidden 1024, 16 heads of 128, 8 key-value heads, vocabulary
# 151,936, tied. TP is 1, 2, 4 or 8.
export MODEL_CONFIG=$RECIPES/models/qwen3_0_6b.json # for --dry-run without the folder
# shellcheck disable=SC2034 # the recipe reads it
MODEL=(
  --model.path "${MODEL_PATH:-models/Qwen3-0.6B-Base}" # a Hugging Face folder
  --model.dtype bfloat16
)
