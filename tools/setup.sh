#!/usr/bin/env bash
# Sets this checkout up: a virtual environment of its own, torch, the packages, the native build.
# Run it again whenever you like: what is already there is left alone.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash tools/setup.sh [flags]

  --test         also what the tests need
  --sglang       also SGLang: for the CPU where torch is a CPU build; else for CUDA 13.0, as locked in
                 tools/locks: 64-bit x86, glibc 2.34 or newer, Python 3.11 or 3.12
  --wandb        also Weights & Biases
  --openai       also the client of OpenAI, for the agent of recipes/endpoint_tiny.sh
  --mux          also a Redis server, for many jobs on the same nodes (Debian and Ubuntu; needs root)
  --te           also Transformer Engine (builds against CUDA; minutes)
  --bench        also the peer of tools/bench_judge.py
  --browser      also Chromium, for the tests of pages (Debian and Ubuntu; needs root)
  --slurm        also Slurm and munge, for the tests of jobs (Debian and Ubuntu; needs root)
  --mini-swe-agent
                 also mini-swe-agent, in an environment of its own, .venvs/mini-swe-agent (800 MB)
  --apex SOURCE  also NVIDIA Apex, built from SOURCE: a folder or a git URL (builds; many minutes)
  --cuda         insist on a CUDA build of torch
  --cpu          accept a CPU build of torch on a machine with an NVIDIA GPU
  --quiet        say nothing when there is nothing to do

environment
  RLCORE_VENV         the virtual environment; default .venv in the checkout
  RLCORE_PYTHON       the Python (3.11 to 3.14; with --sglang and a GPU 3.11 or 3.12) that makes it;
                      default: the first one found
  RLCORE_TORCH_INDEX  package index to take torch from, for another CUDA version or a CPU-only build;
                      default: the index that pip is configured for
  RLCORE_NATIVE       0 leaves the C++ part out, 1 insists on it
  RLCORE_CUDA         0 leaves the CUDA kernels out, 1 insists on them; default: where nvcc is
                      and torch is a CUDA build
  CUDA_HOME           the CUDA toolkit, if its nvcc is not on PATH; /usr/local/cuda is found without it
  RLCORE_CUDA_ARCHS   architectures for nvcc; default 80;90-real;100
TEXT
}

die() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

EXTRAS=() APEX='' TORCH=auto QUIET=0 BROWSER=0 MUX=0 SLURM=0 MINI=0
while (($#)); do
  case $1 in
    --test | --te | --sglang | --bench | --wandb | --openai) EXTRAS+=("${1#--}") ;;
    --apex)
      APEX=${2:-}
      [[ -n $APEX ]] || die '--apex needs a value: a folder with the Apex sources, or its git URL'
      shift
      ;;
    --browser) BROWSER=1 ;;
    --mux) MUX=1 ;;
    --slurm) SLURM=1 ;;
    --mini-swe-agent) MINI=1 ;;
    --cuda | --cpu) TORCH=${1#--} ;;
    --quiet) QUIET=1 ;;
    --help | -h)
      usage
      exit 0
      ;;
    *)
      usage >&2
      die "$1: unknown flag"
      ;;
  esac
  shift
