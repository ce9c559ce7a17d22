#!/usr/bin/env bash
# Builds the native part for this machine's GPU, runs tests/gpu on it and prints a table of the
# results. Needs no network.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash tools/gpu_check.sh [--cpu] [test files...]

  --cpu    no GPU run: execute on the CPU what of tests/gpu needs no GPU, and skip the rest

Exit status 0: the native part was built, every file ran to its end, and no test failed.

environment
  PYTHON             the Python with torch for CUDA, and with what tests/gpu imports; default: that
                     of .venv, where tools/setup.sh has made one, or python3
  REPORT             folder for table.txt (every test) and log.txt (what failed); default
                     build/gpu_check
  JOBS               files that run at a time; default 3. A file with the line
                     `WHOLE_DEVICE = True` runs alone, after the others
  LIMIT_S            seconds after which a file, or the build, is ended; default 480
  RLCORE_CUDA_ARCHS  architectures to build for; default: that of the GPU at hand
TEXT
}

die() {
  printf 'gpu_check: %s\n' "$*" >&2
  exit 2
}

DEVICE=cuda FILES=()
while (($#)); do
  case $1 in
    --cpu) DEVICE=cpu ;;
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
JOBS=${JOBS:-3}
LIMIT_S=${LIMIT_S:-480}
if ((${#FILES[@]} == 0)); then
  FILES=(tests/gpu/test_*.py)
fi
mkdir -p "$REPORT"
WORK=$(mktemp -d)
trap 'find "$WORK" -type f -delete; rmdir "$WORK"' EXIT
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

find_gpu() { # prints name and compute capability, such as `NVIDIA H100 80GB HBM3 (90)`
  "$PYTHON" - <<'PY'
import sys

import torch

if not torch.cuda.is_available():
    sys.exit(f"gpu_check: torch {torch.__version__} sees no GPU; --cpu runs what needs none")
major, minor = torch.cuda.get_device_capability(0)
print(f"{torch.cuda.get_device_name(0)} ({major}{minor})")
PY
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

build() { # the row `native_build` of the table; a failure costs the tests of kernels alone
  local start=$SECONDS code=0 said
  if built; then
    echo 'gpu_check: native build: the libraries in rlcore/ are used as they are'
    return
  fi
  printf 'gpu_check: native build for %s ...' "${GPU:-the CPU}"
  if [[ $DEVICE == cuda ]]; then
    export RLCORE_CUDA=1 RLCORE_CUDA_ARCHS=${RLCORE_CUDA_ARCHS:-${GPU_ARCH}-real}
  fi
  {
    "$PYTHON" tools/gpu_needs.py build &&
      RLCORE_NATIVE=1 timeout -k 10 "$LIMIT_S" "$PYTHON" setup.py build_ext --build-lib build/gpu_lib &&
      cp --remove-destination build/gpu_lib/rlcore/_C* rlcore/ # a running program keeps the old ones
  } >"$WORK/native_build.log" 2>&1 || code=$?
  echo "$code $((SECONDS - start))" >"$WORK/native_build.end"
  if ((code)); then
    printf ' failed after %d s; its last lines are in the table\n' $((SECONDS - start))
  else
    said=$(grep -o 'native build: .*' "$WORK/native_build.log" | tail -n 1)
    printf ' %d s: %s\n' $((SECONDS - start)) "${said#native build: }"
  fi
}

run_file() { # file: one process of its own, so that a CUDA error ends nothing but this file
  local name
  name=$(basename "$1" .py)
  local start=$SECONDS code=0
  timeout -k 10 "$LIMIT_S" "$PYTHON" -m pytest -q -p no:cacheprovider --durations=5 \
    --junitxml "$WORK/$name.xml" "$1" >"$WORK/$name.log" 2>&1 || code=$?
  echo "$code $((SECONDS - start))" >"$WORK/$name.end"
}

"$PYTHON" tools/gpu_needs.py
if [[ $DEVICE == cuda ]]; then
  GPU=$(find_gpu)
  GPU_ARCH=${GPU##*(}
  GPU_ARCH=${GPU_ARCH%)}
else
  export RLCORE_GPU_TESTS_DEVICE=cpu CUDA_VISIBLE_DEVICES='' RLCORE_CUDA=0
  echo 'gpu_check: --cpu: this is no GPU run; tests that need a GPU are skipped'
fi
build
"$PYTHON" -m rlcore env

alone=()
for file in "${FILES[@]}"; do
  if grep -q '^WHOLE_DEVICE = True$' "$file"; then
    alone+=("$file")
    continue
  fi
  while (($(jobs -rp | wc -l) >= JOBS)); do
    wait -n || true
  done
  run_file "$file" &
done
wait
for file in "${alone[@]}"; do
  run_file "$file"
done

code=0
"$PYTHON" tools/gpu_table.py "$WORK" "$REPORT" || code=$?
if [[ $DEVICE == cpu ]]; then
  echo 'gpu_check: --cpu: this was no GPU run'
fi
exit "$code"
