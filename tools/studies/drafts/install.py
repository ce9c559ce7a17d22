"""The Python of the peers: `.venvs/drafts`, made on the first call, each part on its own.

A part that cannot be had leaves its reason; the peers that need it are then skipped with it.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".venvs" / "drafts"
ARCTIC = "arctic-inference==0.3.0"
SGLANG = "sglang==0.5.23"
BASE = ("numpy==2.4.6", "numba==0.68.1")
BUILD = ("nanobind==2.9.2", "cmake==4.4.4", "ninja==1.13.2")  # nanobind as arctic pins it
REST = ("draftretriever==0.1.1",)
PEERS = {"arctic": "arctic", "sglang": "sglang", "rest": "rest"}
"""Part by the head of the peer's name; all others need the base alone."""


def python(timeout_s: float) -> Path:
    """The environment's Python with the base in it. RuntimeError: it cannot be had."""
    path = FOLDER / "bin" / "python"
    if not path.exists():
        _call([sys.executable, "-m", "venv", str(FOLDER)], timeout_s)
    _once("base", " ".join(BASE), lambda: _pip(BASE, timeout_s))
    return path


def part(peer: str, timeout_s: float) -> None:
    """What `peer` needs beside the base. RuntimeError: why it cannot be had, in one line."""
    makers: dict[str, tuple[str, Callable[[], None]]] = {
        "arctic": (ARCTIC, lambda: _arctic(timeout_s)),
        "sglang": (SGLANG, lambda: _sglang(timeout_s)),
        "rest": (REST[0], lambda: _pip(REST, timeout_s)),
    }
    name = PEERS.get(peer.partition("-")[0])
    if name:
        wanted, make = makers[name]
        _once(name, wanted, make)


def _once(name: str, wanted: str, make: Callable[[], None]) -> None:
    stamp = FOLDER / f"{name}.stamp"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"installing {wanted} into {FOLDER.relative_to(ROOT)} ...", file=sys.stderr, flush=True)
    make()
    stamp.write_text(wanted)


def _arctic(timeout_s: float) -> None:
    """Build suffix_decoding alone: the rest of the package wants CUDA and vLLM."""
    _pip(BUILD, timeout_s)
    sources = _fresh("arctic")
    # Its setup.py imports torch to name its version: this Python has one, the peers' has none.
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    plain = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    _call([*pip, *plain, "--dest", str(sources), ARCTIC], timeout_s)
    with tarfile.open(next(sources.glob("*.tar.gz"))) as archive:
        archive.extractall(sources, filter="data")
    root = next(path for path in sources.iterdir() if path.is_dir())
    binaries, build = FOLDER / "bin", sources / "build"
    configure = [str(binaries / "cmake"), "-S", str(root / "csrc" / "suffix_decoding")]
    configure += ["-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={binaries / 'ninja'}"]
    configure += [f"-DPython_EXECUTABLE={binaries / 'python'}"]
    _call(configure, timeout_s)
    _call([str(binaries / "cmake"), "--build", str(build)], timeout_s)
    package = _site_packages() / "arctic_inference"
    shutil.copytree(
        root / "arctic_inference" / "suffix_decoding",
        package / "suffix_decoding",
        dirs_exist_ok=True,
    )
    shutil.copy(root / "LICENSE", package)
    shutil.copy(next(build.glob("_C*.so")), package / "suffix_decoding")


def _sglang(timeout_s: float) -> None:
    """Compile its trie and automaton behind the C functions of sgl_ngram.cpp."""
    sources = _fresh("sglang")
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "download", "--disable-pip-version-check"]
    _call([*pip, "--quiet", "--no-deps", "--dest", str(sources), SGLANG], timeout_s)
    wheel = next(sources.glob("*.whl"))
    inside = "sglang/kernels/jit/csrc/ngram_corpus/"
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith(inside) and n.endswith((".h", "pp"))]
        archive.extractall(sources, names)
    wheel.unlink()
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++, clang++ or CXX)")
    theirs = [
        sources / inside / f"{n}.cpp" for n in ("ngram", "result", "suffix_automaton", "trie")
    ]
    command = [compiler, "-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-pthread", "-w"]
    command += [f"-I{sources / inside}", str(Path(__file__).with_name("sgl_ngram.cpp"))]
    command += [*map(str, theirs), "-o", str(FOLDER / "libsgl_ngram.so")]
    _call(command, timeout_s)


def _fresh(name: str) -> Path:
    folder = FOLDER / "src" / name
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _site_packages() -> Path:
    return next((FOLDER / "lib").glob("python3*/site-packages"))


def _pip(requirements: tuple[str, ...], timeout_s: float) -> None:
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    _call([*pip, "--quiet", *requirements], timeout_s)


def _call(command: list[str], timeout_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{Path(command[0]).name}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it says nothing"]
        errors = [line for line in said if "rror" in line]
        raise RuntimeError(f"{' '.join(command[1:4])}: {(errors or said)[-1].strip()}")
