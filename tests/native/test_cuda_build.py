"""Every CUDA source compiles for every architecture we name, without warnings, spills or too many
registers. What it computes is checked elsewhere: on the host in csrc/tests, on a GPU in tests/gpu.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native import host

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cu"))
ARCHITECTURES = "80", "90a", "100a"
SHORT = "90a"
MAX_REGISTERS = 128
"""Half of a thread's 255: two blocks of 256 threads fit a multiprocessor."""
FLAGS = (
    "-std=c++20 -O3 --expt-relaxed-constexpr -Werror all-warnings -Xptxas -v,-warn-spills -cubin"
)

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def nvcc() -> str:
    return host.cuda_tool("nvcc on PATH", shutil.which("nvcc"))


def kernels(report: str) -> dict[str, tuple[int, int]]:
    """Bytes spilled and registers used per function, from ptxas -v."""
    found: dict[str, tuple[int, int]] = {}
    name, spilled = "", 0
    for line in report.splitlines():
        if match := re.search(r"Function properties for (\S+)", line):
            name = match.group(1)
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(match.group(1)) + int(match.group(2))
        elif match := re.search(r"Used (\d+) registers", line):
            found[name] = (spilled, int(match.group(1)))
    return found


def test_the_report_of_ptxas_is_read() -> None:
    report = """
ptxas info    : Function properties for _Z1fv
    24 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
"""
    assert kernels(report) == {"_Z1fv": (12, 40)}


def test_the_build_lists_every_source() -> None:
    listed = (ROOT / "CMakeLists.txt").read_text()
    assert SOURCES
    for source in [*SOURCES, *(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cpp"))]:
        assert source in listed or "/tests/" in source, f"{source} is in no target"


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "arch", [a if a == SHORT else pytest.param(a, marks=pytest.mark.slow) for a in ARCHITECTURES]
)
def test_a_source_compiles_without_warnings_and_spills(
    nvcc: str, source: str, arch: str, tmp_path: Path
) -> None:
    command = [nvcc, *FLAGS.split(), f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    command += [f"-I{ROOT / 'csrc'}", str(ROOT / source), "-o", str(tmp_path / "out.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"sm_{arch}:\n{said[-4000:]}"
    found = kernels(said)
    assert found, f"sm_{arch}: no kernel in {source}:\n{said}"
    for name, (spilled, registers) in found.items():
        assert spilled == 0, f"sm_{arch} {name}: {spilled} bytes spilled"
        assert registers <= MAX_REGISTERS, f"sm_{arch} {name}: {registers} registers"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_library_with_the_kernels_links_and_loads(nvcc: str, tmp_path: Path) -> None:
    """The set-up leaves them out where torch is a CPU build."""
    import ninja
    import pybind11
    import torch

    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_LIBRARY_OUTPUT_DIRECTORY": tmp_path / "out",
        "CMAKE_MAKE_PROGRAM": Path(ninja.BIN_DIR) / "ninja",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "RLCORE_TORCH": Path(torch.__file__).parent,
        "RLCORE_CUDA": "ON",
    }
    cmake, build = [sys.executable, "-m", "cmake"], tmp_path / "build"
    flags = [f"-D{name}={value}" for name, value in options.items()]
    for step in (["-G", "Ninja", "-S", ROOT, "-B", build, *flags], ["--build", build]):
        done = subprocess.run([*cmake, *step], capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "kernels for 80;90-real;100" in (build / "cuda.txt").read_text()
    [library] = (tmp_path / "out").glob("_C_torch*")
    load = f"import torch; torch.ops.load_library({str(library)!r})"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
