# shellcheck shell=bash
# Sourced by every recipe: helpers, and `launch`, which makes the processes. EXTRA of a recipe is a
# further package that it needs, and the flag of tools/setup.sh for it. Knobs, all optional:
#   NODES GPUS_PER_NODE (processes per node on a machine without GPUs) PYTHON MAX_RESTARTS
#   NODE_RANK and HEAD_ADDR: a node started by hand; HEAD_ADDR and HEAD_PORT win everywhere
set -euo pipefail

RECIPES=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$RECIPES")

die() { # sentence: exit 2; local rank 0 speaks first, and torchrun then ends the others
  # job.sbatch must not queue this again
  [[ -z ${RLCORE_UNFINISHED:-} ]] || touch "$RLCORE_UNFINISHED.failed"
  sleep $((${LOCAL_RANK:-0} > 0 ? 5 : 0))
  printf 'rlcore: %s\n' "$*" >&2
  exit 2
}

option() { # key default "$@": the value that a key has on the command line
  local key=--$1 value=$2
  shift 2
  while (($#)); do
    case $1 in
      "$key") value=${2:-} ;;
      "$key"=*) value=${1#*=} ;;
    esac
    shift
  done
  printf '%s\n' "$value"
}

processes() { # gpus cpus: one process per GPU, at most `gpus`; without GPUs `cpus`
  local found=0
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    found=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^ ]' || true)
  elif command -v nvidia-smi >/dev/null; then
    found=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
  fi
  if ((found == 0)); then
    echo "$2"
  else
    echo $((found < $1 ? found : $1))
  fi
}

in_srun() { # the batch and interactive steps of Slurm are not srun: their ids are at the top end
  [[ -n ${SLURM_STEP_ID:-} ]] && ((SLURM_STEP_ID < 4294967290))
}

shows_only() { # settings of the run: whether they ask for a text and start no engine
  local arg
  for arg in "$@"; do
    case $arg in
      --dry-run | --help | -h) return 0 ;;
    esac
  done
  return 1
}

is_checkout() { # or a folder to which `rlcore recipe copy` has copied recipes
  [[ -f $ROOT/tools/setup.sh ]]
}

