# shellcheck shell=bash
# Qwen3-32B: 64 layers, hidden 5120, 64 heads of 128, 8 key-value heads, vocabulary 151,936, untied.
# Per GPU at TP 8 on 32 GPUs: weights 8 GB, fp32 gradients 16 GB, optimizer shard 12 GB.
# shellcheck disable=SC2034 # the recipe reads it
MODEL=(
  --model.path "${MODEL_PATH:-models/Qwen3-32B}" # a Hugging Face folder
  --model.dtype bfloat16
)
