"""Functions that losses share: the ratio of learner to old policy, and PPO's clipped loss.

Shapes: T packed tokens of one micro-batch.
"""

from math import isfinite

import torch
from torch import Tensor

from rlcore.algos.base import LOG_LIMIT
from rlcore.tensors import LossInputs


def log_ratio(x: LossInputs) -> Tensor:
    """Return log(p / p_old), [T], clamped to +-20 as in verl; a clamped value has no gradient."""
    return (x.log_probs - x.old_log_probs).clamp(-LOG_LIMIT, LOG_LIMIT)


def clipped(
    ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped loss [T] and the clip fractions.

        L = -min(r A, clip(r, 1 - low, 1 + high) A)
        L = min(L, -dual A)                     dual clip, only where A < 0 (arXiv:1912.09729)

    If `dual` is 0 or inf, there is no dual clip.
    """
    free = -ratio * advantage
    held = -ratio.clamp(1 - low, 1 + high) * advantage
    policy = torch.maximum(free, held)
    metrics = {"actor/pg_clipfrac": (held > free).float()}
    if dual > 0 and isfinite(dual):
        ceiling = -dual * advantage
        over = (advantage < 0) & (policy > ceiling)
        policy = torch.where(over, ceiling, policy)
        metrics["actor/pg_clipfrac_lower"] = over.float()
    return policy, metrics
