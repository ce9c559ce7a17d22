"""Uses of other packages' names in a file, read from its source."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.contracts.sources import Function, statements

ENVIRONMENT = re.compile(r"(SGLANG|CUDA_MPS|CUDA_DEVICE|NVTE|TMS)_[A-Z_]+")
"""Environment variables that belong to a package of the table, or to CUDA."""


@dataclass(frozen=True)
class Use:
    """A name that a file uses, and the arguments if it calls the name."""

    name: str
    line: int
    positional: int = 0
    keywords: tuple[str, ...] = ()


class Uses:
    """The uses in one file of names of `packages`, and of attributes of `variables`.

    `variables` maps expressions, such as `req.sampling_params`, to the dotted names of their
    classes.
    """

    def __init__(self, file: Path, packages: tuple[str, ...], variables: Mapping[str, str]) -> None:
        self._tree = ast.parse(file.read_text())
        self._packages, self._variables = packages, variables
        self._imports = dict(self._imported())
        for node in ast.walk(self._tree):  # `state = parallel_state`
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                top = ast.unparse(node.value).partition(".")[0]
                if top in self._imports and (meaning := self._meaning(node.value)):
                    self._imports.setdefault(node.targets[0].id, meaning)

    def names(self) -> Iterator[Use]:
        """Yield imported names, names reached through them, and attributes of the variables."""
        calls = {id(n.func): n for n in ast.walk(self._tree) if isinstance(n, ast.Call)}
        inner = {id(n.value) for n in ast.walk(self._tree) if isinstance(n, ast.Attribute)}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name in self._aliases(node).values():
                    yield Use(name, node.lineno)
            elif isinstance(node, ast.Name | ast.Attribute) and (name := self._meaning(node)):
                is_last = id(node) not in inner or self._is_member(node)
                if is_last and not self._is_variable(node):
                    yield self._use(name, node.lineno, calls.get(id(node)))
            elif isinstance(node, ast.ClassDef):
                yield from self._of_bases(node)

    def at_import(self) -> Iterator[Use]:
        """Yield the names that the file needs when it is imported: imports and base classes."""
        for node in statements(self._tree.body):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from (Use(name, node.lineno) for name in self._aliases(node).values())
            elif isinstance(node, ast.ClassDef):
                for base in filter(None, map(self._meaning, node.bases)):
                    yield Use(base, node.lineno)

    def strings(self) -> set[str]:
        """Return all string constants; in f-strings `*` stands for what is not constant."""
        known = dict(self._constants())
        found = {n.value for n in ast.walk(self._tree) if isinstance(n, ast.Constant)}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    p.value if isinstance(p, ast.Constant) else known.get(ast.unparse(p.value), "*")
                    for p in node.values
                ]
                found.add("".join(map(str, parts)))
        return {text for text in found if isinstance(text, str)}

    def patched(self) -> set[str]:
        """Return the dotted names that stand in strings: targets of hooks and names of modules."""
        dotted = re.compile(rf"({'|'.join(self._packages)})(\.\w+)+")
        return {text for text in self.strings() if dotted.fullmatch(text)}

    def environment(self) -> set[str]:
        """Return the names of environment variables of other packages."""
        return {text for text in self.strings() if ENVIRONMENT.fullmatch(text)}

    def untyped(self) -> set[str]:
        """Return the parameters without a type, or of any type, whose attributes the file uses."""
        found = set()
        for function in ast.walk(self._tree):
            if not isinstance(function, Function):
                continue
            every = function.args
            for arg in [*every.posonlyargs, *every.args, *every.kwonlyargs]:
                if arg.annotation is None or ast.unparse(arg.annotation) == "Any":
                    found |= {arg.arg for n in ast.walk(function) if is_attribute_of(n, arg.arg)}
        return found - {"self", "cls", "ctx"}

    def keys(self, variable: str) -> set[str]:
        """Return the constant keys that the dict `variable` gets, also as a keyword argument."""
        dicts: list[ast.AST] = []
        found = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                for target in getattr(node, "targets", None) or [node.target]:
                    text = ast.unparse(target)
                    if text == variable and node.value is not None:
                        dicts.append(node.value)
                    elif isinstance(target, ast.Subscript) and text.startswith(f"{variable}["):
                        found.add(ast.literal_eval(target.slice))
            elif isinstance(node, ast.keyword) and node.arg == variable:
                dicts.append(node.value)
        every = (n for value in dicts for n in [value] if isinstance(n, ast.Dict))
        return found | {k.value for d in every for k in d.keys if isinstance(k, ast.Constant)}

    def _imported(self) -> Iterator[tuple[str, str]]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from self._aliases(node).items()

    def _aliases(self, node: ast.Import | ast.ImportFrom) -> dict[str, str]:
        """Return what an import of one of the packages defines."""
        if isinstance(node, ast.Import):
            found = {a.asname or a.name.partition(".")[0]: a.name for a in node.names}
        else:
            found = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return {k: v for k, v in found.items() if v.partition(".")[0] in self._packages}

    def _meaning(self, node: ast.expr) -> str | None:
        """Return the dotted name of an expression; None if it is unknown."""
        if self._is_variable(node):
            return self._variables[ast.unparse(node)]
        if isinstance(node, ast.Name):
            return self._imports.get(node.id)
        if isinstance(node, ast.Attribute) and not self._is_member(node.value):
            outer = self._meaning(node.value)
            return outer and f"{outer}.{node.attr}"
        return None

    def _is_member(self, node: ast.expr) -> bool:
        """Return whether the expression is an attribute of a variable and no variable itself."""
        return (
            isinstance(node, ast.Attribute)
            and self._is_variable(node.value)
            and not self._is_variable(node)
        )

    def _is_variable(self, node: ast.expr) -> bool:
        return bool(self._variables) and ast.unparse(node) in self._variables

    def _use(self, name: str, line: int, call: ast.Call | None) -> Use:
        if call is None:
            return Use(name, line)
        positional = sum(not isinstance(arg, ast.Starred) for arg in call.args)
        keywords = tuple(k.arg for k in call.keywords if k.arg is not None)
        return Use(name, line, positional, keywords)

    def _of_bases(self, node: ast.ClassDef) -> Iterator[Use]:
        """Yield the arguments that a class passes to the constructor of its imported base."""
        for base in filter(None, map(self._meaning, node.bases)):
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
                    yield self._use(base, call.lineno, call)

    def _constants(self) -> Iterator[tuple[str, str]]:
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Assign):
                continue
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for one, text in pairs:
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield ast.unparse(one), text.value


def is_attribute_of(node: ast.AST, name: str) -> bool:
    """Return whether a node is an attribute of the variable `name`."""
    value = getattr(node, "value", None)
    return isinstance(node, ast.Attribute) and isinstance(value, ast.Name) and value.id == name
