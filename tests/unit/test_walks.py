"""The walks of rlcore/README.md: the files are there, in an order without a way back."""

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "rlcore"
TEXT = (PACKAGE / "README.md").read_text()
WALKS = {
    part.partition("\n")[0]: re.findall(r"^\d+\. `([^`]+)`", part, re.MULTILINE)
    for part in TEXT.split("\n## ")[1:]
}


@cache
def graph() -> dict[str, set[str]]:
    """Which file imports which, also in functions and for types."""
    files = {f: str(f.relative_to(PACKAGE)) for f in PACKAGE.rglob("*.py")}
    modules = {}
    for name in files.values():
        dotted = "rlcore." + name.removesuffix(".py").replace("/", ".")
        modules[dotted.removesuffix(".__init__")] = name
    found: dict[str, set[str]] = {name: set() for name in files.values()}
    for file, name in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [n if n in modules else node.module for n in names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            found[name] |= {modules[n] for n in names if n in modules} - {name}
    return found


def reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    """All files that `start` imports, directly or through others."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = edges[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def complaints(walk: list[str], edges: Mapping[str, set[str]]) -> list[str]:
    if missing := [name for name in walk if name not in edges]:
        return [f"{name}: there is no such file" for name in missing]
    out = []
    for i, name in enumerate(walk):
        ways = reached(name, edges)
        out += [f"{name} imports {earlier}" for earlier in walk[:i] if earlier in ways]
        if i and not any(name in reached(earlier, edges) for earlier in walk[:i]):
            out.append(f"{name}: none of the files before imports it")
    return out


@pytest.mark.parametrize("walk", WALKS.values(), ids=[name.split(",")[0] for name in WALKS])
def test_a_walk_goes_down_and_never_back(walk: list[str]) -> None:
    assert len(walk) >= 5
    assert not complaints(walk, graph())


def test_there_are_four() -> None:
    assert [name.split(",")[0] for name in WALKS] == [
        "A prompt",
        "A gradient",
        "A bucket of weights",
        "A key",
    ]


def test_no_module_imports_itself_through_others() -> None:
    edges = graph()
    assert not [name for name in edges if name in reached(name, edges)]


def test_a_way_back_a_gap_and_a_missing_file_are_found() -> None:
    edges = {"a.py": {"b.py"}, "b.py": {"c.py"}, "c.py": set(), "d.py": set()}
    assert not complaints(["a.py", "b.py", "c.py"], edges)
    assert complaints(["a.py", "c.py", "b.py"], edges) == ["b.py imports c.py"]
    assert complaints(["a.py", "d.py"], edges) == ["d.py: none of the files before imports it"]
    assert complaints(["a.py", "e.py"], edges) == ["e.py: there is no such file"]
