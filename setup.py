"""Shim: CMakeLists.txt is the build, this file calls it for `pip install`.

RLCORE_NATIVE=0 leaves the native part out, RLCORE_NATIVE=1 insists on it. Without either, a machine
that cannot compile (no C++ compiler, no Python headers) installs the Python part and says so.
RLCORE_CUDA=0 leaves the CUDA kernels out, RLCORE_CUDA=1 insists on them; else they are built where
nvcc is and torch is a CUDA build. RLCORE_CUDA_ARCHS is CMake's list of architectures. The ops of
torch need its headers. `pip install .` unpacks the pinned torch for the build; with
`--no-build-isolation`, as tools/setup.sh has it, they are those of the environment.

The folder recipes/ is installed as rlcore/recipes, which `rlcore recipe` reads outside a checkout.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def obstacle() -> str:
    """Why the native part is not built; "" if it is."""
    if os.environ.get("RLCORE_NATIVE") == "0":
        return "RLCORE_NATIVE=0"
    if not any(shutil.which(c) for c in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if c):
        return "no C++ compiler found"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"no Python headers in {sysconfig.get_path('include')}"
    return ""


def torch_folder() -> str:
    """The torch package whose headers are used; "" if there is none. torch is not imported."""
    spec = importlib.util.find_spec("torch")
    return str(Path(spec.origin).parent) if spec and spec.origin else ""


def cuda() -> tuple[str, str]:
    """CMake's RLCORE_CUDA, and why it is OFF without having been told so."""
    names = {"0": "OFF", "1": "ON", "": "AUTO"}
    wanted = os.environ.get("RLCORE_CUDA", "")
    if wanted not in names:
        raise SystemExit(f"RLCORE_CUDA={wanted}: 0, 1, or leave it unset")
    version = Path(torch_folder()) / "version.py"
    of_torch = version.read_text() if version.is_file() else ""
    # Nothing else would use the kernels, and to compile them takes longer than all the rest.
    if not wanted and re.search(r"^cuda\b.*= None", of_torch, re.M):
        return "OFF", ": torch is a CPU build, RLCORE_CUDA=1 makes them nonetheless"
    return names[wanted], ""


class PythonBuild(build_py):
    """The packages, and the recipes as the folder rlcore/recipes."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the checkout has them
            return
        target = Path(self.build_lib) / "rlcore" / "recipes"
        shutil.rmtree(target, ignore_errors=True)  # an earlier build may have left other files
        no_pages = shutil.ignore_patterns("__pycache__", "*.md")  # their links need the checkout
        shutil.copytree(ROOT / "recipes", target, ignore=no_pages)


class CMakeBuild(build_ext):
    """`rlcore._C` and, where torch is, `rlcore/_C_torch.so`, built by CMake and ninja."""

    def remove_stale(self, built: Path) -> None:
        """Remove an earlier build's library where this one would have put it: in the build folder,
        and in the checkout of an editable installation. Other installations use neither."""
        built.unlink(missing_ok=True)
        if self.editable_mode:
            (ROOT / "rlcore" / built.name).unlink(missing_ok=True)

    def copy_to_source(self, library: Path) -> None:
        """Copy a library that setuptools does not know into the checkout."""
        fresh = ROOT / "rlcore" / f".{library.name}.new"
        shutil.copy2(library, fresh)
        fresh.replace(ROOT / "rlcore" / library.name)  # a running program keeps the old one

    def copy_extensions_to_source(self) -> None:
        """After `build_ext --inplace`: copy the libraries into the checkout."""
        super().copy_extensions_to_source()
        library = Path(self.build_lib) / "rlcore" / "_C_torch.so"
        if library.is_file():
            self.copy_to_source(library)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        library = target.parent / "_C_torch.so"
        insists = os.environ.get("RLCORE_NATIVE") == "1"
        if why := obstacle():
            if insists:
                raise SystemExit(
                    f"RLCORE_NATIVE=1: {why}; install it, or leave RLCORE_NATIVE unset"
                )
            self.remove_stale(target)
            self.remove_stale(library)
            ext.optional = True  # or setuptools misses the file
            print(f"native build: left out ({why})", flush=True)
            return
        if insists and not torch_folder():
            raise SystemExit(
                "RLCORE_NATIVE=1: no torch in the environment of the build; install it"
            )
        import ninja
        import pybind11

        with_cuda, why_not = cuda()
        # A CMake cache holds the paths of the source, of the environment that configured it, and of
        # its compilers.
        compilers = [os.environ.get("CXX"), os.environ.get("CUDACXX")]
        where = hashlib.sha256(f"{ROOT} {sys.prefix} {compilers}".encode()).hexdigest()[:8]
        build = ROOT / "build" / f"native-{sys.implementation.cache_tag}-{where}"
        configure = [
            "-G",
            "Ninja",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('RLCORE_BUILD_TYPE', 'Release')}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DRLCORE_TORCH={torch_folder()}",
            f"-DRLCORE_CUDA={with_cuda}",
        ]
        archs = os.environ.get("RLCORE_CUDA_ARCHS")
        # Without one, CMakeLists.txt's own, not what an earlier build has left in the cache.
        configure.append(f"-DRLCORE_CUDA_ARCHS={archs}" if archs else "-URLCORE_CUDA_ARCHS")
        cmake = [sys.executable, "-m", "cmake"]
        for step in (["-S", str(ROOT), "-B", str(build), *configure], ["--build", str(build)]):
            if subprocess.run([*cmake, *step]).returncode:
                raise SystemExit(
                    "the native build failed, see above; RLCORE_CUDA=0 leaves out the kernels, "
                    "RLCORE_NATIVE=0 all of it"
                )
        parts = [target.name]
        if torch_folder():
            kernels = (build / "cuda.txt").read_text().strip()  # CMakeLists.txt: what took part
            parts.append(f"{library.name} ({kernels}{why_not})")
            if self.editable_mode:
                self.copy_to_source(library)
        else:
            self.remove_stale(library)
            parts.append(f"no {library.name}: no torch in the environment of the build")
        print(f"native build: {', '.join(parts)}", flush=True)


setup(
    ext_modules=[Extension("rlcore._C", sources=[])],
    cmdclass={"build_py": PythonBuild, "build_ext": CMakeBuild},
)
