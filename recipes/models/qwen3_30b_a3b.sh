# shellcheck shell=bash
# Qwen3-30B-A3B: 48 layers, hidden 2048, 32 heads of 128, 4 key-value heads, 128 experts of 768,
# 8 of them per token, vocabulary 151,936. TP is 1, 2, 4 or 8, and above 1 it needs EP.
export MODEL_CONFIG=$RECIPES/models/qwen3_30b_a3b.json # for --dry-run without the folder
# shellcheck disable=SC2034 # the recipe reads it
MODEL=(
  --model.path "${MODEL_PATH:-models/Qwen3-30B-A3B}" # a Hugging Face folder
  --model.dtype bfloat16
)
