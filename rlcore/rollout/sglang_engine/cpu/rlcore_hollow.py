"""Hollow packages: stand-ins in which every attribute and submodule exists and nothing works.

At import time, SGLang and transformers refer to kernels and image operations that a text model on a
CPU never runs. A hollow package lets these imports succeed. Its decorators return the function
unchanged.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class _Kind(type):
    """Metaclass of stand-in classes. A missing attribute is a string with the attribute's name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Hollow(types.ModuleType):
    """Module that creates missing attributes on access: a class if the name is capitalised, else a
    hollow module, which can be called as a decorator. Iterating over the module yields nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            made: Any = _Kind(name, (), {"__module__": self.__name__, "__init__": _accept})
        else:
            made = _module(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # used as a decorator without arguments
        return _as_it_is  # a decorator with arguments, or a call whose result is never used


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that creates the submodules of a hollow package."""

    def __init__(self, package: str) -> None:
        self._prefix = package + "."

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules.get(spec.name) or _Hollow(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def hollow(package: str) -> None:
    """Turn the package, which is being imported, into a hollow one. Keep the names it defines."""
    module = sys.modules[package]
    module.__class__ = _Hollow
    sys.meta_path.insert(0, _Finder(package))


def _module(name: str) -> types.ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = _Hollow(name)
    return module


def _accept(self: Any, *args: Any, **kwargs: Any) -> None:
    pass


def _as_it_is(function: Callable) -> Callable:
    return function
