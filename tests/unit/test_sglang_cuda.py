"""The environment of SGLang's processes on a CUDA machine, with stand-ins for CUDA 99."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlcore.rollout.sglang_engine import cuda, server


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def toolkit(home: Path, release: str = "99.0") -> Path:
    """A folder that looks like a CUDA toolkit."""
    program(home / "bin/nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.1'")
    (home / "lib64").mkdir()
    (home / "lib64/libcudart.so").touch()
    return home


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """NVIDIA's wheels in a site folder, as set-up completes them; the library is a real one."""
    home = toolkit(tmp_path / "site/nvidia/cu99")
    (home / "lib").mkdir()
    source = tmp_path / "empty.c"
    source.touch()
    library = home / "lib/libcudart.so.99"
    subprocess.run(["cc", "-shared", source, "-o", library], check=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return home


@pytest.fixture
def env(tmp_path) -> dict[str, str]:
    """An environment with a compiler and ninja, and without nvcc."""
    for name in ("c++", "ninja"):
        program(tmp_path / "bin" / name, "")
    return {"PATH": str(tmp_path / "bin")}


def test_the_library_of_the_wheels_is_the_first_that_a_new_process_finds(wheels, env):
    env["LD_LIBRARY_PATH"] = f"/elsewhere:{wheels / 'lib'}"
    cuda.prepare(env, "99.0")
    assert env["LD_LIBRARY_PATH"] == f"{wheels / 'lib'}:/elsewhere"
    code = "import ctypes; ctypes.CDLL('libcudart.so.99')"
    subprocess.run([sys.executable, "-S", "-c", code], env=env, check=True)


def test_the_older_layout_of_the_wheels_is_known(wheels):
    wheels.rename(wheels.with_name("cuda_runtime"))
    assert cuda.wheel_toolkit("99") == wheels.with_name("cuda_runtime")
    assert cuda.wheel_toolkit("98") is None


def test_a_library_that_does_not_load_is_told_before_the_start(env):
    with pytest.raises(ValueError, match=r"cannot load libcudart\.so\.99 .*setup\.sh"):
        cuda.prepare(env, "99.0")
    assert "LD_LIBRARY_PATH" not in env


def test_the_engine_of_a_gpu_starts_with_this_environment(wheels, env, monkeypatch):
    monkeypatch.setattr(os, "environ", env)
    monkeypatch.setattr("torch.version.cuda", "99.0")
    monkeypatch.setattr(server.metadata, "entry_points", lambda **_: ["the plug-in"])
    env |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    env["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64,expandable_segments:True"
    env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    server.set_environment("cuda", 1, "127.0.0.1:4567")
    assert env["LD_LIBRARY_PATH"] == str(wheels / "lib")
    assert env["CUDA_HOME"] == str(wheels)
    # what Megatron and the user's learner want
    assert not {"CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG"} & env.keys()
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "PYTORCH_ALLOC_CONF" not in env
    # where the ranks meet, as clients
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "4567")
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    # compiled code outlives the temporary folder of the engine
    assert env["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{tempfile.gettempdir()}/torchinductor_")


def test_a_toolkit_that_sglang_would_find_is_kept_if_it_is_of_the_right_version(
    tmp_path, wheels, env
):
    mine, old = toolkit(tmp_path / "mine"), toolkit(tmp_path / "old", "12.4")
    assert cuda.toolkit(env | {"CUDA_HOME": str(mine)}, "99", wheels) == mine
    assert cuda.toolkit(env | {"CUDA_PATH": str(mine)}, "99", wheels) == mine
    assert cuda.toolkit(env | {"PATH": f"{mine}/bin"}, "99", wheels) == mine
    assert cuda.toolkit(env | {"CUDA_HOME": str(old)}, "99", wheels) == wheels
    assert cuda.toolkit(env, "99", wheels) == wheels


def test_a_missing_nvcc_is_told_with_where_it_was_sought(tmp_path, env):
    old, bare = toolkit(tmp_path / "old", "12.4"), toolkit(tmp_path / "bare")
    (bare / "lib64/libcudart.so").unlink()
    env |= {"CUDA_HOME": str(old), "PATH": f"{bare}/bin"}
    with pytest.raises(ValueError) as error:
        cuda.toolkit(env, "99", tmp_path / "none")
    for part in (
        "nvcc of CUDA 99",
        f"{old}: nvcc is of CUDA 12.4",
        f"{bare}: no lib64/libcudart.so",
        f"{tmp_path / 'none'}: no bin/nvcc",
        "bash tools/setup.sh --sglang",
    ):
        assert part in str(error.value)


def test_a_missing_host_compiler_is_told(tmp_path, wheels, env):
    (tmp_path / "bin/c++").unlink()
    with pytest.raises(ValueError, match=r"C\+\+ compiler c\+\+ is not on PATH; install one"):
        cuda.prepare(env, "99.0")
    cuda.prepare(env | {"CXX": str(program(tmp_path / "clang", ""))}, "99.0")


def test_ninja_of_an_environment_that_is_not_activated_is_on_the_path(tmp_path, wheels, env):
    cuda.prepare(env, "99.0")
    assert env["PATH"] == str(tmp_path / "bin")
    (tmp_path / "bin/ninja").unlink()
    cuda.prepare(env, "99.0")
    assert env["PATH"] == f"{tmp_path / 'bin'}:{Path(sys.executable).parent}"
