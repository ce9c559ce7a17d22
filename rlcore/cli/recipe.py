"""`python -m rlcore recipe`: list the recipes that come with rlcore, or copy one to edit it.

    rlcore recipe list
    rlcore recipe copy grpo_tiny            # to recipes/, with the files that it needs
    rlcore recipe copy grpo_tiny FOLDER

A copied recipe runs in the environment in which rlcore is installed. It needs no checkout.
"""

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlcore.cli import exits
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import recipes_folder

HEADER = re.compile(r"^__doc__=r'''(.+?)[.:]?(?:\s*\n\n|(?<=\.)\s)", re.M | re.S)
"""First sentence of a recipe's header."""
WIDTH = 80
"""Longest text of a recipe in the list."""
NEEDED = re.compile(r"(?:\$RECIPES|\brecipes(?=/slurm))/([\w./$-]*\w)")
"""Path of a file that a recipe reads, relative to its folder; a variable stands for any name."""


def main(argv: Sequence[str]) -> int:
    """List or copy recipes. Return 2 if an argument is invalid, 1 on a failure."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rlcore recipe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print the name of each recipe and what it does")
    copying = commands.add_parser("copy", help="copy a recipe and the files that it needs")
    copying.add_argument("name", help="name of the recipe, such as grpo_tiny")
    copying.add_argument("folder", type=Path, nargs="?", default=Path("recipes"), metavar="FOLDER")
    args = parser.parse_args(list(argv))
    if args.command == "list":
        known = recipes()
        width = max(map(len, known))
        for name, path in known.items():
            print(f"{name:{width}}  {purpose(path)}")
        return 0
    for path in copy(args.name, args.folder):
        print(path)
    print(f"run it: {start(args.folder / f'{_bare(args.name)}.sh')}")
    return 0


def recipes() -> dict[str, Path]:
    """Return the file of each recipe, by name."""
    files = sorted(recipes_folder().glob("*.sh"))
    return {path.stem: path for path in files if path.stem != "common"}


def purpose(recipe: Path) -> str:
    """Return the first sentence of a recipe's header. Of one that is too long for a line, return
    the part before its colon or semicolon."""
    found = HEADER.search(recipe.read_text())
    text = " ".join(found[1].split()) if found else ""
    return text if len(text) <= WIDTH else re.split("[:;] ", text)[0]


def needed(recipe: Path) -> list[Path]:
    """Return the recipe, and all files that it reads directly or through others."""
    root, found = recipe.parent, [recipe, recipe.parent / "common.sh"]
    for path in found:  # grows meanwhile
        if path.suffix != ".json":
            for name in NEEDED.findall(path.read_text()):
                files = sorted(root.glob(re.sub(r"\$\w+", "*", name)))
                found += [file for file in files if file not in found]
    return found


def copy(name: str, folder: Path) -> list[Path]:
    """Copy a recipe and the files that it needs, and return the new files. Files that exist with
    the same content are left alone.

    Raises:
        ConfigError: there is no such recipe, or a file exists with other content.
    """
    known = recipes()
    if _bare(name) not in known:
        raise ConfigError(
            f"rlcore recipe copy {name}: there is no such recipe; known: {', '.join(known)}"
        )
    root = recipes_folder()
    targets = {folder / path.relative_to(root): path for path in needed(known[_bare(name)])}
    there = {target for target in targets if target.exists()}
    if other := [t for t in there if not t.is_file() or t.read_bytes() != targets[t].read_bytes()]:
        raise ConfigError(
            f"rlcore recipe copy {name}: {', '.join(map(str, sorted(other)))} would be "
            "overwritten; give another FOLDER"
        )
    for target, path in targets.items():
        if target not in there:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return list(targets)


def start(recipe: Path) -> str:
    """Return the command that starts a copied recipe with this Python."""
    active, own = Path(shutil.which("python") or ""), Path(sys.executable)
    python = "" if active.parent == own.parent else f"PYTHON={shlex.quote(str(own))} "
    return f"{python}bash {shlex.quote(str(recipe))}"


def _bare(name: str) -> str:
    return name.removesuffix(".sh")
