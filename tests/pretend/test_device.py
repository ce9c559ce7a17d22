"""Programs of pytest that have the pretend device: its own checks, and tests/gpu."""

import subprocess
import sys

import pytest

from tests import kit, pretend
from tests.pretend import mutants

pytestmark = pytest.mark.timeout(2400)

NATIVE = "ops", "loss", "reshard", "suffix"
LONG_CASES = "not sampled_tokens and not every_shape and not fused_loss and not 151936"
SLOW = (
    "memory",
    "judge",
    "teacher",
    "learner",
    "checkpoint",
    "engine",
    "push",
    "contract",
    "attention",
    "offload",
    "train",
)


def run_pytest(*args: str, mode: str = "real") -> str:
    """Run pytest with the pretend device; return its output. AssertionError if a test fails."""
    options = "-q", "-rfEs", "-p", "no:xdist", "-p", "no:cacheprovider", "--timeout", "1200"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *args],
        env=pretend.environment(mode),
        cwd=kit.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2300,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def test_the_device_notices_what_goes_wrong_on_a_gpu() -> None:
    assert "skipped" not in run_pytest("tests/pretend/device_checks.py")


def test_large_tensors_have_sizes_alone_in_the_mode_for_it() -> None:
    assert "skipped" not in run_pytest("tests/pretend/sizes_checks.py", mode="sizes")


def test_states_and_activations_in_host_memory_change_no_bit() -> None:
    fewer = "not qwen3_moe and not float32 and not bfloat16-False"
    assert "skipped" not in run_pytest("tests/gpu/test_offload.py", "-k", fewer)


@pytest.mark.slow  # tools/gpu_check.sh runs a part of them
@pytest.mark.native
def test_native_kernels_have_their_wrappers_on_the_device() -> None:
    files = [f"tests/gpu/test_{name}.py" for name in NATIVE]
    run_pytest("-p", "tests.pretend.native", "-k", LONG_CASES, *files)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_what_needs_no_real_kernel_of_tests_gpu_passes(name: str) -> None:
    assert " passed" in run_pytest(f"tests/gpu/test_{name}.py")


@pytest.mark.slow
def test_faults_of_cuda_programs_are_caught() -> None:
    assert mutants.main([]) == 0
