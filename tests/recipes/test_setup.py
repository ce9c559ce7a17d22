"""What tools/setup.sh says when it cannot go on. An installation itself is not covered: minutes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def setup(folder: Path, *flags: str, **env: str) -> tuple[int, str]:
    """Exit status and output of a set-up of an environment in `folder`."""
    command = ["bash", ROOT / "tools/setup.sh", *flags]
    env = os.environ | {"RLCORE_VENV": str(folder / "venv")} | env
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_an_unknown_flag_is_refused_with_the_flags_that_exist(tmp_path):
    rc, out = setup(tmp_path, "--tets")
    assert rc == 1
    assert "--tets: unknown flag" in out
    assert "--test" in out


def test_apex_needs_its_source(tmp_path):
    rc, out = setup(tmp_path, "--apex")
    assert rc == 1
    assert "--apex needs a value" in out


def test_a_python_that_is_too_old_is_refused(tmp_path):
    old = script(tmp_path / "old", "exit 1")
    rc, out = setup(tmp_path, RLCORE_PYTHON=old)
    assert rc == 1
    assert f"RLCORE_PYTHON={old}: not Python 3.11 to 3.14" in out
    assert not (tmp_path / "venv").exists()


def test_a_python_without_venv_is_told_what_to_install(tmp_path):
    bare = script(
        tmp_path / "bare", f'case "$2" in *ensurepip*) exit 1 ;; esac; exec {sys.executable} "$@"'
    )
    rc, out = setup(tmp_path, RLCORE_PYTHON=bare)
    assert rc == 1
    assert "(no venv or ensurepip): install its venv package" in out


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "notes.txt").touch()
    rc, out = setup(tmp_path)
    assert rc == 1
    assert "exists but is not an environment" in out
    assert (tmp_path / "venv" / "notes.txt").exists()


def _without_pip(folder: Path, ensurepip: str) -> Path:
    """An environment as an interrupted `python -m venv` leaves it, which writes down the repair."""
    (folder / "venv" / "bin").mkdir(parents=True)
    told = folder / "told"
    script(
        folder / "venv" / "bin" / "python",
        f"""case "$*" in
*ensurepip*) echo "$*" >>{told}; {ensurepip} ;;
*"pip --version"*) exit 1 ;;
*version_info*) exit 0 ;;
esac
exit 7  # what comes after is not tried""",
    )
    return told


def test_an_environment_without_pip_is_repaired(tmp_path):
    told = _without_pip(tmp_path, "exit 0")
    rc, out = setup(tmp_path)
    assert rc == 7
    assert "pip, which the environment lacks" in out
    assert told.read_text() == "-m ensurepip --upgrade\n"


def test_an_environment_whose_pip_cannot_be_repaired_is_named(tmp_path):
    _without_pip(tmp_path, "exit 1")
    rc, out = setup(tmp_path)
    assert rc == 1
    assert "has no pip, and ensurepip cannot install it; move the environment away" in out


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_the_environment_variables(tmp_path, flag):
    rc, out = setup(tmp_path, flag)
    assert rc == 0
    assert "RLCORE_TORCH_INDEX" in out
    assert "--sglang" in out
