"""Run the cheap checks at every start of a rank on GPUs."""

import os

import torch

from rlcore.cli.builders.model import model_config
from rlcore.cli.checks import CheckResult, disk, machine
from rlcore.config.schema import Config
from rlcore.trainer import callbacks
from rlcore.utils.errors import ConfigError


def check(cfg: Config) -> list[str]:
    """Return warnings about this rank's machine. Make no CUDA context: `world.join` first sets
    variables that CUDA reads when it makes one.

    Raises:
        ConfigError: the run cannot work here; one line for each reason.
    """
    callbacks.find(cfg.run.callbacks)
    found = [machine.driver()]
    if torch.cuda.is_available():
        found += _with_gpus(cfg)
    if failed := [result.text for result in found if result.state == "FAIL"]:
        raise ConfigError("\n".join(failed))
    return [f"{result.check}: {result.text}" for result in found if result.state == "WARN"]


def _with_gpus(cfg: Config) -> list[CheckResult]:
    found = [machine.gpus()]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        found.append(machine.libcudart(cfg, dict(os.environ)))
        if not cfg.mux.url:  # with it, other jobs use the GPUs between the phases of this one
            found.append(machine.memory())
    if os.environ.get("RANK", "0") == "0":
        found.append(disk.check(cfg, model_config(cfg)))
    return found
