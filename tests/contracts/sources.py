"""Definitions of Python packages, read from their sources without importing them.

Importing SGLang or Transformer Engine takes seconds or needs CUDA. Reading takes neither.
"""

import ast
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Shape:
    """What a definition offers of what a caller asks."""

    takes: str | None
    """Parameters as in a `def`, without annotations and `self`; None if it cannot be called."""
    has: tuple[str, ...] = ()
    """Attributes that it has or inherits."""
    mentions: tuple[str, ...] = ()
    """Names and strings in its source."""


@dataclass(frozen=True)
class Definition:
    """A definition and the module that contains it."""

    module: str
    node: ast.AST
    is_method: bool = False


@dataclass(frozen=True)
class Sources:
    """Packages by top-level name: a folder with sources, or several of a namespace package."""

    folders: Mapping[str, Sequence[Path]]
    _busy: set[tuple[str, str]] = field(default_factory=set)
    """Searches that have not ended, as modules import each other in circles."""

    def module(self, name: str) -> Path | None:
        """Return the file of a module or package, or None."""
        paths = self._paths(name)
        files = (file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")))
        return next((file for file in files if file.is_file()), None)

    def _paths(self, name: str) -> list[Path]:
        top, *rest = name.split(".")
        return [folder.joinpath(*rest) for folder in self.folders.get(top, ())]

    def shape(
        self, name: str, has: Sequence[str] = (), mentions: Sequence[str] = ()
    ) -> Shape | None:
        """Return the shape of what a dotted name means: its parameters, and what it offers of the
        attributes `has` and the words `mentions`. None if the name does not exist."""
        found = self.find(name)
        if found is None:
            return None
        node = found.node
        text = set(words(node)) if mentions else ()
        return Shape(
            takes=self._takes(found),
            has=tuple(one for one in has if self._step(found, one)),
            mentions=tuple(one for one in mentions if one in text),
        )

    def find(self, name: str) -> Definition | None:
        """Return the definition of a dotted name, also through re-exports and base classes."""
        parts = name.split(".")
        # As in Python, an attribute of a package hides a submodule of the same name, unless only
        # the submodule has the rest of the name.
        for count in (1, *range(len(parts) - 1, 1, -1)):
            found = self._whole(".".join(parts[:count]))
            for part in parts[count:]:
                found = found and self._step(found, part)
            if found is not None:
                return found
        return None

    def _step(self, outer: Definition, name: str) -> Definition | None:
        found = self._inside(outer, name)  # before submodules, as in Python
        if found is None and isinstance(outer.node, ast.Module):
            return self._whole(f"{outer.module}.{name}")
        return found

    def _whole(self, module: str) -> Definition | None:
        file = self.module(module)
        if file is not None:
            return Definition(module, tree(file))
        # A folder without `__init__.py` is a namespace package.
        is_folder = any(path.is_dir() for path in self._paths(module))
        return Definition(module, ast.Module(body=[], type_ignores=[])) if is_folder else None

    def _inside(self, outer: Definition, name: str) -> Definition | None:
        if isinstance(outer.node, ast.Module):
            search = (outer.module, name)
            if search in self._busy:
                return None
            self._busy.add(search)
            try:
                return self._in_module(outer, name)
            finally:
                self._busy.remove(search)
        if not isinstance(outer.node, ast.ClassDef):
            return None
        for owner in self._lineage(outer):
            assert isinstance(owner.node, ast.ClassDef)
            for node in owner.node.body:
                if name in names_of(node):
                    static = isinstance(node, Function) and "staticmethod" in decorators(node)
                    return Definition(owner.module, node, not static)
            if name in own_attributes(owner.node):
                return Definition(owner.module, owner.node.body[0])
        return None

    def _in_module(self, outer: Definition, name: str) -> Definition | None:
        assert isinstance(outer.node, ast.Module)
        for node, original in contents(outer.node).get(name, ()):
            if isinstance(node, ast.ImportFrom):
                base = self._base(outer.module, node)
                if base.partition(".")[0] not in self.folders:
                    return Definition(base, node)  # it exists, and nothing more is known
                found = None
                if f"{base}.{original}" != f"{outer.module}.{name}":  # else its own submodule
                    found = self.find(f"{base}.{original}")
            elif isinstance(node, ast.Import):
                if original.partition(".")[0] not in self.folders:
                    return Definition(original, node)
                found = self.find(original)
            else:
                found = Definition(outer.module, node)
            if found is not None:
                return found
        for node, _ in contents(outer.node).get("*", ()):
            assert isinstance(node, ast.ImportFrom)
            if found := self.find(f"{self._base(outer.module, node)}.{name}"):
                return found
        return None

    def _base(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        file = self.module(module)
        up = node.level - (file is not None and file.name == "__init__.py")
        parts = module.split(".")
        return ".".join([*parts[: len(parts) - up], *filter(None, [node.module])])

    def _lineage(self, found: Definition) -> Iterator[Definition]:
        """Yield a class and then its bases, as far as their sources are known."""
        assert isinstance(found.node, ast.ClassDef)
        yield found
        for base in found.node.bases:
            text = ast.unparse(base).partition("[")[0]
            parts = text.split(".")
            outer = self.find(f"{found.module}.{parts[0]}")
            for part in parts[1:]:
                outer = outer and self._step(outer, part)
            if outer is not None and isinstance(outer.node, ast.ClassDef):
                yield from self._lineage(outer)

    def _takes(self, found: Definition) -> str | None:
        node = found.node
        if isinstance(node, Function):
            return parameters(node, skip_first=found.is_method)
        if not isinstance(node, ast.ClassDef):
            return None
        fields: dict[str, str] = {}
        for owner in reversed(list(self._lineage(found))):
            assert isinstance(owner.node, ast.ClassDef)
            fields |= dict(record_fields(owner.node))
        for owner in self._lineage(found):
            assert isinstance(owner.node, ast.ClassDef)
            for inner in owner.node.body:
                if isinstance(inner, Function) and inner.name == "__init__":
                    return parameters(inner, skip_first=True)
            if "dataclass" in decorators(owner.node):
                break
        # A field without a default may follow one with a default: a base's, or keyword-only.
        return ", ".join(sorted(fields.values(), key=lambda text: "=" in text))


@cache
def tree(file: Path) -> ast.Module:
    """Return the parsed file."""
    return ast.parse(file.read_text())


def installed(*packages: str) -> Sources:
    """Return the sources of those packages that are installed, without importing them."""
    folders = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            folders[package] = [Path(path) for path in spec.submodule_search_locations]
    return Sources(folders)


@cache
def contents(module: ast.Module) -> dict[str, list[tuple[ast.stmt, str]]]:
    """Return the statements that define each name of a module, `*` for star imports. With an import
    goes the name that it imports."""
    found: dict[str, list[tuple[ast.stmt, str]]] = {}
    for node in statements(module.body):
        pairs = [(name, name) for name in names_of(node)]
        if isinstance(node, ast.ImportFrom):
            pairs = [(a.asname or a.name, a.name) for a in node.names]
        elif isinstance(node, ast.Import):
            tops = [a.name.partition(".")[0] for a in node.names]
            pairs = [
                (a.asname, a.name) if a.asname else (top, top)
                for a, top in zip(node.names, tops, strict=True)
            ]
        for name, original in pairs:
            found.setdefault(name, []).append((node, original))
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and those inside its `if`, `try` and `with` blocks."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for inner in (getattr(node, part, []) for part in ("body", "orelse", "finalbody")):
                yield from statements(inner)
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def names_of(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {
            n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)
        }
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def words(node: ast.AST) -> Iterator[object]:
    """Yield the names and constants in a definition."""
    for inner in ast.walk(node):
        for field_name in ("value", "attr", "id", "name"):
            yield from filter(None, [getattr(inner, field_name, None)])


@cache
def own_attributes(node: ast.ClassDef) -> set[str]:
    """Return the attributes that the class's methods set on `self`."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }


def decorators(node: ast.ClassDef | Function) -> set[str]:
    """Return the last names of the decorators, without their arguments."""
    return {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list}


def parameters(node: Function, *, skip_first: bool) -> str:
    """Return a function's parameters without annotations, for methods without `self` or `cls`."""
    args = ast.parse(ast.unparse(node.args).join(("def f(", "): ..."))).body[0].args  # a copy
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    for arg in filter(None, every):
        arg.annotation = None
    if skip_first:
        (args.posonlyargs or args.args).pop(0)
    return ast.unparse(args)


def record_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the fields of a dataclass, struct or named tuple: name, and name with default."""
    for inner in node.body:
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            name, value = inner.target.id, inner.value
            if isinstance(value, ast.Call):  # `field(default=...)`
                value = next((k.value for k in value.keywords if k.arg == "default"), value)
            if "ClassVar" not in ast.unparse(inner.annotation):
                yield name, f"{name}={ast.unparse(value)}" if value else name