done

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
VENV=${RLCORE_VENV:-$ROOT/.venv}
[[ $VENV == /* ]] || VENV=$ROOT/$VENV
MINI_VENV=$ROOT/.venvs/mini-swe-agent
LOG=$ROOT/build/setup.log
NEWEST=14 # minor version of the newest Python that will do
NEEDED='Python 3.11 to 3.14'

find_nvcc() { # put nvcc on PATH; --sglang for CUDA brings one, which is taken last
  local bin
  for bin in {"${CUDA_HOME:-}","${CUDA_PATH:-}",/usr/local/cuda}/bin \
    "$VENV"/lib/python*/site-packages/nvidia/cu13/bin; do
    ! command -v nvcc >/dev/null || return 0
    [[ ! -x $bin/nvcc ]] || export PATH=$PATH:$bin
  done
}
find_nvcc

# ---- what is there: a stamp per part holds the hash of all that the part depends on

digest() { sha256sum | cut -c1-32; }

packages_key() {
  {
    cat pyproject.toml tools/setup.sh "$VENV/pyvenv.cfg"
    [[ $1 != sglang ]] || cat tools/locks/*
    echo "$1 ${RLCORE_TORCH_INDEX:-}"
  } | digest
}

native_key() {
  {
    find csrc CMakeLists.txt setup.py pyproject.toml -type f -print0 | sort -z | xargs -0 sha256sum
    cat "$VENV/pyvenv.cfg" "$VENV"/lib/python*/site-packages/torch/version.py
    echo "$ROOT ${RLCORE_NATIVE:-} ${RLCORE_CUDA:-} ${RLCORE_CUDA_ARCHS:-} ${CXX:-} ${CUDACXX:-}"
    command -v c++ g++ clang++ nvcc || true
    nvcc --version 2>/dev/null || true
  } | digest
}

stamped() { # part key
  [[ -f $VENV/rlcore-$1.stamp && $(<"$VENV/rlcore-$1.stamp") == "$2" ]]
}

native_ready() {
  local version
  version=$(sed -n 's/^version[^=]*= *\([0-9]*\)\.\([0-9]*\).*/\1\2/p' "$VENV/pyvenv.cfg")
  stamped native "$(native_key) python" ||
    { stamped native "$(native_key) native" && [[ -f rlcore/_C_torch.so ]] &&
      compgen -G "rlcore/_C.cpython-$version-*" >/dev/null; }
}

ready() {
  local part
  [[ -f $VENV/pyvenv.cfg && -x $VENV/bin/python ]] || return 1
  for part in base "${EXTRAS[@]}"; do
    stamped "$part" "$(packages_key "$part")" || return 1
  done
  [[ -z $APEX ]] || stamped apex "$APEX" || return 1
  ((! BROWSER)) || has_browser || return 1
  ((! MUX)) || has_redis || return 1
  ((! SLURM)) || has_slurm || return 1
  ((! MINI)) || has_mini || return 1
  sandbox_ready && native_ready
}

sandbox_ready() { # bubblewrap is there, or it was tried and said
  command -v bwrap >/dev/null || [[ -f $VENV/rlcore-sandbox.stamp ]]
}

has_browser() { command -v chromium >/dev/null || command -v google-chrome >/dev/null; }

has_redis() { command -v redis-server >/dev/null; }

has_slurm() { # Debian has the daemons where only root looks
  local name
  for name in slurmctld slurmd munged sbatch; do
    PATH=$PATH:/usr/sbin command -v "$name" >/dev/null || return 1
  done
}

has_mini() { # of the versions that pyproject.toml names
  [[ -f $MINI_VENV/rlcore.stamp && $(<"$MINI_VENV/rlcore.stamp") == "$(packages_key mini)" ]]
}

# ---- the parts

step() { # what command...: run it, into the log, and say how long it took
  local what=$1 start=$SECONDS
  shift
  printf 'setup: %s ...' "$what"
  printf '\n==== %s\n%s\n' "$what" "$*" >>"$LOG"
  if ! "$@" >>"$LOG" 2>&1; then
    printf ' failed after %d s; the last lines of %s:\n' $((SECONDS - start)) "${LOG#"$ROOT"/}"
    tail -n 40 "$LOG" >&2
    exit 1
  fi
  printf ' %d s\n' $((SECONDS - start))
}

asked_for() { [[ " ${EXTRAS[*]} " == *" $1 "* ]]; }

good_python() { # python [newest minor version]
  "$1" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, ${2:-$NEWEST}))" \
    2>/dev/null
}

