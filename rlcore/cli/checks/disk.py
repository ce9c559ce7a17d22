"""Check the free space on the disk of the run's folder."""

import shutil

from rlcore.cli.builders.folder import run_folder
from rlcore.cli.checks import CheckResult
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.hf.lora import num_adapter_parameters
from rlcore.hf.names import num_parameters
from rlcore.trainer import resume
from rlcore.trainer.policies import estimator

BYTES = 12
"""Bytes of a parameter in a checkpoint: the main parameter and two moments, in float32."""
EXPORTED_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
GB = 1e9


def check(cfg: Config, hf: HFConfig) -> CheckResult:
    """Compare the free space with the size of the checkpoints and the exported model."""
    folder = at = run_folder(cfg).absolute()
    while not at.exists():
        at = at.parent
    free = shutil.disk_usage(at).free
    parameters = num_parameters(hf)
    one = checkpoint_bytes(cfg, hf)
    number = saves(cfg)
    export = parameters * EXPORTED_BYTES[cfg.model.dtype] if cfg.checkpoint.export_hf else 0
    text = f"{_gb(free)} free for {folder}"
    if not number and not export:
        return CheckResult("disk", "SKIP", f"{text}; the run saves nothing")
    missing = max(number - len(resume.found(folder)), min(number, 1))
    text += f"; {number} x {_gb(one)} of checkpoints, {_gb(export)} of exported model"
    remedy = "free some space, choose another --run.dir, or lower --checkpoint.keep"
    if free < min(number, 1) * one:
        return CheckResult("disk", "FAIL", f"{text}; {remedy}")
    if free < missing * one + export:
        return CheckResult("disk", "WARN", f"{text}; {remedy}")
    return CheckResult("disk", "PASS", text)


def checkpoint_bytes(cfg: Config, hf: HFConfig) -> int:
    """Return the bytes of a checkpoint: of the actor or its adapters, and of a whole critic."""
    parameters = num_parameters(hf)
    trained = num_adapter_parameters(hf, cfg.lora) if cfg.lora.rank else parameters
    return BYTES * (trained + (parameters if estimator(cfg) == "gae" else 0))


def saves(cfg: Config) -> int:
    """Return how many checkpoints are on disk at once, counting the one that is being written."""
    c, steps = cfg.checkpoint, cfg.run.steps
    total = steps // c.every if c.every else 0
    total += c.at_end and bool(not c.every or steps % c.every)
    return min(total, c.keep + c.keep_best + 1) if c.keep else total


def _gb(number: float) -> str:
    return f"{number / GB:.1f} GB"
