"""Packages that tests/gpu imports: `python tools/gpu_needs.py` names the missing ones, and
`python tools/gpu_needs.py build` those of the native build. `python tools/gpu_needs.py lacks` names
programs and packages without which a part of the check is skipped or fails.

The names are read from the import statements of tests/gpu, and of the modules of tests and rlcore
that these import, at module level and within functions.
"""

import ast
import importlib.util
import shutil
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

UNUSED = {
    "apex": "its tests are skipped where it is missing",
    "transformer_engine": "its tests are skipped where it is missing",
    "datasets": "for data sets on the Hugging Face hub",
    "gymnasium": "for --env gymnasium",
    "httpx": "for rewards behind a URL",
    "prometheus_client": "for --log.prometheus_port",
    "redis": "for rlcore mux",
    "flash_attn": "flash attention 4; its tests are skipped where it is missing",
    "triton": "comes with a torch for GPUs, and is used on a GPU alone",
    "wandb": "for --log.wandb",
}
"""Packages whose import no test of tests/gpu reaches, and what they are for."""

SPELLING = {"megatron": ("megatron.core", "megatron-core"), "zmq": ("zmq", "pyzmq")}
"""Module to look for and name on a package index, for packages where these differ."""

PARTS = {
    "nvcc": "native_build, grpo_sglang",
    "c++": "native_build, grpo_sglang",
    "nvidia-cuda-mps-control": "judge",
    "compute-sanitizer": "--sanitize",
    "sglang": "grpo_sglang",
    "transformer_engine": "its own tests",
    "apex": "its own tests",
}
"""Programs and packages that a machine may lack, and the part of the check that needs them."""

STARTED = ("tests.conftest", "rlcore.__main__", "rlcore.cli.env", "rlcore.cli.train")
"""Modules that pytest and `python -m rlcore` import by their name."""


def needed(root: Path = ROOT) -> dict[str, str]:
    """Map each top-level package from outside to the first place that imports it."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    queue = [f"tests.gpu.{path.stem}" for path in sorted((root / "tests" / "gpu").glob("*.py"))]
    queue = [*queue, *STARTED]
    while queue:
        name = queue.pop()
        path = _file(root, name)
        if path is None or name in seen:
            continue
        seen.add(name)
        queue.append(name.rpartition(".")[0])  # importing a.b runs a/__init__.py
        for line, imported in _imports(path):
            top = imported.partition(".")[0]
            if top in ("tests", "rlcore"):
                queue.append(imported)
            elif top not in sys.stdlib_module_names and top not in UNUSED:
                found.setdefault(top, f"{path.relative_to(root)}:{line}")
    return dict(sorted(found.items()))


def distribution(package: str) -> str:
    """Name of an imported package on a package index."""
    return SPELLING[package][1] if package in SPELLING else package.replace("_", "-")


def missing(root: Path = ROOT) -> list[str]:
    """Names on a package index of what is needed and not installed."""
    return [distribution(name) for name in needed(root) if not _installed(name)]


def build_requires(root: Path = ROOT) -> list[str]:
    """What pyproject.toml requires for the native build, but for torch: the machine's own is used,
    whose headers do from 2.11 on."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    return [r for r in project["build-system"]["requires"] if not r.startswith("torch==")]


def missing_for_build(root: Path = ROOT) -> list[str]:
    """What the native build requires and is missing, or has another version."""
    from packaging.requirements import Requirement

    names = []
    for requirement in map(Requirement, build_requires(root)):
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            names.append(str(requirement))
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            names.append(f"{requirement} (here: {version})")
    return names


def lacks() -> list[str]:
    """Name the programs and packages that this machine lacks, each with what needs it."""
    found = [name for name in PARTS if shutil.which(name) is None and not _installed(name)]
    return [f"{name} (for {PARTS[name]})" for name in found]


def _installed(package: str) -> bool:
    module = SPELLING[package][0] if package in SPELLING else package
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # its parent is missing
        return False


def _file(root: Path, module: str) -> Path | None:
    """The source of a module below `root`; None for the name of a function or class."""
    path = root.joinpath(*module.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if module and file.is_file():
            return file
    return None


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a source file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            for alias in node.names:  # `from rlcore.ops import native` imports rlcore.ops.native
                yield node.lineno, f"{node.module}.{alias.name}"


def main(argv: list[str]) -> int:
    """Exit status 1, and a sentence, where a package is missing."""
    if argv == ["lacks"]:
        print(f"lacks     {', '.join(lacks()) or 'nothing'}")
        return 0
    names, why = missing(), "tests/gpu"
    if argv == ["build"]:
        names, why = missing_for_build(), "the native build"
    if not names:
        return 0
    print(
        f"gpu_check: {why} needs packages that are not installed for {sys.executable}:\n"
        f"gpu_check:   {', '.join(names)}\n"
        "gpu_check: where there is a network, `bash tools/gpu_wheels.sh wheels` fetches them "
        "(--have FILE: the versions of this machine); carry the folder here and run the command "
        "that it prints",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
