"""tools/gpu_wheels.sh, with small wheels of the tests in place of a package index."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import kit

PYPROJECT = """
[build-system]
requires = ["builder>=2", "torch==9.9.0"]
[project]
dependencies = ["torch==9.9.0", "alpha==1.0", "tensorboard~=2.0"]
[project.optional-dependencies]
test = ["pytest~=9.2"]
"""
WHEELS = {
    "alpha-1.0-cp312-cp312-manylinux_2_17_x86_64": [
        "beta>=2",
        "torch>=2.6",
        "winonly; sys_platform == 'win32'",
        "old; python_version < '3.12'",
        "more; extra == 'all'",
    ],
    "alpha-1.0-cp311-cp311-manylinux_2_17_x86_64": [],
    "alpha-2.0-py3-none-any": [],
    "beta-2.5-py3-none-any": ["alpha"],
    "builder-2.1-py3-none-any": [],
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose tests/gpu imports torch, pytest and alpha, and a folder of wheels."""
    root = tmp_path / "checkout"
    (root / "tests" / "gpu").mkdir(parents=True)
    (root / "tests" / "gpu" / "test_a.py").write_text("import alpha\nimport pytest\nimport torch\n")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "tools").mkdir()
    for name in ("gpu_wheels.sh", "gpu_wheels.py", "gpu_needs.py"):
        shutil.copy(kit.ROOT / "tools" / name, root / "tools")
    (tmp_path / "index").mkdir()
    for stem, needs in WHEELS.items():
        name, version, *tags = stem.split("-")
        info = f"{name}-{version}.dist-info"
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        with zipfile.ZipFile(tmp_path / "index" / f"{stem}.whl", "w") as wheel:
            lines = "".join(f"Requires-Dist: {need}\n" for need in needs)
            wheel.writestr(f"{info}/METADATA", head + lines)
            wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nTag: {'-'.join(tags)}\n")
            wheel.writestr(f"{info}/RECORD", "")
    return root


def wheels(checkout: Path, *words: object, **env: str) -> tuple[int, str]:
    """Exit status and output; pip sees the folder of wheels alone."""
    sealed = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PYTHON": sys.executable}
    sealed["PIP_FIND_LINKS"] = str(checkout.parent / "index")
    done = subprocess.run(
        ["bash", checkout / "tools" / "gpu_wheels.sh", *words],
        env=os.environ | sealed | env,
        cwd=checkout.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def test_the_wheels_that_a_machine_lacks_come_with_what_they_require(checkout: Path) -> None:
    have = checkout.parent / "have.txt"
    have.write_text("torch==2.11.0\npytest==9.2.0\ntensorboard==2.20.0\nbuilder==1.0\n")
    status, out = wheels(checkout, "out", "--python", "3.12", "--have", have)
    assert status == 0, out
    assert sorted(p.name for p in (checkout.parent / "out").iterdir()) == [
        "alpha-1.0-cp312-cp312-manylinux_2_17_x86_64.whl",  # pyproject.toml's version
        "beta-2.5-py3-none-any.whl",
        "builder-2.1-py3-none-any.whl",  # the one that is there is too old to build with
    ]
    assert "3 wheels for Python 3.12 in out, 0.00 MB" in out
    assert "torch 2.11.0 (pyproject.toml: ==9.9.0)" in out
    assert "--no-index --no-deps --upgrade --target build/gpu_site out/*.whl" in out
    assert "bash tools/gpu_check.sh" in out
    status, out = wheels(checkout, "out")
    assert status == 2 and "out is not empty" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["out", "--pyton", "3.12"], "unrecognized arguments: --pyton"),
        (["out", "--python", "12"], "give major and minor version, such as 3.12"),
        (["out", "--have", "none.txt"], "--have none.txt: no such file"),
        (["out", "--have", "checkout/pyproject.toml"], "cannot read '[build-system]'"),
        (["out", "--have", "names.txt"], "--have names.txt: torch is not listed"),
    ],
)
def test_what_it_cannot_use_is_refused(checkout: Path, words: list[str], sentence: str) -> None:
    (checkout.parent / "names.txt").write_text("numpy==2.5.2\n")
    status, out = wheels(checkout, *words)
    assert status in (1, 2) and sentence in out
    assert not (checkout.parent / "out").exists()


def test_an_index_out_of_reach_is_one_sentence(checkout: Path) -> None:
    nobody = {"PIP_NO_INDEX": "", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    status, out = wheels(checkout, "out", PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="", **nobody)
    assert status == 1
    [line] = out.splitlines()
    assert line.startswith("gpu_wheels: no package index can be reached")
    assert not any((checkout.parent / "out").glob("*"))
