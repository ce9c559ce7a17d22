#!/usr/bin/env bash
# Fuzzes the suffix forest with AFL++: builds, runs, prints the figures, keeps what is found.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash tools/fuzz_suffix.sh [--seconds N] [--plain] [--update-corpus]

  --seconds N       of fuzzing; default 60
  --plain           without address and undefined-behaviour sanitizers: faster, sees less
  --update-corpus   put the smallest inputs that cover the same into tests/native/corpus/suffix

Needs AFL++ (Debian: apt-get install afl++). Works in build/fuzz_suffix; a crash or a hang is kept
there and makes the exit code 1. Replay one: build/fuzz_suffix/suffix_fuzz FILE
TEXT
}

SECONDS_TO_RUN=60
SANITIZERS=1
UPDATE=0
while (($#)); do
  case $1 in
    --seconds)
      SECONDS_TO_RUN=${2:-}
      shift
      ;;
    --plain) SANITIZERS=0 ;;
    --update-corpus) UPDATE=1 ;;
    --help | -h)
      usage
      exit 0
      ;;
    *)
      printf 'fuzz_suffix: %s: unknown option\n' "$1" >&2
      usage >&2
      exit 2
      ;;
  esac
  shift
done
if [[ ! $SECONDS_TO_RUN =~ ^[1-9][0-9]*$ ]]; then
  printf -- '--seconds %s: must be a whole number of at least 1\n' "$SECONDS_TO_RUN" >&2
  exit 2
fi

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
WORK=build/fuzz_suffix
CORPUS=tests/native/corpus/suffix
SOURCES=(csrc/suffix/build.cpp csrc/suffix/forest.cpp csrc/tests/suffix_fuzz.cpp)
KEEP_BYTES=65536 # of the corpus that is committed

compiler=
for name in afl-clang-fast++ afl-g++-fast afl-g++; do
  if command -v "$name" >/dev/null && "$name" --version >/dev/null 2>&1; then
    compiler=$name
    break
  fi
done
if [[ -z $compiler ]] || ! command -v afl-fuzz >/dev/null; then
  echo 'fuzz_suffix: AFL++ is not installed; on Debian and Ubuntu run apt-get install afl++' >&2
  exit 2
fi

RUN=$WORK/run-$(date +%Y%m%d-%H%M%S)
mkdir -p "$RUN"
PROGRAM=$WORK/suffix_fuzz
export AFL_QUIET=1
if ((SANITIZERS)); then
  export AFL_USE_ASAN=1 AFL_USE_UBSAN=1
fi
"$compiler" -std=c++20 -O2 -g -Icsrc -pthread "${SOURCES[@]}" -o "$PROGRAM"

SEEDS=$RUN/seeds
mkdir "$SEEDS"
printf 'suffix' >"$SEEDS/text"
head -c 256 /dev/zero >"$SEEDS/zeros"
if [[ -d $CORPUS ]]; then
  cp "$CORPUS"/* "$SEEDS"
fi

export AFL_NO_UI=1 AFL_SKIP_CPUFREQ=1 AFL_NO_AFFINITY=1 AFL_NO_STARTUP_CALIBRATION=1
export AFL_HANG_TMOUT=10000                    # ms; less is a busy machine
export AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES=1 # core dumps may go to a handler: crashes count anyway
afl-fuzz -i "$SEEDS" -o "$RUN/out" -V "$SECONDS_TO_RUN" -m none -t 2000 -- "$PROGRAM" \
  >"$RUN/log" 2>&1 || {
  tail -n 20 "$RUN/log" >&2
  echo "fuzz_suffix: afl-fuzz stopped; see its output in $RUN/log" >&2
  exit 1
}

stat() { # name in fuzzer_stats
  sed -n "s/^$1 *: *//p" "$RUN/out/default/fuzzer_stats"
}
crashes=$(stat saved_crashes)
hangs=$(stat saved_hangs)
checks=$( ((SANITIZERS)) && echo 'address and undefined-behaviour sanitizers' || echo 'no sanitizers')
cat <<TEXT
suffix_fuzz, $compiler, $checks, $(stat run_time) s
  executions   $(stat execs_done)
  exec/s       $(stat execs_per_sec)
  paths        $(stat corpus_count)
  edges        $(stat bitmap_cvg) of $(stat total_edges)
  stability    $(stat stability)
  crashes      $crashes
  hangs        $hangs
TEXT

if ((UPDATE)); then
  AFL_ALLOW_TMP=1 afl-cmin -i "$RUN/out/default/queue" -o "$RUN/smallest" -m none -t 2000 \
    -- "$PROGRAM" >"$RUN/cmin.log" 2>&1 || {
    tail -n 5 "$RUN/cmin.log" >&2
    exit 1
  }
  mkdir -p "$CORPUS"
  find "$CORPUS" -type f -delete # what is still needed of it comes back: it was among the seeds
  total=0
  while read -r size file; do
    ((total += size))
    ((total <= KEEP_BYTES)) || break
    cp "$file" "$CORPUS/$(sha256sum "$file" | cut -c 1-12)"
  done < <(find "$RUN/smallest" -type f -printf '%s %p\n' | sort -n)
  echo "  corpus       $(find "$CORPUS" -type f | wc -l) files in $CORPUS"
fi

if ((crashes + hangs)); then
  echo "fuzz_suffix: kept in $RUN/out/default/crashes and $RUN/out/default/hangs" >&2
  exit 1
fi
