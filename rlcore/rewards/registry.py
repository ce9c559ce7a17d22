"""Registry that resolves reward names: built-in kinds, http servers, user code by dotted path, and
weighted sums of rewards.

`--reward math:1,judge:0.5` is a sum of names with weights; the default weight is 1. A user's reward
has one of these forms:
    a function `score(sample, prompt, text) -> float | RewardResult`, or a module that defines it;
    a function with the same parameters and a fourth parameter `config`;
    a class with a method `score(sample, prompt, text)`, constructed with the config section;
    a `kind.RewardKind`.
`sample` is a `wire.SampleInfo`, `prompt` a `records.Prompt`. The same module may define one
subclass of `RewardConfig`, which becomes the section `--reward.*`.
"""

import difflib
import importlib
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import field, make_dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rlcore.config import dotted
from rlcore.config.schema import RewardConfig, RewardSum
from rlcore.rewards.kind import RewardKind
from rlcore.utils.errors import ConfigError
from rlcore.utils.scores import LARGEST

REWARDS: dict[str, str] = {
    "code": "rlcore.rewards.code",
    "exact": "rlcore.rewards.exact",
    "judge": "rlcore.rewards.judge",
    "math": "rlcore.rewards.math",
}
"""Modules of the built-in rewards, imported on first use. Each defines a `KIND`."""
INLINE: dict[str, RewardKind] = {}
"""The function of `rlcore.train(reward=function)`, by its name; empty without one."""
SCHEMES = ("http://", "https://")
_WEIGHT = re.compile(r"(.+):([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)")


class RewardTerm(NamedTuple):
    """One term of the weighted sum in `--reward`."""

    label: str
    """Label of the term. In a sum its section is `--reward.<label>.*` and its score is
    `reward/<label>`."""
    name: str
    """Name of the reward: built-in name, URL or dotted path."""
    weight: float


class _Function:
    """Adapter that gives a plain function the method `score`."""

    def __init__(self, function: Callable[..., Any], config: Any) -> None:
        self._function = function
        self._extra = {"config": config} if "config" in _parameters(function) else {}

    def score(self, sample: Any, prompt: Any, text: str) -> Any:
        return self._function(sample, prompt, text, **self._extra)


def parts_of(selector: str) -> tuple[RewardTerm, ...]:
    """Parse `--reward` into its terms. Raises ConfigError if a weight is invalid."""
    parts: list[RewardTerm] = []
    for term in selector.split(","):
        name, weight = _weight_of(term.strip())
        if not 0 < abs(weight) <= LARGEST:
            raise ConfigError(
                f"--reward {term}: the weight must be a number other than 0, at most {LARGEST:g}"
            )
        label = "http" if name.startswith(SCHEMES) else name.removesuffix(".score")
        label = label.rpartition(".")[2]
        same = sum(re.fullmatch(rf"{re.escape(label)}[0-9]*", p.label) is not None for p in parts)
        parts.append(RewardTerm(f"{label}{same + 1}" if same else label, name, weight))
    return tuple(parts)


def _weight_of(term: str) -> tuple[str, float]:
    """Split a term into name and weight: `judge:0.5` and `http://host:80/:2` have a weight,
    `http://host:80` has none."""
    found = _WEIGHT.fullmatch(term)
    if found is None:
        return term, 1.0
    name, weight = found.groups()
    if name.startswith(SCHEMES) and not urlsplit(name).path:
        return term, 1.0
    try:
        return name, float(weight)
    except ValueError:
        return name, math.nan


def resolve(name: str) -> RewardKind:
    """Return the kind of one reward. Raises ConfigError if no valid reward has this name."""
    if name in REWARDS:
        return importlib.import_module(REWARDS[name]).KIND
    if name in INLINE:
        return INLINE[name]
    if name.startswith(SCHEMES):
        return importlib.import_module("rlcore.rewards.http").kind(name)
    if "." not in name:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"--reward {name}: allowed are {', '.join(REWARDS)}, a dotted path, an http address, "
            f"and sums such as math:1,exact:0.5{hint}"
        )
    module, found = dotted.find("--reward", name)
    if inspect.ismodule(found):
        found = getattr(found, "score", None)
        if not callable(found):
            raise ConfigError(
                f"--reward {name}: {module.__name__} has no function score(sample, prompt, text)"
            )
    if isinstance(found, RewardKind):
        return found
    if inspect.isclass(found):
        method = getattr(found, "score", None)
        if not callable(method):
            raise ConfigError(f"--reward {name}: the class has no method score")
        check_signature(name, method, (None, None, None, None))
        return RewardKind(dotted.section("--reward", name, module, RewardConfig), score=found)
    if not callable(found):
        raise ConfigError(f"--reward {name}: is a {type(found).__name__}; give a function or class")
    extra = {"config": None} if "config" in _parameters(found) else {}
    check_signature(name, found, (None, None, None), extra)
    function = found
    return RewardKind(
        dotted.section("--reward", name, module, RewardConfig),
        score=lambda config: _Function(function, config),
    )


def config_class(selector: str) -> type[RewardConfig] | type[RewardSum]:
    """Return the class of the section `--reward.*`. A single reward has its own class. For a sum of
    rewards, the class has one subsection per reward."""
    parts = parts_of(selector)
    classes = [resolve(part.name).config for part in parts]
    if len(parts) == 1:
        return classes[0]
    fields = [(p.label, c, field(default_factory=c)) for p, c in zip(parts, classes, strict=True)]
    return make_dataclass("RewardSum", fields, bases=(RewardSum,), frozen=True, kw_only=True)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some builtins have no readable signature
        return ()


def check_signature(
    name: str, function: Callable[..., Any], args: tuple, extra: dict[str, Any] | None = None
) -> None:
    """Raise ConfigError if a reward function does not take these arguments."""
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"--reward {name}: is async; give a plain function")
    try:
        signature = inspect.signature(function)
        signature.bind(*args, **(extra or {}))
    except TypeError as error:
        raise ConfigError(
            f"--reward {name}: has the parameters {signature}, but must take (sample, prompt, text)"
        ) from error
