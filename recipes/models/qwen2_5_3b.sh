# shellcheck shell=bash
# Qwen2.5-3B: 36 layers, hidden 2048, 16 heads of 128, 2 key-value heads, vocabulary 151,936,
# tied. TP is 1, 2, 4, 8 or 16: it divides the 16 heads.
export MODEL_CONFIG=$RECIPES/models/qwen2_5_3b.json # for --dry-run without the folder
# shellcheck disable=SC2034 # the recipe reads it
MODEL=(
  --model.path "${MODEL_PATH:-models/Qwen2.5-3B}" # a Hugging Face folder
  --model.dtype bfloat16
)
