"""`rlcore recipe`: the list, and copies that run without a checkout, also out of a wheel."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rlcore.cli import recipe
from tests import runs
from tests.recipes.conftest import RECIPES

NAMES = sorted(path.stem for path in RECIPES.glob("*_*.sh"))
REPAIR = "activate the environment in which rlcore is installed, or set PYTHON to its Python"


def test_the_list_has_a_line_for_every_recipe(capsys) -> None:
    assert recipe.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert all(len(line) <= 100 and len(line.split()) > 4 for line in lines), lines
    assert "dapo_32b             DAPO on Qwen2.5-32B, 8 nodes of 8 GPUs of 80 GB" in lines


def test_a_long_first_sentence_ends_before_its_colon(tmp_path) -> None:
    file = tmp_path / "a.sh"
    file.write_text(
        "#!/usr/bin/env bash\n__doc__=r'''One 0.5B\ntask: " + "word " * 20 + ". X.\n'\n"
    )
    assert recipe.purpose(file) == "One 0.5B task"


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_has_the_files_that_it_reads_and_starts_without_the_checkout(
    bench, monkeypatch, capsys, name
) -> None:
    monkeypatch.chdir(bench.folder)
    assert recipe.main(["copy", name]) == 0
    *files, last = capsys.readouterr().out.splitlines()
    copied = sorted(p.as_posix() for p in Path("recipes").rglob("*") if p.is_file())
    assert sorted(files) == copied and last.endswith(f"bash recipes/{name}.sh")
    if name == "grpo_1gpu":  # asks the program itself which model fits, before launch
        rc, out = bench.run("bash", f"recipes/{name}.sh", "--dry-run", PYTHONPATH=str(runs.ROOT))
        assert rc == 0 and "dry run: would run" in out, out
        return
    rc, out = bench.run("bash", f"recipes/{name}.sh", "--dry-run")
    assert rc == 0, out
    [record] = bench.records()
    assert record["env"]["PYTHONPATH"] == bench.env["PYTHONPATH"]
    facts = Path(record["env"]["MODEL_CONFIG"])
    assert facts.is_file() and facts.is_relative_to(bench.folder)
    for text in map(Path.read_text, map(Path, files)):
        for path in re.findall(r'"\$RECIPES/([\w./]+)"', text):
            assert (bench.folder / "recipes" / path).is_file(), path


def test_a_copy_without_rlcore_says_what_to_do(bench) -> None:
    recipe.copy("grpo_tiny", bench.folder / "mine")
    bare = bench.folder / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without installed packages
    bare.chmod(0o755)
    rc, out = bench.run("bash", "mine/grpo_tiny.sh", PYTHON=str(bare), PYTHONPATH="")
    assert rc == 2 and len(out.splitlines()) == 1
    assert f"{bare} has no rlcore, torch," in out and REPAIR in out
    rc, out = bench.run("bash", "mine/grpo_tiny.sh", PYTHON="", PATH="/usr/bin:/bin")
    assert rc == 2 and len(out.splitlines()) == 1 and REPAIR in out


def test_the_command_names_the_python_if_another_is_active(monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert recipe.start(Path("a b/x.sh")) == "bash 'a b/x.sh'"
    monkeypatch.setenv("PATH", "")
    assert recipe.start(Path("x.sh")) == f"PYTHON={sys.executable} bash x.sh"


def test_an_unknown_name_is_refused_with_those_that_exist(tmp_path, capsys) -> None:
    assert recipe.main(["copy", "grpo_tniy", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rlcore recipe copy grpo_tniy: there is no such recipe; known: agentic_")
    assert said.count("\n") == 1 and all(name in said for name in NAMES) and "common" not in said
    assert not list(tmp_path.iterdir())


def test_a_copy_overwrites_nothing(tmp_path, capsys) -> None:
    changed = tmp_path / "common.sh"
    changed.write_text("mine\n")
    assert recipe.main(["copy", "grpo_tiny", str(tmp_path)]) == 2
    assert f"{changed} would be overwritten; give another FOLDER" in capsys.readouterr().err
    assert changed.read_text() == "mine\n" and list(tmp_path.iterdir()) == [changed]


def test_a_second_recipe_joins_the_first(tmp_path) -> None:
    for name in ("grpo_tiny", "code_tiny.sh"):
        recipe.copy(name, tmp_path)
    assert {p.name for p in tmp_path.glob("*_tiny.sh")} == {"grpo_tiny.sh", "code_tiny.sh"}


@pytest.mark.ranks(2)
def test_a_wheel_has_the_recipes_and_a_copy_of_one_trains(tmp_path: Path) -> None:
    """In an environment that sees the packages of this one, but not the checkout."""
    source, venv, empty = tmp_path / "source", tmp_path / "venv", tmp_path / "empty"
    source.mkdir()
    empty.mkdir()
    names = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt")
    files = subprocess.run(
        ["git", "ls-files", "rlcore", "recipes", *names],
        cwd=runs.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    subprocess.run(["cp", "--parents", "-t", source, *files.stdout.split()], cwd=runs.ROOT)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    made = ["wheel", ".", "--no-deps", "--no-index", "--no-build-isolation", "-w", tmp_path]
    subprocess.run([*pip, *made], cwd=source, env=os.environ | {"RLCORE_NATIVE": "0"}, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    (packages / "peers.pth").write_text(sysconfig.get_path("purelib") + "\n")
    into = ["--python", venv / "bin/python", "install", "--no-deps", "--no-index", wheel]
    subprocess.run([*pip, *into], check=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHON")}
    env |= {"PATH": f"{venv / 'bin'}:{env['PATH']}", "CUDA_VISIBLE_DEVICES": ""}

    def run(*command: object) -> str:
        words = list(map(str, command))
        done = subprocess.run(words, cwd=empty, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert [line.split()[0] for line in run("rlcore", "recipe", "list").splitlines()] == NAMES
    assert run("rlcore", "recipe", "copy", "grpo_tiny").endswith(
        "run it: bash recipes/grpo_tiny.sh\n"
    )
    assert "dry run: would run" in run("bash", "recipes/grpo_tiny.sh", "--dry-run")
    where = run("python", "-c", "import rlcore; print(rlcore.__file__)")
    assert Path(where.strip()).is_relative_to(packages)
    model = runs.tiny_model(tmp_path / "model")
    argv = runs.arguments(model, empty / "runs", "one", "--run.steps", 1)
    argv[argv.index("tests.scores.variety")] = "exact"  # the tests are not installed
    run("bash", "recipes/grpo_tiny.sh", *argv, "--train.samples_per_update", 0)
    assert list(runs.rows(empty / "runs" / "one")) == [0, 1]
