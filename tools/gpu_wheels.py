"""Fetch the wheels that tests/gpu and a recipe need on a GPU machine without a package index.

That machine has torch for CUDA and the usual packages; what it lacks is a few megabytes. Versions
are those of pyproject.toml. The set is closed: whatever a wheel requires is in the folder or there.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import gpu_needs

try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name, parse_wheel_filename
    from packaging.version import Version
except ImportError:
    sys.exit(f"gpu_wheels: {sys.executable} has no packaging; run tools/setup.sh first")

HAVE = """
    click cloudpickle cmake filelock fsspec hf-xet httpx huggingface-hub hypothesis jinja2
    matplotlib ninja numpy packaging prometheus-client psutil pyarrow pybind11 pytest pyyaml rich
    safetensors setuptools sympy tensorboard tokenizers torch tqdm transformers typing-extensions
"""
"""What a machine has where --have does not say: torch, transformers, and what comes with them."""

RECIPES = ("tensorboard",)
"""What a run of recipes/grpo_tiny.sh imports and tests/gpu does not."""

BUILD = "native build"
"""Its tools are fetched where the machine has them at a version that they cannot be used at."""

PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (5, 12, 17, 24, 26, 27, 28, 31, 34)]
"""pip takes each name exactly; every glibc of a machine that torch 2.11 runs on is 2.28 or newer,
and the last two are those of Ubuntu 20.04 and 22.04."""

OFFLINE = re.compile(
    r"connection broken|Connection(Error|Refused)|Max retries|ProxyError|timed out"
    r"|Name or service not known|Temporary failure in name resolution|Network is unreachable"
)


def die(sentence: str) -> None:
    raise SystemExit(f"gpu_wheels: {sentence}")


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bash tools/gpu_wheels.sh", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="new folder for the wheels")
    parser.add_argument(
        "--python",
        default="3.12",
        metavar="X.Y",
        help="Python version of the GPU machine (default: 3.12)",
    )
    parser.add_argument(
        "--have",
        type=Path,
        metavar="FILE",
        help="its installed packages: output of `python3 -m pip list --format=freeze` there, or "
        "one name per line; default: torch, transformers and their usual dependencies",
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME",
        help="further package, such as math-verify for --reward math; may be repeated",
    )
    args = parser.parse_args(argv)
    if not re.fullmatch(r"3\.\d+", args.python):
        parser.error(f"--python {args.python}: give major and minor version, such as 3.12")
    if args.have and not args.have.is_file():
        parser.error(f"--have {args.have}: no such file")
    if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
        parser.error(
            f"{args.folder} is not empty; give a new folder, so that no wheel is duplicated"
        )
    return args


def installed(have: Path | None) -> dict[str, Version | None]:
    """Canonical name and, where it is known, version of what the machine has."""
    lines = have.read_text().splitlines() if have else HAVE.split()
    found: dict[str, Version | None] = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)(==\S+| @ \S+)?", line)
        if not match:
            die(f"--have {have}: cannot read {line!r}; give `pip list --format=freeze`, or names")
        name, version = match[1], (match[2] or "").partition("==")[2]
        found[canonicalize_name(name)] = Version(version) if version else None
    return found


def wanted(also: list[str]) -> list[tuple[Requirement, str]]:
    """What tests/gpu, a recipe, the user and the native build need, at the versions of
    pyproject.toml, and for what."""
    project = tomllib.loads((gpu_needs.ROOT / "pyproject.toml").read_text())
    lines = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["test"]
    pinned = {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}
    names = [gpu_needs.distribution(name) for name in gpu_needs.needed()]
    names += [*RECIPES, *also]
    found = [(pinned.get(canonicalize_name(n), Requirement(n)), "pyproject.toml") for n in names]
    return found + [(Requirement(line), BUILD) for line in gpu_needs.build_requires()]


def fetch(requirement: Requirement, python: str, folder: Path) -> Path:
    """Download the wheel of a requirement; where there are sources alone, build it here."""
    spec = f"{requirement.name}{requirement.specifier}"
    before = set(folder.iterdir())
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    target += [word for name in PLATFORMS for word in ("--platform", name)]
    said = pip("download", "--dest", folder, *target, spec)
    if said and not OFFLINE.search(said):
        said = pip("wheel", "--wheel-dir", folder, spec) and said  # the first reason is the better
    if said:
        if OFFLINE.search(said):
            die(f"no package index can be reached ({last_line(said)})")
        die(f"{spec}: no wheel for Python {python}, and none could be built ({last_line(said)})")
    [wheel] = set(folder.iterdir()) - before
    return wheel


def pip(command: str, *arguments: object) -> str:
    """Run a command of pip for one package alone; "" or what it said of its failure."""
    words = [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", "--retries", "1"]
    done = subprocess.run([*words, *map(str, arguments)], capture_output=True, text=True)
    return (done.stderr.strip() or "pip said nothing") if done.returncode else ""


def last_line(said: str) -> str:
    return said.splitlines()[-1].removeprefix("ERROR: ")[:200]


def requires(wheel: Path, extras: set[str], python: str) -> list[Requirement]:
    """What a wheel requires on Linux under `python`, for itself and some of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        metadata = Parser().parsestr(archive.read(name).decode())
    there = {
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "python_version": python,
        "python_full_version": f"{python}.0",
    }
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return [
        r
        for r in found
        if r.marker is None
        or any(r.marker.evaluate(there | {"extra": extra}) for extra in ("", *extras))
    ]


