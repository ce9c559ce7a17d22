#!/usr/bin/env bash
# Runs tests/gpu on this machine's GPU and prints what became of them. Needs no network.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash tools/gpu_check.sh [test files...]

environment
  PYTHON   the Python that has torch for CUDA, and what is listed when it is missing; default: that
           of .venv, where tools/setup.sh has made one, or python3
  REPORT   folder for table.txt (every test) and log.txt (what failed); default build/gpu_check
  JOBS     files that run at a time; default 3
  LIMIT_S  seconds after which a file is ended; default 480
TEXT
}

case ${1:-} in
  --help | -h)
    usage
    exit 0
    ;;
esac

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
REPORT=${REPORT:-build/gpu_check}
JOBS=${JOBS:-3}
LIMIT_S=${LIMIT_S:-480}
FILES=("$@")
if ((${#FILES[@]} == 0)); then
  FILES=(tests/gpu/test_*.py)
fi
mkdir -p "$REPORT"
WORK=$(mktemp -d)
trap 'find "$WORK" -type f -delete; rmdir "$WORK"' EXIT
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

# What a run needs, by import name; a missing one would fail every file with the same words.
"$PYTHON" - <<'PY'
import importlib.util
import sys

needed = "torch megatron.core psutil transformers tokenizers safetensors numpy tyro zmq msgspec"
needed += " math_verify rich pyarrow jinja2 matplotlib pytest"
missing = []
for name in needed.split():
    try:
        found = importlib.util.find_spec(name)
    except ImportError:
        found = None
    if found is None:
        missing.append(name)
if missing:
    sys.exit(f"gpu_check: not installed: {' '.join(missing)}; put them on PYTHONPATH, see pyproject.toml")
import torch

if not torch.cuda.is_available():
    sys.exit(f"gpu_check: torch {torch.__version__} sees no GPU")
PY
"$PYTHON" -m rlcore env

run_file() { # file: one process of its own, so that a CUDA error ends nothing but this file
  local name
  name=$(basename "$1" .py)
  local start=$SECONDS code=0
  timeout -k 10 "$LIMIT_S" "$PYTHON" -m pytest -q -p no:cacheprovider --durations=5 \
    --junitxml "$WORK/$name.xml" "$1" >"$WORK/$name.log" 2>&1 || code=$?
  echo "$code $((SECONDS - start))" >"$WORK/$name.end"
}

for file in "${FILES[@]}"; do
  while (($(jobs -rp | wc -l) >= JOBS)); do
    wait -n || true
  done
  run_file "$file" &
done
wait

"$PYTHON" tools/gpu_table.py "$WORK" "$REPORT"
