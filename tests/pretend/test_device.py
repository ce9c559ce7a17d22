"""Programs of pytest that have the pretend device: its own checks, and tests/gpu."""

import subprocess
import sys

from tests import kit, pretend


def run_pytest(*args: str, mode: str = "real", timeout_s: float = 500.0) -> str:
    """Run pytest with the pretend device; return its output. AssertionError if a test fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *args],
        env=pretend.environment(mode),
        cwd=kit.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def test_the_device_notices_what_goes_wrong_on_a_gpu() -> None:
    assert "skipped" not in run_pytest("tests/pretend/device_checks.py")
