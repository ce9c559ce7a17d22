"""The inputs that fuzzing found (tools/fuzz_suffix.sh), replayed without AFL++ under sanitizers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "native" / "corpus" / "suffix"
SOURCES = ("csrc/suffix/build.cpp", "csrc/suffix/forest.cpp", "csrc/tests/suffix_fuzz.cpp")

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The fuzzed program with address and undefined-behaviour sanitizers."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    # -O0: the compiler takes longer than the run.
    flags = "-std=c++20 -O0 -fsanitize=address,undefined -fno-sanitize-recover=all -pthread"
    if "clang" not in os.path.basename(compiler):
        flags += " -static-libasan"
    path = tmp_path_factory.mktemp("fuzz") / "suffix_fuzz"
    sources = [ROOT / source for source in SOURCES]
    command = [compiler, *flags.split(), f"-I{ROOT / 'csrc'}", *sources, "-o", path]
    built = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr
    return path


def test_the_corpus_is_there_and_small():
    sizes = [path.stat().st_size for path in CORPUS.iterdir()]
    assert len(sizes) >= 50 and sum(sizes) <= 100_000


def test_every_input_of_the_corpus_runs_clean(program):
    ran = subprocess.run(
        [program, *sorted(CORPUS.iterdir())], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-4000:]


def test_an_input_from_standard_input_runs_as_one_from_a_file(program):
    """AFL++ feeds it this way."""
    for path in sorted(CORPUS.iterdir())[:5]:
        ran = subprocess.run([program], input=path.read_bytes(), capture_output=True, timeout=60)
        assert ran.returncode == 0, ran.stderr[-4000:].decode()
