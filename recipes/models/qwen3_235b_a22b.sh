# shellcheck shell=bash
# Qwen3-235B-A22B: 94 layers, hidden 4096, 64 heads of 128, 4 key-value heads, 128 experts of 1536,
# 8 of them per token, vocabulary 151,936. TP is 1, 2, 4 or 8, and above 1 it needs EP.
export MODEL_CONFIG=$RECIPES/models/qwen3_235b_a22b.json # for --dry-run without the folder
# shellcheck disable=SC2034 # the recipe reads it
MODEL=(
  --model.path "${MODEL_PATH:-models/Qwen3-235B-A22B}" # a Hugging Face folder
  --model.dtype bfloat16
)
