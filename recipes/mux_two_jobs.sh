#!/usr/bin/env bash
__doc__=r'''Two GRPO jobs share a rollout pool and a train pool: while one samples, the other trains.
2 CPU cores: core 0 is the rollout pool, core 1 the train pool. Figures: tools/bench_mux.py.

    bash recipes/mux_two_jobs.sh                            # profile, cluster, both jobs, cluster down
    bash recipes/mux_two_jobs.sh --run.steps 40             # any key, of both jobs
    python -m rlcore mux status --dir runs/mux              # meanwhile: groups, turns, slack
    ALONE=1 bash recipes/mux_two_jobs.sh --run.name mine    # one job, and nobody else
    MUX_URL=redis://... bash recipes/mux_two_jobs.sh --run.name a   # one of a cluster that is up
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
GPUS_PER_NODE=2
source "$RECIPES/models/tiny_qwen3.sh"
RUNS=$(option run.dir runs "$@")

APART=(
  --cluster.rollout_ranks 1
  --cluster.rollout_cores 0
  --cluster.train_cores 1
)
DATA=(
  --data.train label
  --data.val label
  --data.prompts_per_step 32
)
ROLLOUT=(
  --rollout.samples_per_prompt 8
  --rollout.max_tokens 144
)
REWARD=(
  --reward exact
  --reward.answer_marker ">"
)
ALGO=(
  --algo grpo
  --algo.clip_high 0.28
  --algo.equal_reward_groups drop
)
TRAIN=(
  --train.samples_per_update 128 # two updates per step
  --train.tokens_per_micro_batch 4096
  --train.lr 2e-4
)
RUN=(
  --run.steps 100
  --eval.every 50
)
MUX=()
if [[ -n ${MUX_URL:-} ]]; then
  export MUX_URL # it has a password, which is not for `ps`
  MUX=(--mux.url env:MUX_URL --mux.slo "${MUX_SLO:-2.5}")
fi

two_jobs() { # keys of both
  local name url pid pids=() failed=0 seed=$SEED memory
  memory=$(awk '/^MemTotal/ { printf "%d", $2 / 2e6 }' /proc/meminfo) # GB: each pool has half of it
  [[ -z $(option report "" "$@") ]] || die "--report: reports one job; start it with ALONE=1"
  find_python "$@"
  command -v redis-server >/dev/null ||
    die "redis-server is not installed, and the jobs share it: run bash tools/setup.sh --mux as root"
  mux=("$PYTHON" -m rlcore mux)
  export MODEL_PATH PYTHON # both start from one model
  ALONE=1 bash "$0" "$@" --run.name mux_profile --run.steps 4 --debug.full_length \
    --eval.every 0 --eval.no_at_start --eval.no_at_end
  "${mux[@]}" up --rollout-pool 1 --train-pool 1 --rollout-switch-s 0.5 --train-switch-s 0.5 \
    --rollout-memory-gb "$memory" --train-memory-gb "$memory" --dir "$RUNS/mux"
  trap '"${mux[@]}" down --dir "$RUNS/mux"' EXIT
  for name in a b; do
    url=$("${mux[@]}" add "$name" --profile "$RUNS/mux_profile/mux_profile.json" --dir "$RUNS/mux")
    [[ -n $url ]] || die "rlcore mux add $name gave no address; see $RUNS/mux"
    MUX_URL=$url bash "$0" "$@" --run.name "$name" --run.seed "$seed" --log.no_progress \
      > >(exec sed -u "s/^/$name: /") 2>&1 &
    pids+=($!)
    seed=$((seed + 1))
  done
  for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
  done
  return "$failed"
}

case " $* " in *" --dry-run "* | *" --help "* | *" -h "*) ALONE=1 ;; esac
if [[ -z ${ALONE:-}${MUX_URL:-}${LOCAL_WORLD_SIZE:-} ]]; then
  two_jobs "$@"
  exit
fi
launch "${APART[@]}" "${MODEL[@]}" "${DATA[@]}" "${ROLLOUT[@]}" "${REWARD[@]}" "${ALGO[@]}" \
  "${TRAIN[@]}" "${RUN[@]}" "${MUX[@]}" "$@"
: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
