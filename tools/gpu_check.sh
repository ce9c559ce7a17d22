#!/usr/bin/env bash
# Checks a machine with a GPU step by step, in the order of what can break, and writes a report that
# can be pasted. tools/gpu_steps.txt lists the steps. Needs no network.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash tools/gpu_check.sh [--cpu] [--again] [--only NAME... | --sanitize | test files...]

  --cpu        no GPU run: execute on the CPU what of tests/gpu needs no GPU, and skip the rest
  --again      run also the steps that passed with the same sources, GPU and torch
  --only       these steps of tools/gpu_steps.txt alone
  --sanitize   instead of the steps: the tests of loss, suffix and reshard within memcheck and
               racecheck of compute-sanitizer
  test files   instead of the steps: all tests of these files, such as tests/gpu/test_*.py

Exit status 0: everything that was asked for ran to its end, and nothing failed.

environment
  PYTHON             the Python with torch for CUDA, and with what tests/gpu imports; default: that
                     of .venv, where tools/setup.sh has made one, or python3
  REPORT             folder for report.txt (to paste), table.txt (every test) and log.txt (what
                     failed); default build/gpu_check
  JOBS               steps or files that run at a time; default 3. A file with the line
                     `WHOLE_DEVICE = True` runs alone, and a step with such a file too
  LIMIT_S            seconds after which a step, a file or the build is ended; default 480
  TOTAL_S            seconds after which no further step starts; default 480. The next run goes on
  RLCORE_CUDA_ARCHS  architectures to build for; default: that of the GPU at hand
TEXT
}

die() {
  printf 'gpu_check: %s\n' "$*" >&2
  exit 2
}

MODE=steps DEVICE=cuda AGAIN='' ONLY=() FILES=()
while (($#)); do
  case $1 in
    --cpu) DEVICE=cpu ;;
    --again) AGAIN=1 ;;
    --sanitize) MODE=sanitize ;;
    --only)
      while (($# > 1)) && [[ $2 != -* ]]; do
        ONLY+=("$2")
        shift
      done
      ((${#ONLY[@]})) || die "--only: give the names of steps, as in tools/gpu_steps.txt"
      ;;
    --help | -h)
      usage
      exit 0
      ;;
    -*)
      usage >&2
      die "$1: unknown flag"
      ;;
    *)
      [[ -f $1 ]] || die "$1: no such file"
      MODE=files
      FILES+=("$(realpath "$1")")
      ;;
  esac
  shift
done

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
REPORT=${REPORT:-build/gpu_check}
RESULTS=$REPORT/$MODE
JOBS=${JOBS:-3}
LIMIT_S=${LIMIT_S:-480}
TOTAL_S=${TOTAL_S:-480}
mkdir -p "$RESULTS"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
for home in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; do
  [[ ! -d $home/bin ]] || PATH=$PATH:$home/bin # nvcc and compute-sanitizer, if not on PATH
done

# ---- what runs: NAMES in their order, and the words for pytest of each

declare -A TESTS=()
NAMES=()
STEPS=()

read_steps() {
  local line
  while IFS= read -r line; do
    case $line in
      '#'* | '') ;;
      ' '*) TESTS[${STEPS[-1]}]+="$line" ;;
      *) STEPS+=("$line") ;;
    esac
  done <tools/gpu_steps.txt
}

