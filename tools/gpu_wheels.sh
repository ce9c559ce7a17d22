#!/usr/bin/env bash
# Fetches the wheels that a GPU machine without a network lacks; tools/gpu_wheels.py does the work.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  if [[ -x $ROOT/.venv/bin/python ]]; then PYTHON=$ROOT/.venv/bin/python; fi
fi
exec "$PYTHON" "$ROOT/tools/gpu_wheels.py" "$@"
