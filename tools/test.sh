#!/usr/bin/env bash
# Sets itself up, checks form and types, runs the tests.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash tools/test.sh [--fast | --long] [arguments of pytest]

  --fast   the inner loop, two minutes: no ranks, nothing slow or heavy, no SGLang
  (none)   what CI runs: all but the slow tests; installs SGLang, and as root Redis and Slurm
  --long   everything: tasks are learned, a soak in every mode, 10,000 random configurations

  bash tools/test.sh tests/unit -k net     # arguments of pytest: without form and types

environment
  RLCORE_DATA          folder of the real data; default ../shared/data; without it those tests are skipped
  RLCORE_TEST_WORKERS  tests at a time; default: one more than cores, at most 4
  RLCORE_REQUIRE_NVCC  1: without nvcc or cuobjdump the tests of the CUDA sources fail (CI sets it)
TEXT
}

MARKS='not slow'
EXTRAS=(--test --sglang)
SERVICES=1
case ${1:-} in
  --fast)
    MARKS='not slow and not ranks and not heavy'
    EXTRAS=(--test)
    SERVICES=0
    shift
    ;;
  --long)
    MARKS=''
    export RLCORE_EXAMPLES=new # property tests draw new examples
    export RLCORE_LONG=1       # gangs of ranks run all their cases
    shift
    ;;
  --help | -h)
    usage
    exit 0
    ;;
esac

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
bash tools/setup.sh "${EXTRAS[@]}" --quiet
if ((SERVICES && EUID == 0)); then
  bash tools/setup.sh --mux --quiet || echo 'tools/test.sh: Redis is not installed: mux tests are skipped' >&2
  bash tools/setup.sh --slurm --quiet || echo 'tools/test.sh: Slurm is not installed: its tests are skipped' >&2
fi
if [[ -n ${RLCORE_LONG:-} ]]; then
  bash tools/setup.sh --mini-swe-agent --quiet ||
    echo 'tools/test.sh: mini-swe-agent is not installed: its tests are skipped' >&2
fi
BIN=${RLCORE_VENV:-$ROOT/.venv}/bin
export PATH="$BIN:$PATH"

failed=()
check() { # tool and its arguments
  "$@" || failed+=("$1 $2")
}

if (($# == 0)); then
  mkdir -p build
  python -m mypy >build/mypy.log 2>&1 & # beside the tests: half a minute without its cache
  typing=$!
  if ((SERVICES)); then # mostly a wait for the registry
    python tools/lock_cuda.py >build/locks.log 2>&1 &
    locking=$!
  fi
  mapfile -t shell < <(git ls-files --cached --others --exclude-standard '*.sh' '*.sbatch' .ci/run)
  mapfile -t cpp < <(git ls-files --cached --others --exclude-standard 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu')
  check ruff check --quiet .
  check ruff format --check --quiet .
  check shellcheck --color=auto "${shell[@]}"
  check shfmt -i 2 -ci -d "${shell[@]}"
  check bandit -q -c pyproject.toml -r rlcore recipes tools setup.py
  check clang-format --dry-run -Werror "${cpp[@]}"
fi

cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)      # nproc takes the former for the cores
workers=${RLCORE_TEST_WORKERS:-$((cores < 4 ? cores + 1 : 4))} # many tests wait for a while
export OMP_NUM_THREADS=1
# A file stays on one worker: its fixtures are made once. tests/conftest.py says which goes first.
run_tests() { python -m pytest -q -m "$MARKS" "$@"; }
RECORD=.pytest_cache/v/cache/lastfailed
rm -f "$RECORD"
status=0
run_tests -n "$workers" --dist loadfile --no-loadscope-reorder "$@" || status=$?
if ((status == 1)); then
  # Beside other tests some deadlines pass. One to three failures run again, alone, and are named in any case.
  flaky=$(python -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$RECORD")
  if (($(wc -l <<<"$flaky") <= 3)) && run_tests --last-failed "$@"; then
    printf 'tools/test.sh: failed beside other tests, passed alone: %s\n' "${flaky//$'\n'/, }" >&2
    status=0
  fi
fi
((status == 0)) || failed+=('python -m pytest')

if [[ -n ${typing:-} ]]; then
  wait "$typing" || failed+=('mypy')
  cat build/mypy.log
fi
if [[ -n ${locking:-} ]]; then
  wait "$locking" || failed+=('tools/lock_cuda.py')
  cat build/locks.log
fi

if ((${#failed[@]})); then
  printf 'tools/test.sh: failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
