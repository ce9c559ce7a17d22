"""Shim: CMakeLists.txt is the build, this file calls it for `pip install`.

RLCORE_NATIVE=0 leaves the native part out, RLCORE_NATIVE=1 insists on it. Without either, a machine
that cannot compile (no C++ compiler, no Python headers) installs the Python part and says so.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

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


class CMakeBuild(build_ext):
    """One extension, `rlcore._C`, built by CMake and ninja."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        if why := obstacle():
            if os.environ.get("RLCORE_NATIVE") == "1":
                raise SystemExit(
                    f"RLCORE_NATIVE=1: {why}; install it, or leave RLCORE_NATIVE unset"
                )
            (ROOT / "rlcore" / target.name).unlink(missing_ok=True)  # it would be stale
            ext.optional = True  # or setuptools misses the file
            print(f"native build: left out ({why})", flush=True)
            return
        import ninja
        import pybind11

        # A CMake cache holds the paths of the source and of the environment that configured it.
        where = hashlib.sha256(f"{ROOT} {sys.prefix}".encode()).hexdigest()[:8]
        build = ROOT / "build" / f"native-{sys.implementation.cache_tag}-{where}"
        configure = [
            "-G",
            "Ninja",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('RLCORE_BUILD_TYPE', 'Release')}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ]
        cmake = [sys.executable, "-m", "cmake"]
        for step in (["-S", str(ROOT), "-B", str(build), *configure], ["--build", str(build)]):
            if subprocess.run([*cmake, *step]).returncode:
                raise SystemExit(
                    "the native build failed, see above; RLCORE_NATIVE=0 leaves it out"
                )
        print(f"native build: {target.name}", flush=True)


setup(
    ext_modules=[Extension("rlcore._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
