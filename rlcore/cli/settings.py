"""Command line to configuration, with the registries of this installation."""

from collections.abc import Sequence

from rlcore import algos
from rlcore.config import resolve
from rlcore.config.schema import Config
from rlcore.envs import registry as envs
from rlcore.rewards import registry

SECTIONS = {"algo": algos.config_class, "reward": registry.config_class, "env": envs.config_class}


def parse(argv: Sequence[str]) -> Config:
    """The configuration that the command line describes. ConfigError in one sentence."""
    return resolve.parse(argv, SECTIONS)
