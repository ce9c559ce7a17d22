#!/usr/bin/env bash
# Builds the native part under other releases of torch and runs its tests there.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash tools/torch_versions.sh VERSION...       e.g. 2.11.0 2.12.0

For each: an environment of its own (.venvs/torch-VERSION, some gigabytes), a copy of the sources, the
native build against that torch's headers, the tests of the native part; then the same tests with the
library that this checkout's own torch built, since one file serves them all.

environment
  RLCORE_PYTHON  the Python that makes the environments; default python3
  RLCORE_CUDA    0 leaves the CUDA kernels out
TEXT
}

if (($# == 0)) || [[ $1 == --help || $1 == -h ]]; then
  usage
  exit $(($# == 0 ? 2 : 0))
fi

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
TESTS=(tests/native tests/unit/test_ops_logprob.py tests/unit/test_ops_policy.py tests/unit/test_ops_reshard.py)
export OMP_NUM_THREADS=1

run_tests() { # python, folder
  (cd "$2" && RLCORE_NATIVE=1 "$1" -m pytest -q -n0 -p no:cacheprovider -m 'not slow' \
    --deselect tests/native/test_cuda_build.py "${TESTS[@]}") | tail -n 3
}

for version in "$@"; do
  venv=$ROOT/.venvs/torch-$version
  python=$venv/bin/python
  if [[ ! -x $python ]]; then
    "${RLCORE_PYTHON:-python3}" -m venv "$venv"
  fi
  "$python" -m pip install -q --disable-pip-version-check "torch==$version" 'numpy~=2.4' 'setuptools>=77' 'pybind11~=3.1' \
    cmake ninja 'pytest~=9.2' pytest-xdist pytest-timeout hypothesis 'msgspec~=0.22.0' psutil 2>/dev/null
  copy=$ROOT/build/torch-$version
  mkdir -p "$copy"
  git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do if [[ -f $file ]]; then printf '%s\0' "$file"; fi; done |
    tar --null -T - -cf - | tar -xf - -C "$copy"
  echo "torch $("$python" -c 'import torch; print(torch.__version__)'):"
  (cd "$copy" && RLCORE_NATIVE=1 "$python" -m pip install -v --no-deps --no-build-isolation -e . >"$copy/build.log" 2>&1) ||
    { tail -n 40 "$copy/build.log" >&2 && exit 1; }
  echo "  built from its own headers: $(run_tests "$python" "$copy" | tail -n 1)"
  cp rlcore/_C_torch.so "$copy/rlcore/_C_torch.so"
  echo "  the file of this checkout:  $(run_tests "$python" "$copy" | tail -n 1)"
done
