# shellcheck shell=bash
# GLM-4.5-Air: 46 layers, the first dense, hidden 4096, 96 heads of 128, 8 key-value heads, 128
# experts of 1408, 8 of them per token and one for all, vocabulary 151,552.
export MODEL_CONFIG=$RECIPES/models/glm4_5_air.json # for --dry-run without the folder
# shellcheck disable=SC2034 # the recipe reads it
MODEL=(
  --model.path "${MODEL_PATH:-models/GLM-4.5-Air}" # a Hugging Face folder
  --model.dtype bfloat16
)
