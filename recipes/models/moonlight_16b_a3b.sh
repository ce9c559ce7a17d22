# shellcheck shell=bash
# Moonlight-16B-A3B: 27 layers, the first dense, hidden 2048, 16 heads of latent attention, 64
# experts of 1408, 6 of them per token and two for all, vocabulary 163,840. Context 8k.
export MODEL_CONFIG=$RECIPES/models/moonlight_16b_a3b.json # for --dry-run without the folder
# shellcheck disable=SC2034 # the recipe reads it
MODEL=(
  --model.path "${MODEL_PATH:-models/Moonlight-16B-A3B}" # a Hugging Face folder
  --model.dtype bfloat16
)