find_python() {
  local candidate newest
  if [[ -n ${RLCORE_PYTHON:-} ]]; then
    good_python "$RLCORE_PYTHON" ||
      die "RLCORE_PYTHON=$RLCORE_PYTHON: not $NEEDED"
    echo "$RLCORE_PYTHON"
    return
  fi
  for newest in 12 "$NEWEST"; do
    asked_for sglang || newest=$NEWEST # which wants 3.12 at most with CUDA: take that where it is
    for candidate in python3 python3.{12,11,13,14}; do
      if good_python "$candidate" "$newest"; then
        echo "$candidate"
        return
      fi
    done
  done
  die "no $NEEDED found; install one, or name it: RLCORE_PYTHON=/path/to/python"
}

make_venv() {
  local python
  if [[ -e $VENV ]]; then
    good_python "$VENV/bin/python" ||
      die "$VENV exists but is not an environment of $NEEDED; move it away"
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || repair_pip
    return
  fi
  python=$(find_python)
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$python cannot make environments (no venv or ensurepip): install its venv package," \
      "on Debian and Ubuntu python3-venv, or set RLCORE_PYTHON to another Python"
  step "virtual environment ${VENV/#"$ROOT"\//} ($("$python" -V))" "$python" -m venv "$VENV"
}

repair_pip() { # a set-up that was interrupted leaves an environment without it
  (step 'pip, which the environment lacks' "$VENV/bin/python" -m ensurepip --upgrade) ||
    die "$VENV has no pip, and ensurepip cannot install it; move the environment away"
}

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check "$@"; }

pyproject() { # expression over the parsed file, lines out
  "$VENV/bin/python" -c "
import tomllib
p = tomllib.load(open('pyproject.toml', 'rb'))
print(*$1, sep='\n')"
}

install_base() {
  local torch index=() requirements
  torch=$(pyproject '[d for d in p["project"]["dependencies"] if d.startswith("torch==")]')
  [[ -z ${RLCORE_TORCH_INDEX:-} ]] || index=(--index-url "$RLCORE_TORCH_INDEX")
  step "$torch" pip_install "${index[@]}" "$torch"
  [[ $TORCH == cuda ]] || check_torch
  ! asked_for sglang || check_sglang
  mapfile -t requirements < <(pyproject 'p["build-system"]["requires"], *p["project"]["dependencies"]')
  step 'packages' pip_install "${requirements[@]}"
  packages_key base >"$VENV/rlcore-base.stamp"
}

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q GPU; }

check_torch() {
  local cuda fix='move the environment away and set RLCORE_TORCH_INDEX to an index of CUDA builds'
  cuda=$(torch_cuda)
  if [[ -n $cuda ]]; then
    echo "setup: torch is a build for CUDA $cuda"
  elif [[ $TORCH == cuda ]]; then
    die "--cuda: torch came as a CPU build; $fix"
  elif [[ $TORCH == auto ]] && has_gpu; then
    echo "setup: WARNING: this machine has an NVIDIA GPU, but torch is a CPU build; $fix" >&2
  else
    echo 'setup: torch is a CPU build'
  fi
}

install_extra() { # extra
  local requirements flags=()
  if [[ $1 == sglang ]]; then
    install_sglang
  else
    [[ $1 != te ]] || flags=(--no-build-isolation) # it is compiled against this torch
    mapfile -t requirements < <(pyproject "p['project']['optional-dependencies']['$1']")
    step "packages for --$1" pip_install "${flags[@]}" "${requirements[@]}"
  fi
  packages_key "$1" >"$VENV/rlcore-$1.stamp"
}

install_sglang() {
  local requirements
  if has_cuda; then
    check_sglang
    # Wheels with known hashes alone. The torch that is there stays, whatever index it came from.
    step 'SGLang for CUDA' pip_install --no-deps --require-hashes --only-binary :all: -r "$(lock)"
    complete_toolkit
    find_nvcc
    return
  fi
  mapfile -t requirements < <(pyproject "p['project']['optional-dependencies']['sglang-cpu']")
  step 'packages for --sglang' pip_install "${requirements[@]}"
  mapfile -t requirements < <(pyproject "p['tool']['rlcore']['sglang-cpu-alone']")
  step 'SGLang for the CPU' pip_install --no-deps "${requirements[@]}"
}

