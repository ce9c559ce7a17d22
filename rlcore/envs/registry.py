"""Registry of environment kinds: `--env NAME`, or a dotted path to a module, a class or a KIND.

If the module of a class also defines a subclass of `EnvConfig` (at most one), that subclass becomes
the section `--env.*`.
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.config import dotted
from rlcore.config.schema import EnvConfig
from rlcore.envs.kind import EnvKind
from rlcore.utils.errors import ConfigError

ENVS: dict[str, str] = {
    "alfworld": "rlcore.envs.alfworld",
    "blackjack": "rlcore.envs.blackjack",
    "endpoint": "rlcore.envs.harness_env",
    "frozenlake": "rlcore.envs.frozenlake",
    "latency": "rlcore.envs.latency",
    "openenv": "rlcore.envs.openenv",
    "single_turn": "rlcore.envs.single_turn",
    "swe": "rlcore.envs.swe",
    "tools": "rlcore.envs.tools",
}
"""Modules of the built-in environments, imported on first use. Each defines a `KIND`."""


def resolve(name: str) -> EnvKind:
    """Return the environment kind with this name. Raises ConfigError if there is none."""
    if name in ENVS:
        return importlib.import_module(ENVS[name]).KIND
    if "." not in name:
        raise ConfigError(
            f"--env {name}: allowed are {', '.join(ENVS)}, a dotted path to a class with "
            "gymnasium's interface, or one to a module with a KIND"
        )
    module, found = dotted.find("--env", name)
    if inspect.ismodule(found):
        found = getattr(found, "KIND", None)
    if isinstance(found, EnvKind):
        return found
    if inspect.isclass(found) and all(hasattr(found, m) for m in ("reset", "step", "close")):
        return EnvKind(dotted.section("--env", name, module, EnvConfig), _maker(found))
    raise ConfigError(
        f"--env {name}: give a class with reset, step and close, or a module with a KIND"
    )


def tools_of(name: str, config: EnvConfig) -> Sequence[Mapping[str, Any]]:
    """Return the tools that the chat template shows the policy in OpenAI's form, if any."""
    return resolve(name).tools(config) if name else ()


def is_scored_by_reward(name: str, config: EnvConfig) -> bool:
    """Return whether `--reward` scores the last turn of an episode."""
    source = resolve(name).scored_by
    return (source(config) if callable(source) else source) == "reward"


def config_class(name: str) -> type[EnvConfig]:
    """Return the class of the section `--env.*`. Without an environment, return the base class,
    whose defaults are used."""
    return resolve(name).config if name else EnvConfig


def _maker(cls: type) -> Any:
    takes = "config" in inspect.signature(cls).parameters
    return (lambda config: cls(config=config)) if takes else (lambda config: cls())
