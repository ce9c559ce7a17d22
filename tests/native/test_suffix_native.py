"""csrc/suffix without Python: its host test under address and undefined sanitizers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.native


def test_the_host_test_passes_under_address_and_undefined_sanitizers(tmp_path):
    """Brute force, batched walks and the device's body; about 30 s, nearly all of it to compile."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    names = ["suffix/build.cpp", "suffix/forest.cpp", "tests/suffix_test.cpp"]
    flags = "-std=c++20 -O1 -g -Wall -Wextra -Wconversion -Werror -fsanitize=address,undefined"
    flags += " -fno-sanitize-recover=all -static-libasan -pthread"
    if "clang" in os.path.basename(compiler):
        flags = flags.replace(" -static-libasan", "")
    program = tmp_path / "suffix_test"
    sources = [ROOT / "csrc" / name for name in names]
    command = [compiler, *flags.split(), f"-I{ROOT / 'csrc'}", *sources, "-o", program]
    built = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