torch_version() { # file of the installed torch; fails if there is none
  compgen -G "$VENV/lib/python*/site-packages/torch/version.py"
}

torch_cuda() { sed -n "s/^cuda\b.*= '\(.*\)'.*/\1/p" "$(torch_version)"; }

has_cuda() { [[ -n $(torch_cuda) ]]; }

lock() { # file of the packages for CUDA and the environment's Python
  "$VENV/bin/python" -c 'import sys; print("tools/locks/cuda-py%d%d.txt" % sys.version_info[:2])'
}

check_sglang() { # whether its packages for CUDA can work here; before torch is installed by guess
  local found wanted
  if torch_version >/dev/null; then
    has_cuda || return 0
  else
    [[ $TORCH == cuda ]] || { [[ $TORCH == auto ]] && has_gpu; } || return 0
  fi
  NEWEST=12 NEEDED='Python 3.11 or 3.12, as --sglang needs with CUDA'
  [[ $(uname -m) == x86_64 ]] ||
    die "--sglang: its packages for CUDA are locked for x86_64, and this machine is $(uname -m);" \
      'leave --sglang out and sample with --rollout.engine torch'
  found=$(getconf GNU_LIBC_VERSION 2>/dev/null) || found='another C library'
  [[ $found == glibc\ * && $(printf '%s\n' 2.34 "${found#* }" | sort -V | head -n 1) == 2.34 ]] ||
    die "--sglang: its packages for CUDA need glibc 2.34 or newer, and here is $found: take a newer" \
      'system or container (Ubuntu 22.04, Debian 12, RHEL 9), or leave --sglang out'
  [[ -e $VENV ]] || return 0 # make_venv looks for the Python
  good_python "$VENV/bin/python" ||
    die "$VENV is not an environment of $NEEDED; move it away, or set RLCORE_VENV to another folder"
  torch_version >/dev/null || return 0
  wanted=$(sed -n 's/^cuda-toolkit==\([0-9]*\.[0-9]*\).*/\1/p' "$(lock)")
  [[ $(torch_cuda) == "$wanted" ]] ||
    die "--sglang: its packages are for CUDA $wanted, and torch is a build for CUDA $(torch_cuda):" \
      "move $VENV away, and leave RLCORE_TORCH_INDEX unset or set it to an index of builds for CUDA" \
      "$wanted"
}

complete_toolkit() { # SGLang compiles at run time; the wheels lack names that compilers look for
  local home library name
  home=$(echo "$VENV"/lib/python*/site-packages/nvidia/cu13)
  ln -sfn lib "$home/lib64"
  for library in "$home"/lib/lib*.so.*; do
    name=${library%%.so.*}.so
    [[ -e $name ]] || ln -s "${library##*/}" "$name"
  done
  if command -v c++ >/dev/null; then
    mkdir -p "$home/lib/stubs" # of the driver, which a machine that compiles may lack
    step 'CUDA toolkit out of the wheels' c++ -shared -Wl,-soname,libcuda.so.1 \
      -x c++ /dev/null -o "$home/lib/stubs/libcuda.so"
  else
    echo 'setup: WARNING: no c++: SGLang compiles kernels at run time and needs a C++ compiler on' \
      'every node with GPUs; on Debian and Ubuntu: apt install g++' >&2
  fi
}

install_apex() {
  command -v nvcc >/dev/null || die '--apex: building Apex needs nvcc (the CUDA toolkit) on PATH'
  export APEX_CPP_EXT=1 APEX_CUDA_EXT=1
  step "Apex from $APEX" pip_install -v --no-build-isolation --no-deps "$APEX"
  echo "$APEX" >"$VENV/rlcore-apex.stamp"
}

