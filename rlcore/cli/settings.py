"""Parse a command line into a configuration, with the registries of rewards, envs and algos."""

from collections.abc import Callable, Sequence

from rlcore import algos
from rlcore.config import resolve
from rlcore.config.schema import Config
from rlcore.envs import registry as envs
from rlcore.rewards import registry

SECTIONS = {"reward": registry.config_class, "env": envs.config_class, "algo": algos.config_class}
"""Functions that return a section's config class; `algo` is last, since that one imports torch."""


def parse(argv: Sequence[str], early: Callable[[Config], None] | None = None) -> Config:
    """Parse the command line into a configuration, which `early` gets before torch is imported.

    Raises:
        ConfigError: a key or value is wrong.
    """
    return resolve.parse(argv, SECTIONS, early)
