"""Environment of SGLang's processes on CUDA: libraries and compilers that they need at run time.

SGLang preloads its memory saver into every scheduler and compiles kernels at the first forward. If
the runtime library is missing, a scheduler exits before it runs any Python. If a compiler is
missing, the error comes only after minutes. So `prepare` checks library and compilers first.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

from rlcore.utils import cuda_allocator
from rlcore.utils.errors import ConfigError

_LEARNERS = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG")
"""Variables that the rank sets for Megatron; in SGLang they would only cost speed or memory."""
_CHECK_S = 60.0  # timeout of the programs run as checks
_SYSTEM = "/usr/local/cuda"


def prepare(env: MutableMapping[str, str], version: str) -> None:
    """Remove the learner's settings from the environment of SGLang's processes, and set the
    variables with which they find libraries and compilers. `version`: torch's CUDA version.

    Raises:
        ConfigError: a library or a compiler is missing; the message says what to install.
    """
    for name in _LEARNERS:
        env.pop(name, None)
    cuda_allocator.remove_expandable(env)  # the memory saver raises an error with them
    major = version.partition(".")[0]
    set_runtime(env, major)
    set_toolkit(env, major)
    set_compiler(env)


def set_runtime(env: MutableMapping[str, str], major: str) -> str:
    """Let processes with this environment find the CUDA runtime library. Return its name.

    Raises:
        ConfigError: such a process cannot load the library.
    """
    wheels = wheel_toolkit(major)
    if wheels is not None:
        _prepend(env, "LD_LIBRARY_PATH", str(wheels / "lib"))
    _check_runtime(env, major)
    return f"libcudart.so.{major}"


def set_toolkit(env: MutableMapping[str, str], major: str) -> str:
    """Set CUDA_HOME to the toolkit to compile with, and return it. Raise ConfigError if there is
    none."""
    env["CUDA_HOME"] = str(toolkit(env, major, wheel_toolkit(major)))
    return env["CUDA_HOME"]


def set_compiler(env: MutableMapping[str, str]) -> str:
    """Check that the C++ compiler is on PATH, add ninja, and return the compiler's path.

    Raises:
        ConfigError: there is no compiler.
    """
    compiler = (env.get("CXX") or "c++").split()[0]
    found = shutil.which(compiler, path=env.get("PATH"))
    if found is None:
        raise ConfigError(
            f"--rollout.engine sglang: SGLang compiles kernels at run time, and the C++ compiler "
            f"{compiler} is not on PATH; install one on every node with GPUs (Debian and Ubuntu: "
            "apt install g++), or set CXX to its path"
        )
    if shutil.which("ninja", path=env.get("PATH")) is None:  # ninja is in Python's bin folder
        env["PATH"] = os.pathsep.join(filter(None, (env.get("PATH"), _scripts())))
    return found


def wheel_toolkit(major: str) -> Path | None:
    """Return the folder of NVIDIA's wheels with `lib/libcudart.so` of this major version, or None
    if there is no such folder."""
    spec = importlib.util.find_spec("nvidia")
    for site in (spec and spec.submodule_search_locations) or ():
        for name in (f"cu{major}", "cuda_runtime"):
            if (Path(site) / name / "lib" / f"libcudart.so.{major}").exists():
                return Path(site) / name
    return None


def toolkit(env: MutableMapping[str, str], major: str, wheels: Path | None) -> Path:
    """Return the folder of the first complete CUDA toolkit: environment, PATH, system or wheels.

    Raises:
        ConfigError: no toolkit has an nvcc of this major version and the CUDA runtime library.
    """
    nvcc = shutil.which("nvcc", path=env.get("PATH"))
    homes = [env.get("CUDA_HOME"), env.get("CUDA_PATH"), nvcc and str(Path(nvcc).parent.parent)]
    homes += [_SYSTEM, str(wheels) if wheels else None]
    tried = []
    for home in dict.fromkeys(filter(None, homes)):
        problem = _lacks(Path(home), major)
        if not problem:
            return Path(home)
        tried.append(f"{home}: {problem}")
    raise ConfigError(
        "--rollout.engine sglang: SGLang compiles kernels at run time and needs the compiler nvcc "
        f"of CUDA {major} ({'; '.join(tried)}); run bash tools/setup.sh --sglang, which installs "
        f"one, or install the CUDA {major} toolkit and set CUDA_HOME to its folder"
    )


def _lacks(home: Path, major: str) -> str:
    """Return what a CUDA toolkit lacks to build for this major version; "" if it is complete."""
    nvcc = home / "bin" / "nvcc"
    if not nvcc.exists():
        return "no bin/nvcc"
    try:
        command = [str(nvcc), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvcc does not run, {error}"
    found = re.search(r"release (\d+)\.\d+", done.stdout)
    if not found:
        return "nvcc prints no version"
    if found[1] != major:
        return f"nvcc is of CUDA {found[0].removeprefix('release ')}"
    if not (home / "lib64" / "libcudart.so").exists():
        return "no lib64/libcudart.so"
    return ""


def _check_runtime(env: MutableMapping[str, str], major: str) -> None:
    """Raise ConfigError unless a new process with this environment can load CUDA's runtime
    library."""
    name = f"libcudart.so.{major}"
    command = [sys.executable, "-I", "-S", "-c", f"import ctypes; ctypes.CDLL({name!r})"]
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=_CHECK_S)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(
            f"--rollout.engine sglang: SGLang's processes cannot load {name} ({why}); run bash "
            "tools/setup.sh --sglang, or add the folder that has it to LD_LIBRARY_PATH"
        )


def _prepend(env: MutableMapping[str, str], name: str, folder: str) -> None:
    """Put a folder first in a path variable, and remove its other occurrences."""
    rest = [part for part in env.get(name, "").split(os.pathsep) if part and part != folder]
    env[name] = os.pathsep.join([folder, *rest])


def _scripts() -> str:
    """Return the folder with the programs of the running Python environment."""
    return str(Path(sys.executable).parent)
