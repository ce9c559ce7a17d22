"""Import the object of a dotted path on the command line, and find its module's config class."""

import importlib
import inspect
from types import ModuleType
from typing import Any, TypeVar

from rlcore.utils.errors import ConfigError

Section = TypeVar("Section")


def find(option: str, name: str) -> tuple[ModuleType, Any]:
    """Import the object, possibly a module, at the dotted path `name`. Return its module and the
    object. `option` is the key for error messages, such as `--reward`.

    Raises:
        ConfigError: there is no such module or attribute, or the import fails.
    """
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
    """Return the subclass of `base` that `module` defines, or `base` if there is none.

    Raises:
        ConfigError: the module defines several subclasses.
    """
    own = [
        c
        for c in vars(module).values()
        if inspect.isclass(c) and issubclass(c, base) and c.__module__ == module.__name__
    ]
    if len(own) > 1:
        names = ", ".join(c.__name__ for c in own)
        raise ConfigError(
            f"{option} {name}: {len(own)} subclasses of {base.__name__} ({names}); keep only one"
        )
    return own[0] if own else base


def _import(option: str, name: str, path: str) -> ModuleType | None:
    """Import the module at `path`. Return None if no such module exists. If the import fails for
    another reason, raise a ConfigError with the reason."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path + ".").startswith(error.name + "."):
            return None
        raise ConfigError(
            f"{option} {name}: {path} imports {error.name}, which is not installed"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{option} {name}: importing {path} raised {type(error).__name__}: {error}"
        ) from error
