"""Resolve the packages that `tools/setup.sh --sglang` installs on a CUDA machine, into tools/locks.

    python tools/lock_cuda.py             # fail if the locks no longer follow from pyproject.toml
    python tools/lock_cuda.py --update    # write the locks, with the versions that still fit
    python tools/lock_cuda.py --upgrade   # write the locks, with the newest versions

A lock holds rlcore's dependencies and its `sglang` extra for one version of Python: the exact
version of every package and the hashes of its wheels for x86_64 Linux with glibc 2.34. No package
of a lock is built from source. tools/locks/overrides.txt replaces requirements that cannot be met.

A new release of a package changes nothing: the check resolves with the locked versions.
"""

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "tools/locks"
PYTHONS = ("3.11", "3.12")
"""SGLang pins outlines-core 0.1.26, which has no wheels for later versions."""
PLATFORM = "x86_64-manylinux_2_34"
BESIDE = ("te", "wandb")
"""Extras that must be installable beside a lock."""
SOURCES = {"transformer-engine-torch": "it is compiled against the torch that is installed"}
"""Packages of those extras without a wheel, and why that is accepted."""

Packages = dict[str, tuple[str, frozenset[str]]]
"""Name to version and sha256 sums of the wheels; no sums if the package has no wheel."""

HEADER = """\
# The packages of `tools/setup.sh --sglang` on a CUDA machine with Python {python}.
# Written by tools/lock_cuda.py.
"""


class UnreachableError(RuntimeError):
    """The package registry cannot be reached."""


def requirements(project: Mapping[str, object], *extras: str) -> list[str]:
    """The requirements of a parsed pyproject.toml: its build, its dependencies and some extras."""
    table = project["project"]
    chosen = [line for extra in extras for line in table["optional-dependencies"][extra]]
    return [*project["build-system"]["requires"], *table["dependencies"], *chosen]


def resolve(python: str, wanted: list[str], locked: Packages, *, firm: bool = True) -> Packages:
    """The packages that `wanted` comes to. Those that `locked` names have its versions; unless
    `firm`, only where these versions still fit.

    Raises:
        UnreachableError: the registry does not answer.
        ValueError: there is no solution; the message is uv's.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "wanted.txt").write_text("\n".join(wanted))
        pins = folder / "pins.txt"
        pins.write_text("\n".join(f"{name}=={version}" for name, (version, _) in locked.items()))
        if not firm:  # uv prefers the versions that its output file has
            compile_(python, folder / "wanted.txt", "--no-annotate", "--output-file", pins)
        out = folder / "pylock.toml"
        compile_(python, folder / "wanted.txt", "--constraints", pins, "--output-file", out)
        return parse_pylock(out.read_text())


def compile_(python: str, wanted: Path, *options: str | Path) -> None:
    """Run `uv pip compile` for the platform of the locks; raises as `resolve` does."""
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    command = [uv, "pip", "compile", wanted, "--quiet", "--no-header", *options]
    command += ["--python-platform", PLATFORM, "--python-version", python]
    command += ["--overrides", LOCKS / "overrides.txt", "--only-binary", ":all:"]
    command += [word for name in SOURCES for word in ("--no-binary", name)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        unreachable = "Failed to fetch" in done.stderr or "error sending request" in done.stderr
        raise (UnreachableError if unreachable else ValueError)(done.stderr.strip())


def parse_pylock(text: str) -> Packages:
    """The packages of a pylock.toml."""
    return {
        package["name"]: (
            package["version"],
            frozenset(wheel["hashes"]["sha256"] for wheel in package.get("wheels", ())),
        )
        for package in tomllib.loads(text)["packages"]
    }


def lock_file(python: str) -> Path:
    """The lock of a version of Python."""
    return LOCKS / f"cuda-py{python.replace('.', '')}.txt"


def read(path: Path) -> Packages:
    """The packages of a lock; none if there is no file."""
    packages: Packages = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if found := re.match(r"([a-z0-9-]+)==(\S+)", line):
            packages[found[1]] = found[2], frozenset(re.findall(r"sha256:([0-9a-f]{64})", line))
    return packages


def write(path: Path, python: str, packages: Packages) -> None:
    """Write a lock, one package per line, for `pip install --require-hashes`."""
    lines = [
        " ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in sorted(sums))])
        for name, (version, sums) in sorted(packages.items())
    ]
    path.write_text(HEADER.format(python=python) + "\n".join(lines) + "\n")


def differences(locked: Packages, found: Packages) -> list[str]:
    """What makes a lock stale: packages or versions that differ, and wheels that are gone."""
    lines = []
    for name in sorted(locked.keys() | found.keys()):
        if name not in found:
            lines.append(f"{name}=={locked[name][0]}: no longer needed")
        elif name not in locked:
            lines.append(f"{name}=={found[name][0]}: not in the lock")
        elif locked[name][0] != found[name][0]:
            lines.append(f"{name}=={locked[name][0]}: resolves to {found[name][0]}")
        elif not locked[name][1] or locked[name][1] - found[name][1]:
            lines.append(f"{name}=={locked[name][0]}: a locked wheel is not in the registry")
    return lines


def check(project: Mapping[str, object]) -> list[str]:
    """What is wrong with the locks; nothing if they follow from `project`."""
    with ThreadPoolExecutor() as pool:  # most of the time is waiting for the registry
        return [
            line for lines in pool.map(partial(check_python, project), PYTHONS) for line in lines
        ]


def check_python(project: Mapping[str, object], python: str) -> list[str]:
    """What is wrong with the lock of one version of Python."""
    path = lock_file(python)
    locked = read(path)
    try:
        with ThreadPoolExecutor() as pool:
            alone = pool.submit(resolve, python, requirements(project, "sglang"), locked)
            beside = pool.submit(resolve, python, requirements(project, "sglang", *BESIDE), locked)
            problems = differences(locked, alone.result())
            sources = {name for name, (_, sums) in beside.result().items() if not sums}
    except ValueError as error:
        problems = [str(error)]
    else:
        problems += [f"{name}: has no wheel" for name in sorted(sources - SOURCES.keys())]
        problems += [f"{name}: SOURCES is wrong" for name in sorted(SOURCES.keys() - sources)]
    return [f"{path.name}: {problem}" for problem in problems]


def report(project: Mapping[str, object]) -> None:
    """Print what the check has found. SystemExit if a lock is stale."""
    try:
        problems = check(project)
    except UnreachableError as error:
        print(f"tools/locks: NOT CHECKED, the package registry cannot be reached: {error}")
        return
    if problems:
        sys.exit("\n".join([*problems, "run python tools/lock_cuda.py --update"]))
    for python in PYTHONS:
        path = lock_file(python)
        print(
            f"{path.relative_to(ROOT)}: resolved for {PLATFORM}: {len(read(path))} packages, all "
            "of them wheels"
        )
    sources = "; ".join(f"{name}, since {why}" for name, why in SOURCES.items())
    print(f"beside them {' and '.join(BESIDE)} can be installed; without a wheel: {sources}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument(
        "--update", action="store_true", help="write the locks and keep versions that still fit"
    )
    p.add_argument(
        "--upgrade", action="store_true", help="write the locks with the newest versions"
    )
    a = p.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if not (a.update or a.upgrade):
        report(project)
        return
    for python in PYTHONS:
        path = lock_file(python)
        locked = {} if a.upgrade else read(path)
        packages = resolve(python, requirements(project, "sglang"), locked, firm=False)
        write(path, python, packages)
        print(f"{path.relative_to(ROOT)}: {len(packages)} packages")


if __name__ == "__main__":
    main()