def collect(
    queue: list[tuple[Requirement, str]], have: dict[str, Version | None], python: str, folder: Path
) -> tuple[dict[Path, str], list[str]]:
    """Fetch what is lacking, and what that requires. The wheels with who asked for each; what the
    machine has at another version than is asked for."""
    wheels: dict[Path, str] = {}
    versions: dict[str, Version] = {}
    odd = []
    for requirement, whose in queue:  # grows meanwhile
        name = canonicalize_name(requirement.name)
        version = have.get(name)
        wrong = version and not requirement.specifier.contains(version, prereleases=True)
        if wrong and whose != BUILD:
            odd.append(f"{name} {version} ({whose}: {requirement.specifier})")
        if name in have and not (wrong and whose == BUILD):
            continue
        if name not in versions:
            wheel = fetch(requirement, python, folder)
            _, versions[name], _, tags = parse_wheel_filename(wheel.name)
            if not any(t.platform == "any" or t.platform.startswith("manylinux") for t in tags):
                die(f"{wheel.name} was built from sources for this machine; it is not portable")
            wheels[wheel] = whose
            queue += [(r, wheel.name) for r in requires(wheel, requirement.extras, python)]
        if not requirement.specifier.contains(versions[name], prereleases=True):
            die(
                f"{name} {versions[name]} was fetched, and {whose} asks for {requirement.specifier}"
            )
    return wheels, odd


def main(argv: list[str]) -> int:
    args = arguments(argv)
    have = installed(args.have)
    if "torch" not in have:
        die(f"--have {args.have}: torch is not listed; only small packages travel as wheels")
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="wheels") as name:
        wheels, odd = collect(wanted(args.also), have, args.python, Path(name))
        for wheel, whose in sorted(wheels.items()):
            print(f"  {wheel.stat().st_size / 1e6:6.2f} MB  {wheel.name}  ({whose})")
            shutil.copy(wheel, args.folder)
    total = sum(wheel.stat().st_size for wheel in args.folder.iterdir())
    print(f"{len(wheels)} wheels for Python {args.python} in {args.folder}, {total / 1e6:.2f} MB")
    if odd:
        print(f"used there as they are, at other versions than are asked for: {', '.join(odd)}")
    install = "python3 -m pip install --no-index --no-deps --upgrade --target"
    print("There, in the checkout, with this folder beside it:")
    print(f"  {install} build/gpu_site {args.folder}/*.whl")
    print("  PYTHONPATH=$PWD/build/gpu_site bash tools/gpu_check.sh")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
