"""`pip install .`: what setup.py removes, the program `rlcore`, and, slowly, a whole wheel."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import setuptools
from setuptools import Distribution, Extension

from tests import runs

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMES = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}", "_C_torch.so"


@pytest.fixture
def shim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """setup.py over a checkout with built libraries, on a machine that compiles nothing."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    spec = importlib.util.spec_from_file_location("setup_shim", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path / "checkout")
    monkeypatch.setenv("RLCORE_NATIVE", "0")
    monkeypatch.chdir(tmp_path)  # setuptools takes it for the checkout
    for folder in (tmp_path / "checkout/rlcore", tmp_path / "build/rlcore"):
        folder.mkdir(parents=True)
        for name in NAMES:
            (folder / name).touch()
    return module


def build(shim: ModuleType, folder: Path, *, editable: bool) -> None:
    """What pip has setup.py do for the extension."""
    extension = Extension("rlcore._C", sources=[])
    command = shim.CMakeBuild(Distribution({"ext_modules": [extension]}))
    command.build_lib, command.editable_mode = str(folder), editable
    command.ensure_finalized()
    command.inplace = False  # as in its `run`
    command.build_extension(extension)


@pytest.mark.parametrize(("editable", "kept"), [(False, NAMES), (True, ())])
def test_only_an_editable_installation_removes_libraries_of_the_checkout(
    shim: ModuleType, tmp_path: Path, editable: bool, kept: tuple[str, ...]
) -> None:
    build(shim, tmp_path / "build", editable=editable)
    here = {p.name for p in (tmp_path / "checkout/rlcore").iterdir()}
    assert here == set(kept)
    assert not any((tmp_path / "build/rlcore").iterdir()), "a stale library would be in the wheel"


def test_a_build_that_insists_on_native_code_needs_torch(
    shim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_NATIVE", "1")
    monkeypatch.setattr(shim, "obstacle", lambda: "")
    monkeypatch.setattr(shim, "torch_folder", lambda: "")
    with pytest.raises(SystemExit, match="RLCORE_NATIVE=1: no torch"):
        build(shim, tmp_path / "build", editable=False)


def test_a_build_has_the_headers_of_the_torch_that_is_installed() -> None:
    pins = [
        [line for line in lines if line.startswith("torch==")]
        for lines in (PROJECT["build-system"]["requires"], PROJECT["project"]["dependencies"])
    ]
    assert len(pins[0]) == 1 and pins[0] == pins[1]


def test_the_program_rlcore_takes_the_words_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    value = PROJECT["project"]["scripts"]["rlcore"]
    program = EntryPoint("rlcore", value, "console_scripts").load()
    monkeypatch.setattr(sys, "argv", ["rlcore", "--help"])
    assert program() == 0 and "train a model" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["rlcore", "tarin"])
    assert program() == 2


@pytest.mark.slow  # compiles everything: two minutes of two cores
@pytest.mark.ranks(1)
@pytest.mark.timeout(1200)
def test_a_wheel_is_whole_and_its_program_trains_and_saves(tmp_path: Path) -> None:
    """In an environment that sees the packages of this one. The build is not isolated: torch would
    be unpacked again."""
    source, venv = tmp_path / "source", tmp_path / "venv"
    source.mkdir()
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    subprocess.run(["cp", "--parents", "-t", source, *files.stdout.split()], cwd=ROOT, check=True)
    for name in NAMES:
        (source / "rlcore" / name).write_text("of the checkout")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    made = ["wheel", ".", "--no-deps", "--no-index", "--no-build-isolation", "-w", tmp_path]
    env = os.environ | {"RLCORE_NATIVE": "1"}
    subprocess.run([*pip, *made], cwd=source, env=env, check=True)
    for name in NAMES:
        assert (source / "rlcore" / name).read_text() == "of the checkout"
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {f"rlcore/{name}" for name in NAMES} <= set(archive.namelist())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    (packages / "peers.pth").write_text(sysconfig.get_path("purelib") + "\n")
    into = ["--python", venv / "bin/python", "install", "--no-deps", "--no-index", wheel]
    subprocess.run([*pip, *into], check=True)
    model = runs.tiny_model(tmp_path / "model")
    one = "--run.steps", 1, "--checkpoint.every", 1
    argv = runs.arguments(model, tmp_path / "runs", "one", *one)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"RLCORE_NATIVE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    argv[argv.index("tests.scores.variety")] = "exact"  # the tests are not installed
    done = subprocess.run(
        [venv / "bin/rlcore", "train", *argv], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/one/checkpoints/step_000001/manifest.json").is_file()