install_sandbox() { # programs of code rewards run without namespaces where this fails
  if [[ $EUID == 0 ]] && command -v apt-get >/dev/null && {
    apt-get install -y --no-install-recommends bubblewrap ||
      { apt-get update && apt-get install -y --no-install-recommends bubblewrap; }
  } >>"$LOG" 2>&1 && command -v bwrap >/dev/null; then
    echo 'setup: bubblewrap, for the sandbox of --reward code'
  else
    echo 'setup: WARNING: no bubblewrap: --reward code uses a weaker sandbox; on Debian and Ubuntu:' \
      'apt install bubblewrap' >&2
  fi
  touch "$VENV/rlcore-sandbox.stamp"
}

install_debian() { # flag name packages...
  local flag=$1 name=$2
  shift 2
  command -v apt-get >/dev/null ||
    die "$flag: this machine has no apt-get; install $name by hand, on PATH"
  ((EUID == 0)) || die "$flag: apt-get needs root; run as root: apt-get install $*"
  step 'package lists' apt-get update
  step "$name" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

install_mini() { # its packages have pins of their own
  local requirements
  mapfile -t requirements < <(pyproject 'p["tool"]["rlcore"]["mini-swe-agent"]')
  [[ -x $MINI_VENV/bin/python ]] ||
    step "virtual environment ${MINI_VENV#"$ROOT"/}" "$VENV/bin/python" -m venv "$MINI_VENV"
  step "${requirements[0]}" "$MINI_VENV/bin/python" -m pip install --disable-pip-version-check \
    "${requirements[@]}"
  packages_key mini >"$MINI_VENV/rlcore.stamp"
}

install_native() {
  local said built=python
  step 'rlcore, with its native build' pip_install -v --no-deps --no-build-isolation -e .
  said=$(grep -o 'native build: .*' "$LOG" | tail -n 1) || die "$LOG does not report the native build"
  echo "setup: $said"
  [[ $said == *'left out'* ]] || built=native
  [[ ${RLCORE_CUDA:-} == 0 || ${RLCORE_NATIVE:-} == 0 || $said == *kernels\ for* ]] || ! has_cuda ||
    echo 'setup: WARNING: torch is a CUDA build, but there are no CUDA kernels of rlcore: the loss and' \
      'the weight copies run in torch, slower and with more memory. Install the CUDA toolkit (nvcc) and' \
      'a C++ compiler, set CUDA_HOME where nvcc is not on PATH, and run this again' >&2
  echo "$(native_key) $built" >"$VENV/rlcore-native.stamp"
}

# ---- go

if ready; then
  [[ $TORCH != cuda ]] || check_torch
  ((QUIET)) || echo "setup: ${VENV/#"$ROOT"\//} is up to date"
  exit 0
fi
mkdir -p build
exec 9>build/setup.lock
if ! flock -n 9; then
  echo 'setup: waiting for another set-up of this checkout'
  flock -w 3600 9 || die 'another set-up still runs after an hour; read build/setup.log'
fi
: >"$LOG"
! asked_for sglang || check_sglang
make_venv
stamped base "$(packages_key base)" || install_base
[[ $TORCH != cuda ]] || check_torch
for extra in "${EXTRAS[@]}"; do
  stamped "$extra" "$(packages_key "$extra")" || install_extra "$extra"
done
[[ -z $APEX ]] || stamped apex "$APEX" || install_apex
sandbox_ready || install_sandbox
((! BROWSER)) || has_browser || install_debian --browser Chromium chromium
((! MUX)) || has_redis || install_debian --mux Redis redis-server
((! SLURM)) || has_slurm || install_debian --slurm Slurm slurm-wlm munge
((! MINI)) || has_mini || install_mini
native_ready || install_native
echo "setup: ready after $SECONDS s; the log is build/setup.log"
