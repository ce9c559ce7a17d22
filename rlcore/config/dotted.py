"""Dotted paths on the command line: the thing behind one, and the section of its module."""

import importlib
import inspect
from types import ModuleType
from typing import Any, TypeVar

from rlcore.utils.errors import ConfigError

Section = TypeVar("Section")


def find(option: str, name: str) -> tuple[ModuleType, Any]:
    """The module, and the thing in it that the dotted path `name` names (the module itself,
    perhaps). `option` is for sentences, such as `--reward`. ConfigError where there is none."""
    module = _import(option, name, name)
    if module is not None:
        return module, module
    path, _, attribute = name.rpartition(".")
    module = _import(option, name, path)
    if module is None:
        raise ConfigError(f"{option} {name}: there is no module {path}; is it on PYTHONPATH?")
    if not hasattr(module, attribute):
        raise ConfigError(f"{option} {name}: module {path} has no {attribute}")
    return module, getattr(module, attribute)


def section(option: str, name: str, module: ModuleType, base: type[Section]) -> type[Section]:
    """The subclass of `base` that `module` defines, or `base`. ValueError where there are
    several."""
    own = [
        c
        for c in vars(module).values()
        if inspect.isclass(c) and issubclass(c, base) and c.__module__ == module.__name__
    ]
    if len(own) > 1:
        names = ", ".join(c.__name__ for c in own)
        raise ConfigError(
            f"{option} {name}: {len(own)} subclasses of {base.__name__} ({names}); keep one"
        )
    return own[0] if own else base


def _import(option: str, name: str, path: str) -> ModuleType | None:
    """The module at `path`, None where there is none; its own errors are told in one sentence."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path + ".").startswith(error.name + "."):
            return None
        raise ConfigError(
            f"{option} {name}: {path} needs {error.name}, which is missing"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{option} {name}: importing {path} raised {type(error).__name__}: {error}"
        ) from error
