"""The built libraries: they load beside the CPU wheel of torch, and say what they have."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlcore.ops import native

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "rlcore" / "_C_torch.so"

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not LIBRARY.is_file(), reason="no native build (no compiler at set-up)"),
]


@pytest.fixture(autouse=True)
def no_memory():
    """Each test asks anew."""
    native.torch_ops.cache_clear()
    native.load.cache_clear()
    yield
    native.torch_ops.cache_clear()
    native.load.cache_clear()
    native._warn.cache_clear()


@pytest.fixture
def said(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(native, "announce", lambda what, choice: lines.append(f"{what}: {choice}"))
    return lines


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torch_loads_the_library_in_a_fresh_process() -> None:
    program = f"import torch; torch.ops.load_library({str(LIBRARY)!r}); "
    assert run(program + "print(torch.ops.rlcore_native.has_cuda())") in ("True", "False")


def test_the_library_needs_no_python_and_no_path_to_torch() -> None:
    """One file for every Python, and for a torch that lies elsewhere."""
    said = subprocess.run(
        ["readelf", "-d", LIBRARY], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "libtorch_cpu.so" in said
    assert "python" not in said.lower()
    assert "RUNPATH" not in said and "RPATH" not in said


def test_the_library_uses_the_stable_abi_alone() -> None:
    """No C++ symbol of torch or c10: those change from release to release."""
    said = subprocess.run(
        ["nm", "-D", "-C", "--undefined-only", LIBRARY],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    unstable = [x for x in said.splitlines() if " at::" in x or " c10::" in x or " torch::" in x]
    assert unstable == []


def test_the_cpu_build_is_announced(said: list[str], monkeypatch) -> None:
    monkeypatch.delenv("RLCORE_NATIVE", raising=False)
    assert native.torch_ops("token_logprob", "cpu") is not None
    assert native.torch_ops("token_logprob", "cpu") is not None
    assert said == ["token_logprob: native on cpu"]


def test_an_unknown_device_runs_the_reference_and_says_so(said: list[str], monkeypatch) -> None:
    monkeypatch.delenv("RLCORE_NATIVE", raising=False)
    assert native.torch_ops("token_logprob", "mps") is None
    assert said == ["token_logprob: torch on mps (the native build has no kernels for mps)"]


def test_the_build_can_be_turned_off(said: list[str], monkeypatch) -> None:
    monkeypatch.setenv("RLCORE_NATIVE", "0")
    assert native.torch_ops("token_logprob", "cpu") is None
    assert said == ["token_logprob: torch on cpu (RLCORE_NATIVE=0)"]


def test_insisting_on_kernels_that_are_not_there_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv("RLCORE_NATIVE", "1")
    with pytest.raises(ImportError, match="RLCORE_NATIVE=1: token_logprob on mps has no native"):
        native.torch_ops("token_logprob", "mps")


def test_insisting_on_a_library_that_is_not_there_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv("RLCORE_NATIVE", "1")
    monkeypatch.setattr(native, "_library", lambda: "no native build")
    with pytest.raises(ImportError, match="no native build"):
        native.torch_ops("token_logprob", "cpu")


def test_without_the_extension_the_reference_runs_and_says_so_once(
    said: list[str], monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "rlcore._C", None)
    monkeypatch.delenv("RLCORE_NATIVE", raising=False)
    assert native.load("some op") is None and native.load("some op") is None
    assert said == ["some op: python (no native build)"]
    monkeypatch.setenv("RLCORE_NATIVE", "1")
    native.load.cache_clear()
    with pytest.raises(ImportError, match="RLCORE_NATIVE=1: some op has no native build"):
        native.load("some op")


@pytest.mark.parametrize("wanted, choice", [("1", "native"), ("0", "python (RLCORE_NATIVE=0)")])
def test_the_choice_of_the_extension_is_announced(
    said: list[str], monkeypatch, wanted: str, choice: str
) -> None:
    pytest.importorskip("rlcore._C", reason="no native build (no compiler at set-up)")
    monkeypatch.setenv("RLCORE_NATIVE", wanted)
    native.load("suffix forest", "SuffixForest")
    assert said == [f"suffix forest: {choice}"]


def test_a_build_from_before_an_op_says_so(said: list[str], monkeypatch) -> None:
    monkeypatch.delenv("RLCORE_NATIVE", raising=False)
    assert native.load("some op", "Unheard") is None
    (line,) = said
    assert line.startswith("some op: python (the native build is older than the source")
    monkeypatch.setenv("RLCORE_NATIVE", "1")
    native.load.cache_clear()
    with pytest.raises(ImportError, match="older than the source: it has no Unheard"):
        native.load("some op", "Unheard")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_machine_without_a_device_has_no_kernels_for_it(said: list[str], monkeypatch) -> None:
    monkeypatch.delenv("RLCORE_NATIVE", raising=False)
    assert native.torch_ops("token_logprob", "cuda") is None
    assert said[0].startswith("token_logprob: torch on cuda (")


def test_a_gpu_without_kernels_is_warned_of_once(said: list[str], monkeypatch) -> None:
    monkeypatch.delenv("RLCORE_NATIVE", raising=False)
    monkeypatch.setattr(native, "_without_kernels", lambda device: f"no kernels for {device}")
    lines: list[str] = []
    monkeypatch.setattr(native.log, "warning", lambda text, *of: lines.append(text % of))
    native._warn.cache_clear()
    native.warn_without_kernels()
    for op in ("token_logprob", "reshard"):
        assert native.torch_ops(op, "cuda") is None
    ((title, reason, _, remedy),) = [text.splitlines() for text in lines]
    assert title == "WARNING: this GPU runs without rlcore's CUDA kernels"
    assert reason.endswith("no kernels for cuda") and "bash tools/setup.sh" in remedy
    assert torch.ops.rlcore_native.cuda_obstacle(0) != ""


def test_a_run_that_wants_no_kernels_is_not_warned(monkeypatch) -> None:
    monkeypatch.setenv("RLCORE_NATIVE", "0")
    monkeypatch.setattr(native, "_without_kernels", lambda device: f"no kernels for {device}")
    monkeypatch.setattr(native.log, "warning", lambda *_: pytest.fail("a warning"))
    native._warn.cache_clear()
    native.warn_without_kernels()
