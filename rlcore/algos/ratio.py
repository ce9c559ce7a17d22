"""Functions that losses share: the ratio of learner to old policy, PPO's clipped loss, and the
tokens of largest covariance.

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


def covariance(x: LossInputs) -> Tensor:
    """Return (A - mean A) (log p - mean log p) of each token, [T], detached, with means over the
    trained tokens of the micro-batch; -inf outside the mask."""
    count = x.mask.sum().clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        return values - torch.where(x.mask, values, 0.0).sum() / count

    product = centred(x.advantage) * centred(x.log_probs.detach())
    return torch.where(x.mask, product, -torch.inf)


def largest(values: Tensor, allowed: Tensor, mask: Tensor, share: float) -> Tensor:
    """Return the max(1, share N) tokens of largest value among the allowed ones, or all of these,
    [T] bool; N: tokens in the mask. Does not wait for the device."""
    order = torch.where(allowed, values, -torch.inf).argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return allowed & (rank < (mask.sum().double() * share).floor().clamp(min=1))
