"""CISPO: the ratio is a clipped detached weight, so no token loses its gradient. arXiv:2506.13585

    r = p(a_t) / p_old(a_t)
    L = -sg(clip(r, 1 - low, 1 + high)) A log p(a_t)
    L = 0 where A > 0 and r > 1 + high, or A < 0 and r < 1 - low          with unified_mask

Differs from the paper, which has no lower bound and does not state its upper bound: here both
bounds are verl's clip_ratio. `clip_low` of 1 or more has no effect (verl's example sets 10);
cispo_m1 has only the upper bound. Masked tokens still count in the denominator, as in ROLL.
Equals verl `compute_policy_loss_cispo` and ROLL `_compute_cispo_loss` (there low = high = 0.1).
"""

from dataclasses import dataclass

import torch

from rlcore.algos import ratio
from rlcore.algos.base import AlgoConfig, Clip
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class CISPOConfig(AlgoConfig):
    """Keys of `--algo cispo`."""

    clip_low: Clip = 0.2
    """Lower clip range; the weight p / p_old is clipped at 1 - clip_low; 1 or more: no bound."""
    clip_high: Clip = 0.2
    """Upper clip range; the weight p / p_old is clipped at 1 + clip_high."""
    unified_mask: bool = False
    """Whether to remove the gradient of tokens that PPO's clip would remove."""


def loss(x: LossInputs, cfg: CISPOConfig) -> LossOutput:
    """Return the policy loss [T] and, as metrics, the shares of clipped weights."""
    r = ratio.log_ratio(x).detach().exp()
    weight = r.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    policy = -weight * x.advantage * x.log_probs * x.correction
    metrics = {
        "actor/pg_clipfrac": (r != weight).float(),
        "actor/pg_clipfrac_lower": (r < weight).float(),
    }
    if cfg.unified_mask:
        silent = ((x.advantage > 0) & (r > weight)) | ((x.advantage < 0) & (r < weight))
        policy = torch.where(silent, 0.0, policy)
        metrics["algo/silenced"] = silent.float()
    return LossOutput(per_token=policy, metrics=metrics)