find_python() { # settings of the run: sets PYTHON; installs only if the recipe was started with bash
  local missing flags=(--quiet) needed='torch megatron transformers msgspec zmq tyro' setup where repair
  if [[ -n ${EXTRA:-} ]] && ! shows_only "$@"; then
    flags+=("--$EXTRA") needed+=" $EXTRA"
  fi
  setup="bash tools/setup.sh${EXTRA:+ --$EXTRA}"
  where="run $setup once, in a folder that this node can read"
  repair="run $setup once, where this node can see it, and start with the"
  repair+=" .venv/bin/torchrun that it makes"
  if is_checkout; then
    shows_only "$@" || [[ $(option rollout.engine torch "$@") != sglang ]] || flags+=(--sglang)
    if [[ -z ${PYTHON:-} && -z ${LOCAL_WORLD_SIZE:-} ]] && ! in_srun; then
      bash "$ROOT/tools/setup.sh" "${flags[@]}"
    fi
    PYTHON=${PYTHON:-${RLCORE_VENV:-$ROOT/.venv}/bin/python}
    export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$ROOT"
  else
    PYTHON=${PYTHON:-python} needed="rlcore $needed"
    where="activate the environment in which rlcore is installed, or set PYTHON to its Python"
    repair=$where
  fi
  command -v "$PYTHON" >/dev/null || die "$PYTHON does not exist: $where"
  missing=$("$PYTHON" -c '
import sys
from importlib.util import find_spec
print(*[name for name in sys.argv[1].split() if find_spec(name) is None])' "$needed")
  [[ -z $missing ]] || die "$PYTHON has no ${missing// /, }: $repair"
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
}

forget_torchrun() { # what torchrun told this process is not for the processes that it starts
  unset RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE
  unset ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT "${!TORCHELASTIC_@}"
}

torch_run() { # torchrun's own flags, then -m module arguments: the command, in COMMAND
  COMMAND=("$PYTHON" "$RECIPES/torch_run.py" --nproc-per-node "$GPUS_PER_NODE" "$@")
}

ONE_NODE=(--standalone --local-addr localhost)

in_child() { # run COMMAND; TERM and INT of this process end it
  local child code=0
  (forget_torchrun && exec "${COMMAND[@]}") &
  child=$!
  trap 'kill -TERM "$child"; wait "$child" || exit 143' TERM INT
  wait "$child" || code=$?
  trap - TERM INT
  return "$code"
}

make_once() { # folder, arguments of rlcore: the first process makes the folder with `--out`
  local folder=$1
  shift
  [[ ! -d $folder ]] || return 0
  mkdir -p "$(dirname "$folder")"
  exec 8>"$folder.lock"
  flock -w 3600 8 || die "waited an hour for $folder.lock; end the process that holds it"
  if [[ ! -d $folder ]]; then
    torch_run "${ONE_NODE[@]}" -m rlcore "$@" --out "$folder.part-$$"
    in_child
    if mv -T "$folder.part-$$" "$folder"; then
      echo "moved to $folder"
    else
      [[ -d $folder ]]
    fi
  fi
  exec 8>&-
}

stage() { # name, arguments of rlcore: run it on all GPUs of this node; its seconds go into REPORT
  local name=$1 start=$SECONDS code=0 restarts=0
  shift
  [[ $name != train ]] || restarts=${MAX_RESTARTS:-0}
  echo "rlcore: --report: $name"
  torch_run "${ONE_NODE[@]}" --max-restarts "$restarts" -m rlcore "$@"
  in_child || code=$?
  printf '%s\t%d\n' "$name" $((SECONDS - start)) >>"$REPORT/stages.tsv"
  return "$code"
}

report() { # settings of the run: check, train, evaluate before and after, write the report to REPORT
  local name run command words code=0
  name=$(option run.name "" "$@") run=$(option run.dir runs "$@")/$name
  mapfile -d '' -t words <"/proc/$$/cmdline"
  printf -v command '%q ' "${words[@]}"
  command=${command% }
  mkdir -p "$REPORT"
  [[ ! -f $REPORT/command.txt || $(<"$REPORT/command.txt") == "$command" ]] ||
    die "--report $REPORT: has the report of another command; choose another folder"
  printf '%s\n' "$command" >"$REPORT/command.txt"
  rm -f "$REPORT/before.json" "$REPORT/after.json" # of an earlier start
  local scores=(--eval.samples_per_prompt "$(option eval.samples_per_prompt 4 "$@")")
  stage preflight preflight "$@" --json "$REPORT/preflight.json" ||
    die "--report $REPORT: the preflight has found what fails; the lines above say what to do"
  stage train train "$@"
  stage eval_before eval "$run" --step 0 "${scores[@]}" --run.name "$name-before" \
    --json "$REPORT/before.json" || code=$?
  stage eval_after eval "$run" "${scores[@]}" --run.name "$name-after" \
    --json "$REPORT/after.json" || code=$?
  export NODES GPUS_PER_NODE
  "$PYTHON" -m rlcore report "$run" --out "$REPORT"
  return "$code"
}

dry_run() { # one process, which reads the size of the world in NODES and GPUS_PER_NODE
  if [[ -n ${LOCAL_WORLD_SIZE:-} ]]; then
    [[ ${RANK:-0} == 0 ]] || exit 0
    NODES=$((LOCAL_WORLD_SIZE == 1 ? WORLD_SIZE : WORLD_SIZE / GPUS_PER_NODE))
  fi
  forget_torchrun
  export NODES GPUS_PER_NODE
  exec "$PYTHON" -u -m rlcore "$@"
}

launch() { # "${ARRAY[@]}"... "$@": train with these settings, with --report DIR see `report`;
  # --preflight only checks the nodes
  local command=train keys=() args
  local nodes=1 rank=0 head=${HEAD_ADDR:-} port=${HEAD_PORT:-29500}
  : "${NODES:=1}" "${GPUS_PER_NODE:=8}"
  REPORT=
  while (($#)); do
    case $1 in
      --preflight) command=preflight ;;
      --report)
        REPORT=${2:-}
        [[ -n $REPORT && $REPORT != --* ]] || die "--report: give the folder of the report"
        shift
        ;;
      --report=*) REPORT=${1#*=} ;;
      *) keys+=("$1") ;;
    esac
    shift
  done
  set -- "${keys[@]}"
  args=("$command" --run.name "$(basename "$0" .sh)" "${keys[@]}")
  find_python "$@"
  if shows_only "$@"; then
    dry_run "${args[@]}"
  fi

  if [[ -n ${LOCAL_WORLD_SIZE:-} ]]; then
    if ((LOCAL_WORLD_SIZE != GPUS_PER_NODE && LOCAL_WORLD_SIZE != 1)); then
      die "torchrun started $LOCAL_WORLD_SIZE processes on this node and GPUS_PER_NODE is" \
        "$GPUS_PER_NODE: give torchrun --nproc-per-node $GPUS_PER_NODE, or leave the flag out," \
        "or set GPUS_PER_NODE=$LOCAL_WORLD_SIZE"
    fi
    nodes=$WORLD_SIZE rank=$RANK # of the fan-out: one process is one node
    head=${HEAD_ADDR:-$MASTER_ADDR} port=${HEAD_PORT:-$((MASTER_PORT + 1))}
  elif in_srun; then
    nodes=${SLURM_STEP_NUM_NODES:-$SLURM_NNODES} rank=$SLURM_NODEID
    [[ ${SLURM_STEP_NUM_TASKS:-$SLURM_NTASKS} == "$nodes" ]] ||
      die "srun started ${SLURM_STEP_NUM_TASKS:-$SLURM_NTASKS} tasks on $nodes nodes: give it" \
        "--ntasks-per-node=1, the recipe makes the processes of a node itself"
    head=${head:-$(slurm_head)} port=${HEAD_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
  elif [[ -n ${NODE_RANK:-} ]]; then
    [[ -n $head ]] ||
      die "NODE_RANK=$NODE_RANK without HEAD_ADDR: set HEAD_ADDR to the host name of node 0"
    nodes=$NODES rank=$NODE_RANK
  fi

  if [[ $nodes == 1 && $NODES != 1 && -z ${LOCAL_WORLD_SIZE:-}${NODE_RANK:-} ]] && ! in_srun; then
    echo "rlcore: this start is of one node, and the recipe is laid out for $NODES: start it with" \
      "srun, torchrun or NODE_RANK and HEAD_ADDR on each node, or set NODES=1" >&2
  fi

  [[ -z $REPORT || ($nodes == 1 && -z ${LOCAL_WORLD_SIZE:-}) ]] ||
    die "--report $REPORT: works on one node; start the recipe with bash, without torchrun"
  if declare -F prepare >/dev/null; then
    prepare "$@"
  fi
  if [[ ${LOCAL_WORLD_SIZE:-} == "$GPUS_PER_NODE" ]]; then # torchrun made one process per GPU
    exec "$PYTHON" -u -m rlcore "${args[@]}"
  fi
  forget_torchrun
  if [[ -n $REPORT && $command == train ]]; then
    report "${args[@]:1}"
    exit
  fi
  local where=("${ONE_NODE[@]}")
  if ((nodes > 1)); then
    where=(--nnodes "$nodes" --node-rank "$rank" --master-addr "$head" --master-port "$port")
    RLCORE_INTERFACE=$(option cluster.interface '' "$@")
    export RLCORE_INTERFACE
  fi
  torch_run "${where[@]}" --max-restarts "${MAX_RESTARTS:-0}" -m rlcore "${args[@]}"
  exec "${COMMAND[@]}"
}

slurm_head() { # first host of this step
  local hosts
  hosts=$(scontrol show hostnames "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}") ||
    die "scontrol does not list the hosts of this step: set HEAD_ADDR to the first host"
  printf '%s\n' "${hosts%%$'\n'*}"
}
