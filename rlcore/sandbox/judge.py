"""Run the tests of an untrusted program in a process that the program cannot access.

A test is Python code that runs in this process, such as `assert f(2) == [4]`. Names that the
program defines are proxies here: `f(2)` sends 2 to the program's process and receives plain data
(values.py). If it changes a list, set or dict of the test in place, the new contents come back as
plain data too. Expected values never leave this process, and no object of the program enters this
process. The verdict is written to a descriptor that the program does not have.

Python's own protocols may swallow an exception: `all(map(f, rows))` ends without an error if `f`
raises StopIteration. An exception of the program that would end an iteration, or that no test can
expect, therefore becomes a RuntimeError.

This module runs inside the sandbox and imports only the standard library.
"""

import ast
import builtins
import contextlib
import importlib
import sys
import threading
import warnings
from typing import Any, BinaryIO

from rlcore.sandbox import values

PASSED, FAILED = b"+", b"-"
"""Byte for the verdict of a test. Verdicts are written in order, each right after its test."""


_ENDS_ITERATION = (StopIteration, StopAsyncIteration)


class ProgramEnded(BaseException):
    """Raised if the program has exited, so that no further test can pass. It is a BaseException,
    because tests may catch Exception."""


class Remote:
    """Proxy of an object of the program that is not a plain value. It equals only itself."""

    def __init__(self, link: "Link", number: int) -> None:
        self._link, self._number = link, number

    def __call__(self, *args: Any, **by_name: Any) -> Any:
        return self._link.ask("call", self._number, args, by_name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("attribute", self._number, (name,))

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self._number, (key,))

    def __iter__(self) -> Any:
        return iter(self._link.ask("list", self._number))

    def __len__(self) -> int:
        return self._link.ask("length", self._number)

    def __bool__(self) -> bool:
        return self._link.ask("truth", self._number) is True

    def __str__(self) -> str:
        return self._link.ask("text", self._number)


class Link:
    """Connection to the program, over which one question (such as a call) is sent at a time."""

    def __init__(self, channel: values.Stream) -> None:
        """Wait until the program's source has run."""
        self._channel = channel
        self._remotes: dict[int, Remote] = {}
        self._lock = threading.Lock()  # a test may call the program from several threads
        self.is_open = False
        """Whether the source ran without error and the program still answers."""
        with contextlib.suppress(EOFError, ValueError, AttributeError, RecursionError):
            self.is_open = values.receive(channel).get("ready") is True

    def ask(self, do: str, on: Any, args: tuple = (), by_name: dict[str, Any] | None = None) -> Any:
        """Send a question and return the program's answer. Containers that the program has changed
        in place are changed here too. If the program raised an exception, raise an exception of the
        same type (see `_exception`)."""
        if not self.is_open:
            raise ProgramEnded
        by_name = by_name or {}
        question = {
            "do": do,
            "on": on,
            "args": [values.encode(a, self._number) for a in args],
            "by_name": {k: values.encode(v, self._number) for k, v in by_name.items()},
        }
        try:
            with self._lock:
                values.send(self._channel, question)
                answer = values.receive(self._channel)
        except (EOFError, OSError) as error:
            self.is_open = False
            raise ProgramEnded from error
        if "raised" in answer:
            raise _exception(str(answer["raised"]), str(answer.get("text", "")))
        given = [*args, *by_name.values()]
        sent = [*question["args"], *question["by_name"].values()]
        for i, data in answer.get("changed", ()):
            values.refill(given[i], sent[i], data, self._remote)
        return values.decode(answer["value"], self._remote)

    def _remote(self, number: int) -> Remote:
        return self._remotes.setdefault(number, Remote(self, number))

    def _number(self, value: Any) -> int:
        if isinstance(value, Remote):
            return value._number
        raise TypeError(f"a {type(value).__name__} cannot be sent to the program")


def _exception(name: str, text: str) -> Exception:
    """Make the exception that a test sees: the built-in type of this name, else a RuntimeError."""
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError and others need more arguments
            if not issubclass(found, _ENDS_ITERATION):
                return found(text)
    return RuntimeError(f"{name}: {text}")


def judge(tests: list[str], channel: values.Stream, verdicts: BinaryIO) -> None:
    """Run the tests in order, and write a verdict for each."""
    sys.set_int_max_str_digits(0)  # as in the program's process
    link = Link(channel)
    # `assert f(2).__eq__(3)` must not pass because a value of another type is not comparable
    warnings.filterwarnings("error", "NotImplemented should not be used in a boolean context")
    # stdout has the verdicts, and a test may print the program's values
    with contextlib.redirect_stdout(sys.stderr):
        for test in tests:
            # a test may swallow ProgramEnded with a bare `except`
            passed = _passes(test, link) and link.is_open
            verdicts.write(PASSED if passed else FAILED)
            verdicts.flush()


def _passes(test: str, link: Link) -> bool:
    """Return whether a test passes, that is, raises no exception."""
    try:
        tree = ast.parse(test)
        names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
        for name in free_names(tree):
            names[name] = link.ask("name", name)
        for name in modules(tree):
            names[name] = importlib.import_module(name)
        exec(compile(tree, "<test>", "exec"), names)
    except BaseException:  # an error in the test or the program; the next test still counts
        return False
    return True


_DEFINE = (
    ast.FunctionDef
    | ast.AsyncFunctionDef
    | ast.ClassDef
    | ast.ExceptHandler
    | ast.MatchAs
    | ast.MatchStar
)
"""Nodes of the syntax tree whose `name` is a name that they define."""


def free_names(tree: ast.AST) -> list[str]:
    """List the names that a test uses and does not define.

    Builtins are excluded unless no other name is left: `assert sum(2, 3) == 5` tests the program's
    `sum`. Only the test's text decides, so a program cannot redefine `set` or `sorted`.
    """
    used: dict[str, None] = {}
    made: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                used[node.id] = None
            else:
                made.add(node.id)
        elif isinstance(node, _DEFINE) and node.name:
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            made.update((a.asname or a.name).partition(".")[0] for a in node.names)
    free = [name for name in used if name not in made and name not in modules(tree)]
    own = [name for name in free if not hasattr(builtins, name)]
    return own or free[:1]


def modules(tree: ast.AST) -> list[str]:
    """List the standard-library modules whose attributes a test uses (`math.pi`), even if the test
    does not import them. If the module lacks such an attribute, the name is not the module's."""
    used: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.setdefault(node.value.id, []).append(node.attr)
    return [name for name in used if name in sys.stdlib_module_names and _has(name, used[name])]


def _has(name: str, attributes: list[str]) -> bool:
    """Return whether a module may have all attributes; a package may have any as a submodule."""
    module = importlib.import_module(name)
    return hasattr(module, "__path__") or all(hasattr(module, a) for a in attributes)
