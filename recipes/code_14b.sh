#!/usr/bin/env bash
__doc__=r'''GRPO on Qwen2.5-14B with code rewards, 4 nodes of 8 GPUs of 80 GB. Layout and lengths are
those of RollPacker (arXiv 2509.21009): TP 2, PP 2, CP 2, engines of two GPUs, responses of 16k.
Not run at this size: no number to expect is known.

    torchrun --nnodes 4 ... recipes/code_14b.sh                    # your own torchrun
    sbatch --nodes 4 recipes/slurm/job.sbatch recipes/code_14b.sh  # Slurm
    NODE_RANK=0 HEAD_ADDR=node0 bash recipes/code_14b.sh           # by hand, on every node
    bash recipes/code_14b.sh --dry-run                             # memory plan; runs nothing

Programs run in the sandbox of rlcore/sandbox; without namespaces this recipe refuses to start. Set
MODEL_PATH, TRAIN_DATA and VAL_DATA, or give --model.path, --data.train and --data.val. The data are
JSON lines (or parquet) with question and test_list, or cases of stdin and stdout;
tools/prepare_mbpp.py makes them from MBPP.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
NODES=${NODES:-4}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
source "$RECIPES/models/qwen2_5_14b.sh"

LAYOUT=(
  --train.tp 2
  --train.pp 2
  --train.cp 2
  --train.recompute full
  --train.offload true # engine and learner take turns on the GPU
)
DATA=(
  --data.train "${TRAIN_DATA:-data/code/train.jsonl}"
  --data.val "${VAL_DATA:-data/code/val.jsonl}"
  --data.prompts_per_step 128
  --data.max_prompt_tokens 2048
  --data.answer_field "" # the tests are what there is
  --data.suffix " Put the program into one block of Python."
)
ROLLOUT=(
  --rollout.engine sglang
  --rollout.tp 2
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 16384
  --rollout.stall_timeout_s 7200
)
REWARD=(
  --reward code
  --reward.workers 4 # sandbox slots of a rank
  --reward.timeout_s 30
  --reward.adaptive_timeout true # once an answer was right, 2 s or 1.5 times what it took
  --reward.require_isolation namespaces
)
ALGO=(
  --algo grpo
  --algo.clip_high 0.28 # asymmetric clip, as in DAPO
)
TRAIN=(
  --train.tokens_per_micro_batch 18432
  --train.head_chunk_tokens 4096 # of logits at a time
  --train.lr 1e-6
)
RUN=(
  --run.steps 300
  --eval.every 20
  --eval.samples_per_prompt 4
  --checkpoint.every 20
  --cluster.timeout_s 1800
)

launch "${MODEL[@]}" "${LAYOUT[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGO[@]}" \
  "${TRAIN[@]}" "${RUN[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
