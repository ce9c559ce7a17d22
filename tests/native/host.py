"""Builds and runs the programs of csrc/tests with g++ or clang++, nothing of Python or torch."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import kit

SANITIZED = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
STRICT = "-Wall -Wextra -Wconversion -Werror"


def build(folder: Path, sources: Sequence[str], flags: str = f"{SANITIZED} {STRICT}") -> Path:
    """The program that `sources` (below csrc/) make; skips where there is no compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    if "sanitize" in flags and "clang" not in os.path.basename(compiler):
        flags += " -static-libtsan" if "thread" in flags else " -static-libasan"
    csrc = kit.ROOT / "csrc"
    program = folder / Path(sources[-1]).stem
    files = [csrc / source for source in sources]
    command = [compiler, "-std=c++20", "-pthread", *flags.split(), f"-I{csrc}", *files]
    built = subprocess.run([*command, "-o", program], capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr[-4000:]
    return program


def cuda_tool(name: str, found: str | None) -> str:
    """`found`. Without it tests are skipped, but in `.ci/run`, where nothing else looks at CUDA,
    they fail."""
    if found is None:
        reason = f"no {name}: the CUDA sources are not compiled or not read"
        if os.environ.get("RLCORE_REQUIRE_NVCC") == "1":
            pytest.fail(f"{reason}; RLCORE_REQUIRE_NVCC=1 insists")
        pytest.skip(reason)
    return found


def run(program: Path, *arguments: Path) -> str:
    """What the program prints; AssertionError with its messages where it fails."""
    ran = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout
