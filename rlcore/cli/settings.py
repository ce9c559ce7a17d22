"""Command line to configuration, with the registries of this installation."""

from collections.abc import Callable, Sequence

from rlcore import algos
from rlcore.config import resolve
from rlcore.config.schema import Config
from rlcore.envs import registry as envs
from rlcore.rewards import registry

SECTIONS = {"reward": registry.config_class, "env": envs.config_class, "algo": algos.config_class}
"""An algorithm's module imports torch, so it comes last."""


def parse(argv: Sequence[str], early: Callable[[Config], None] | None = None) -> Config:
    """The configuration that the command line describes. ConfigError in one sentence."""
    return resolve.parse(argv, SECTIONS, early)
