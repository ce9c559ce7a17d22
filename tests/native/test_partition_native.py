"""The native balanced partition: the same lists as the Python reference, clean under sanitizers."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.ops import native, partition
from tests.native import host

ROOT = Path(__file__).resolve().parents[2]

try:
    from rlcore import _C
except ImportError:
    _C = None

needs_build = pytest.mark.skipif(_C is None, reason="no native build (no compiler at set-up)")
pytestmark = pytest.mark.native


@needs_build
@given(st.lists(st.integers(0, 2**40), max_size=60), st.integers(1, 12), st.booleans())
def test_native_and_reference_give_the_same_lists(xs, k, equal_size):
    assert _C.balanced(xs, k, equal_size) == partition.reference(xs, k, equal_size)


@needs_build
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 12), st.booleans())
def test_they_break_ties_alike(xs, k, equal_size):
    assert _C.balanced(xs, k, equal_size) == partition.reference(xs, k, equal_size)


@needs_build
def test_the_extension_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match="parts 0"):
        _C.balanced([1], 0, False)
    with pytest.raises(ValueError, match="length -1"):
        _C.balanced([-1], 1, False)


@pytest.fixture
def without_build(monkeypatch):
    """As on a machine that could not compile."""
    monkeypatch.setitem(sys.modules, "rlcore._C", None)
    native.load.cache_clear()
    yield monkeypatch
    native.load.cache_clear()


def announced(monkeypatch) -> list[str]:
    said = []
    monkeypatch.setattr(native, "announce", lambda what, choice: said.append(f"{what}: {choice}"))
    return said


def test_without_the_build_the_reference_runs_and_says_so_once(without_build):
    said = announced(without_build)
    without_build.delenv("RLCORE_NATIVE", raising=False)
    assert partition.balanced([1, 2, 3], 2) == [[0, 1], [2]]
    assert partition.balanced([1, 2, 3], 2) == [[0, 1], [2]]
    assert said == ["partition: python (no native build)"]


def test_asking_for_the_native_build_and_not_having_it_is_an_error(without_build):
    without_build.setenv("RLCORE_NATIVE", "1")
    with pytest.raises(ImportError, match="RLCORE_NATIVE=1: partition has no native build"):
        partition.balanced([1, 2, 3], 2)


@needs_build
@pytest.mark.parametrize("wanted, choice", [("1", "native"), ("0", "python (RLCORE_NATIVE=0)")])
def test_the_choice_is_announced(monkeypatch, wanted, choice):
    said = announced(monkeypatch)
    monkeypatch.setenv("RLCORE_NATIVE", wanted)
    native.load.cache_clear()
    partition.balanced([1, 2], 2)
    native.load.cache_clear()
    assert said == [f"partition: {choice}"]


def test_the_host_test_passes_under_address_and_undefined_sanitizers(tmp_path):
    host.run(host.build(tmp_path, ["partition/balanced.cpp", "tests/partition_test.cpp"]))
