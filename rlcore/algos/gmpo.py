"""GMPO: the geometric mean of a sequence's ratios, each ratio clipped first. arXiv:2507.20673

    d_t = log p(a_t) - log p_old(a_t)
    c_t = min(d_t, high) where A > 0,  max(d_t, -low) where A < 0         clip in log space
    L   = -A exp(mean_t c_t) exp(mean_t log w_t)                          one number per sequence

A is the mean advantage of the sequence. The correction weights w_t enter by their geometric mean.
Every token of the sequence has the loss L, so the mean over the tokens is L again.

Same as the paper. Equals verl `compute_policy_loss_geo_mean`, except that verl averages over the
sequences of a micro-batch (here: of the update) and adds 1e-10 to w before the logarithm. Here d_t
is also clamped to +-20, and the clip fractions count only tokens whose gradient
is clipped: A > 0 in pg_clipfrac, A < 0 in pg_clipfrac_lower. TRL: trl.experimental.gmpo.
"""

from dataclasses import dataclass

import torch

from rlcore.algos import ratio, sequence
from rlcore.algos.base import Aggregation, AlgoConfig, Clip
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class GMPOConfig(AlgoConfig):
    """Keys of `--algo gmpo`."""

    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    """Aggregation of per-token losses."""
    clip_low: Clip = 0.4
    """Lower clip range; the log-ratio log(p / p_old) is clipped at -clip_low."""
    clip_high: Clip = 0.4
    """Upper clip range; the log-ratio log(p / p_old) is clipped at clip_high."""


def loss(x: LossInputs, cfg: GMPOConfig) -> LossOutput:
    """Return the policy loss [T], equal within a sequence, and, as metrics, the clip fractions."""
    where = (x.mask, x.sequence, x.num_sequences)
    d, sign = ratio.log_ratio(x), x.advantage.sign()  # [T]
    held = d.clamp(-cfg.clip_low, cfg.clip_high)
    kept = sign * torch.minimum(sign * d, sign * held)
    r = sequence.mean(kept, *where).exp()  # [B]
    weight = sequence.mean(x.correction.log(), *where).exp()
    policy = -sequence.mean(x.advantage, *where) * r * weight
    metrics = {
        "actor/pg_clipfrac": ((sign > 0) & (d > cfg.clip_high)).float(),
        "actor/pg_clipfrac_lower": ((sign < 0) & (d < -cfg.clip_low)).float(),
    }
    return LossOutput(per_token=policy[x.sequence], metrics=metrics)
