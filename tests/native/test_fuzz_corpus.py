"""The inputs that fuzzing found (tools/fuzz_suffix.sh), replayed without AFL++ under sanitizers."""

from pathlib import Path

import pytest

from tests.native import host

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "native" / "corpus" / "suffix"
SOURCES = ("suffix/build.cpp", "suffix/forest.cpp", "tests/suffix_fuzz.cpp")

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The fuzzed program with address and undefined-behaviour sanitizers."""
    # -O0: the compiler takes longer than the run.
    flags = host.SANITIZED.replace("-O1", "-O0")
    return host.build(tmp_path_factory.mktemp("fuzz"), SOURCES, flags)


def test_the_corpus_is_there_and_small():
    sizes = [path.stat().st_size for path in CORPUS.iterdir()]
    assert len(sizes) >= 50 and sum(sizes) <= 100_000


def test_every_input_of_the_corpus_runs_clean(program):
    host.run(program, *sorted(CORPUS.iterdir()))
