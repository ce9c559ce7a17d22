"""Names of rewards to what they are: built-in ones, and a user's own by dotted path.

A user's reward is one of
    a function `score(sample, prompt, text) -> float | RewardResult` (or a module that has one);
    the same with a fourth parameter `config`;
    a class whose instances have that method; it is made with the config section.
`sample` is a `wire.SampleInfo`, `prompt` a `records.Prompt`. A subclass of `RewardConfig` in the
same module (exactly one) becomes the section `--reward.*`.
"""

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from rlcore.config.schema import RewardConfig
from rlcore.rewards.exact import ExactReward, ExactRewardConfig
from rlcore.rewards.math import MathReward, MathRewardConfig

REWARDS: dict[str, tuple[type[RewardConfig], type]] = {
    "exact": (ExactRewardConfig, ExactReward),
    "math": (MathRewardConfig, MathReward),
}


class Resolved(NamedTuple):
    """The section's class, and what makes the reward from a section."""

    config: type[RewardConfig]
    build: Callable[[Any], Any]


class _Function:
    """A plain function as a reward."""

    def __init__(self, function: Callable[..., Any], config: Any) -> None:
        self._function = function
        self._extra = {"config": config} if "config" in _parameters(function) else {}

    def score(self, sample: Any, prompt: Any, text: str) -> Any:
        return self._function(sample, prompt, text, **self._extra)


def resolve(name: str) -> Resolved:
    """The reward behind a name. ValueError in one sentence where there is none that fits."""
    if name in REWARDS:
        return Resolved(*REWARDS[name])
    if "." not in name:
        raise ValueError(f"--reward {name}: allowed are {', '.join(REWARDS)}, or a dotted path")
    module, found = _find(name)
    if inspect.ismodule(found):
        found = getattr(found, "score", None)
        if not callable(found):
            raise ValueError(
                f"--reward {name}: {module.__name__} has no function score(sample, prompt, text)"
            )
    if inspect.isclass(found):
        method = getattr(found, "score", None)
        if not callable(method):
            raise ValueError(f"--reward {name}: the class has no method score")
        _check_signature(name, method, (None, None, None, None))
        return Resolved(_config_class(name, module), found)
    if not callable(found):
        raise ValueError(f"--reward {name}: a {type(found).__name__}; give a function or a class")
    extra = {"config": None} if "config" in _parameters(found) else {}
    _check_signature(name, found, (None, None, None), extra)
    function = found
    return Resolved(_config_class(name, module), lambda config: _Function(function, config))


def config_class(name: str) -> type[RewardConfig]:
    """The class of the section `--reward.*` for this reward."""
    return resolve(name).config


def _find(name: str) -> tuple[ModuleType, Any]:
    """The module, and the thing in it that the dotted path names (the module itself, perhaps)."""
    module = _import(name, name)
    if module is not None:
        return module, module
    path, _, attribute = name.rpartition(".")
    module = _import(name, path)
    if module is None:
        raise ValueError(f"--reward {name}: there is no module {path}; is it on PYTHONPATH?")
    if not hasattr(module, attribute):
        raise ValueError(f"--reward {name}: module {path} has no {attribute}")
    return module, getattr(module, attribute)


def _import(name: str, path: str) -> ModuleType | None:
    """The module at `path`, None where there is none; its own errors are told in one sentence."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path + ".").startswith(error.name + "."):
            return None
        raise ValueError(f"--reward {name}: {path} needs {error.name}, which is missing") from error
    except Exception as error:
        raise ValueError(
            f"--reward {name}: importing {path} raised {type(error).__name__}: {error}"
        ) from error


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins have no signature to read
        return ()


def _check_signature(
    name: str, function: Callable[..., Any], args: tuple, extra: dict[str, Any] | None = None
) -> None:
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"--reward {name}: is async; give a plain function")
    try:
        signature = inspect.signature(function)
        signature.bind(*args, **(extra or {}))
    except TypeError as error:
        raise ValueError(
            f"--reward {name}: has the parameters {signature}, must take (sample, prompt, text)"
        ) from error


def _config_class(name: str, module: ModuleType) -> type[RewardConfig]:
    own = [
        c
        for c in vars(module).values()
        if inspect.isclass(c) and issubclass(c, RewardConfig) and c.__module__ == module.__name__
    ]
    if len(own) > 1:
        names = ", ".join(c.__name__ for c in own)
        raise ValueError(
            f"--reward {name}: {len(own)} subclasses of RewardConfig ({names}); keep one"
        )
    return own[0] if own else RewardConfig
