"""Compute the learning rate of an update from the configured schedule.

Own code instead of Megatron's OptimizerParamScheduler: a pure function has no state to save.
"""

import math

from rlcore.config.schema import TrainConfig
from rlcore.utils.errors import ConfigError


def learning_rate(train: TrainConfig, update: int, total_updates: int = 0) -> float:
    """Return the learning rate of update number `update`, counted from 0.

    In warm-up, the rate rises linearly from lr / warmup to lr. With decay, the rate then falls to
    `min_lr` at update `lr_decay_updates` (if 0: `total_updates`) and stays there.
    """
    warmup = train.lr_warmup_updates
    if update < warmup:
        return train.lr * (update + 1) / warmup
    if train.lr_schedule == "constant":
        return train.lr
    end = train.lr_decay_updates or total_updates
    if end <= 0:
        raise ConfigError(
            f"--train.lr_schedule {train.lr_schedule}: needs an end; set --train.lr_decay_updates"
        )
    done = min(1.0, (update - warmup) / max(1, end - warmup))
    if train.lr_schedule == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return train.lr + (train.min_lr - train.lr) * done