is_alone() { # name: one of its files needs the whole device
  local words
  read -ra words <<<"${TESTS[$1]:-}"
  ((${#words[@]})) && grep -qs '^WHOLE_DEVICE = True$' "${words[@]%%::*}"
}

add_files() { # those that need the whole device come last
  local file name last=()
  for file in "${FILES[@]}"; do
    name=$(basename "$file" .py)
    TESTS[$name]=$file
    if is_alone "$name"; then
      last+=("$name")
    else
      NAMES+=("$name")
    fi
  done
  NAMES+=("${last[@]}")
}

read_steps
case $MODE in
  steps)
    for name in "${ONLY[@]}"; do
      [[ " ${STEPS[*]} " == *" $name "* ]] || die "--only $name: the steps are ${STEPS[*]}"
    done
    for name in "${STEPS[@]}"; do
      if ((${#ONLY[@]} == 0)) || [[ " native_build ${ONLY[*]} " == *" $name "* ]]; then
        NAMES+=("$name")
      fi
    done
    ;;
  files)
    ((${#ONLY[@]} == 0)) || die "--only: names steps, and not files; give one of both"
    NAMES=(native_build)
    add_files
    ;;
  sanitize)
    ((${#ONLY[@]} == 0)) || die "--only: does not go with --sanitize; give one of both"
    NAMES=(native_build {memcheck,racecheck}_{loss,suffix,reshard})
    ;;
esac

# ---- one step

find_device() { # prints torch's version, the device and its architecture: `2.13.0 H100 (90)`
  "$PYTHON" - "$DEVICE" <<'PY'
import sys

import torch

if sys.argv[1] == "cpu":
    sys.exit(print(torch.__version__, "CPU ()"))
if not torch.cuda.is_available():
    sys.exit(f"gpu_check: torch {torch.__version__} sees no GPU; --cpu runs what needs none")
major, minor = torch.cuda.get_device_capability(0)
print(torch.__version__, f"{torch.cuda.get_device_name(0)} ({major}{minor})")
PY
}

sources() { # a digest of the sources
  find rlcore csrc tests tools ./*.py ./*.txt -type f ! -name '*.so' ! -path '*/__pycache__/*' \
    -print0 | sort -z | xargs -0 sha256sum | sha256sum
}

outcome() { # name: passed, FAILED or skipped; nothing if it was not run
  if [[ ! -f $RESULTS/$1.end ]]; then
    return
  elif [[ $(<"$RESULTS/$1.end") != '0 '* ]]; then
    echo FAILED
  elif [[ -f $RESULTS/$1.skip ]] || ! tail -n 1 "$RESULTS/$1.log" | grep -q '[0-9] passed'; then
    echo skipped
  else
    echo passed
  fi
}

end() { # name, exit code, seconds
  echo "$2 $3" >"$RESULTS/$1.end"
  printf 'gpu_check: %s: %s, %d s\n' "$1" "$(outcome "$1")" "$3"
}

run() { # name, command: one process of its own, so that a CUDA error ends nothing but this row
  local name=$1 start=$SECONDS code=0 limit=$LIMIT_S left=$((TOTAL_S - SECONDS))
  shift
  if [[ $MODE == steps ]]; then
    ((left > 0)) || return 0 # the table says that it was not run
    limit=$((left < limit ? left : limit))
  fi
  timeout -k 10 "$limit" "$@" >"$RESULTS/$name.log" 2>&1 || code=$?
  end "$name" "$code" $((SECONDS - start))
}

run_pytest() { # name, words of pytest, command that it runs in
  local name=$1 words
  read -ra words <<<"$2"
  shift 2
  run "$name" "$@" "$PYTHON" -m pytest -q -p no:cacheprovider --durations=5 \
    --junitxml "$RESULTS/$name.xml" "${words[@]}"
}

skip() { # name, why
  echo "$2" >"$RESULTS/$1.skip"
  end "$1" 0 0
}

sanitize() { # tool_test
  local tool=${1%%_*} command
  if [[ $DEVICE == cpu || -n ${RLCORE_PRETEND_CUDA:-} ]]; then
    skip "$1" 'needs an NVIDIA GPU'
  elif ! command -v compute-sanitizer >/dev/null; then
    skip "$1" 'compute-sanitizer is not installed; it comes with the CUDA toolkit'
  else
    command=(compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 86)
    if [[ $tool == memcheck ]]; then # an allocation for each tensor, so that its ends are known
      command=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${command[@]}")
    fi
    run_pytest "$1" "tests/gpu/test_${1#*_}.py" "${command[@]}"
  fi
}

built() { # the checkout has libraries newer than their sources, for this Python and device
  local suffix
  suffix=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  [[ -f rlcore/_C$suffix && -f rlcore/_C_torch.so ]] || return 1
  [[ $DEVICE == cuda ]] || return 0 # other programs may be using them
  [[ -z $(find csrc CMakeLists.txt setup.py -newer rlcore/_C_torch.so -print -quit) ]] || return 1
  "$PYTHON" -c 'import sys; from rlcore.ops import native
sys.exit(native.torch_ops("gpu_check", "cuda") is None)' >/dev/null 2>&1
}

build() { # a failure costs the tests of kernels alone
  local start=$SECONDS code=0 said
  if [[ -n ${RLCORE_PRETEND_CUDA:-} ]]; then
    skip native_build 'a pretend device runs no kernels'
    return
  elif built; then
    echo 'gpu_check: native build: the libraries in rlcore/ are used as they are'
    echo 'native build: the libraries were up to date' >"$RESULTS/native_build.log"
    echo "0 0" >"$RESULTS/native_build.end"
    return
  fi
  printf 'gpu_check: native build for %s ...' "$GPU"
  if [[ $DEVICE == cuda ]]; then
    export RLCORE_CUDA=1 RLCORE_CUDA_ARCHS=${RLCORE_CUDA_ARCHS:-${GPU_ARCH}-real}
  fi
  {
    "$PYTHON" tools/gpu_needs.py build &&
      RLCORE_NATIVE=1 timeout -k 10 "$LIMIT_S" "$PYTHON" setup.py build_ext --build-lib build/gpu_lib &&
      cp --remove-destination build/gpu_lib/rlcore/_C* rlcore/ # a running program keeps the old ones
  } >"$RESULTS/native_build.log" 2>&1 || code=$?
  echo "$code $((SECONDS - start))" >"$RESULTS/native_build.end"
  if ((code)); then
    printf ' failed after %d s; its last lines are in the table\n' $((SECONDS - start))
  else
    said=$(grep -o 'native build: .*' "$RESULTS/native_build.log" | tail -n 1)
    printf ' %d s: %s\n' $((SECONDS - start)) "${said#native build: }"
  fi
}

passed() { # name: it passed before, with the same sources, GPU and torch
  [[ $MODE == steps && -z $AGAIN && $1 != native_build && $(outcome "$1") == passed ]]
}

start() { # name
  find "$RESULTS" -maxdepth 1 -name "$1.*" -delete
  case $1 in
    native_build) build ;;
    memcheck_* | racecheck_*) sanitize "$1" ;;
    *) run_pytest "$1" "${TESTS[$1]}" ;;
  esac
}

# ---- all steps

"$PYTHON" tools/gpu_needs.py
FOUND=$(find_device)
GPU=${FOUND#* }
GPU_ARCH=${GPU##*(}
GPU_ARCH=${GPU_ARCH%)}
MADE_FOR="$FOUND $(sources)"
if [[ $MODE != steps || ! -f $RESULTS/made_for || $(<"$RESULTS/made_for") != "$MADE_FOR" ]]; then
  find "$RESULTS" -type f -delete
  echo "$MADE_FOR" >"$RESULTS/made_for"
fi
if [[ $DEVICE == cpu ]]; then
  export RLCORE_GPU_TESTS_DEVICE=cpu CUDA_VISIBLE_DEVICES='' RLCORE_CUDA=0
  echo 'gpu_check: --cpu: this is no GPU run; tests that need a GPU are skipped'
fi
{
  "$PYTHON" -m rlcore env
  "$PYTHON" tools/gpu_needs.py lacks
} | tee "$REPORT/machine.txt"

for name in "${NAMES[@]}"; do
  if passed "$name"; then
    echo "gpu_check: $name: passed before"
  elif [[ $name == native_build || $name == device || $MODE == sanitize ]] || is_alone "$name"; then
    wait
    start "$name"
  else
    while (($(jobs -rp | wc -l) >= JOBS)); do
      wait -n || true
    done
    start "$name" &
  fi
done
wait

shown=() code=0
for name in "${NAMES[@]}"; do
  [[ -f $RESULTS/$name.end && $(<"$RESULTS/$name.end") == '0 '* ]] || code=1
done
[[ $MODE == steps ]] || STEPS=("${NAMES[@]}")
for name in "${STEPS[@]}"; do # with --only also what ran before
  if [[ -f $RESULTS/$name.end || " ${NAMES[*]} " == *" $name "* ]]; then shown+=("$name"); fi
done
"$PYTHON" tools/gpu_table.py "$RESULTS" "$REPORT" "${shown[@]}"
if [[ $DEVICE == cpu ]]; then
  echo 'gpu_check: --cpu: this was no GPU run'
fi
exit "$code"
