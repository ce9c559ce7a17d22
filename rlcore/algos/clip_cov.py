"""Clip-Cov: cut the gradient of a few tokens that would lower the entropy most. arXiv:2505.22617

    c_t = (A_t - mean A) (log p(a_t) - mean log p)            means over the micro-batch
    L   = PPO(r), r = p(a_t) / p_old(a_t), without a dual clip
    L   = 0 for max(1, clip_cov_ratio N) random tokens with clip_cov_lb < c_t < clip_cov_ub that
          the clip has not cut; N: trained tokens of the micro-batch

A positive covariance of advantage and log-prob lowers the entropy. Cut tokens still count in the
denominators. Means and N are those of a micro-batch, as in verl, so that the gradient depends on
train.tokens_per_micro_batch. A token's random number is a hash of its place among the trained
tokens and of its log-prob under the sampler, so that a rerun chooses the same tokens, and another
batch others.

Equals verl `compute_policy_loss_clip_cov`, except for the random choice and the clamp of log r to
+-20. Here pg_clipfrac counts PPO's clip and algo/cov_clipped the chosen tokens; verl counts the
chosen tokens alone.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rlcore.algos import ratio
from rlcore.algos.base import AlgoConfig, Clip
from rlcore.tensors import LossInputs, LossOutput
from rlcore.utils.bounds import above, finite


@dataclass(frozen=True, kw_only=True)
class ClipCovConfig(AlgoConfig):
    """Keys of `--algo clip_cov`."""

    clip_low: Clip = 0.2
    """Lower clip range; the ratio p / p_old is clipped at 1 - clip_low."""
    clip_high: Clip = 0.2
    """Upper clip range; the ratio p / p_old is clipped at 1 + clip_high."""
    clip_cov_ratio: Annotated[float, above(0, at_most=1)] = 2e-4
    """Share of a micro-batch's tokens whose gradient is cut, at least one token."""
    clip_cov_lb: Annotated[float, finite()] = 1.0
    """Lower bound of the covariance of tokens that may be cut."""
    clip_cov_ub: Annotated[float, above(0, unbounded=True)] = 5.0
    """Upper bound of the covariance of tokens that may be cut; inf: no bound."""

    def problems(self) -> list[str]:
        out = super().problems()
        if not self.clip_cov_lb < self.clip_cov_ub:
            out.append(
                f"--algo.clip_cov_lb {self.clip_cov_lb:g}: must be below algo.clip_cov_ub "
                f"{self.clip_cov_ub:g}; lower it, or raise clip_cov_ub"
            )
        return out


def loss(x: LossInputs, cfg: ClipCovConfig) -> LossOutput:
    """Return the policy loss [T] and, as metrics, the shares of tokens cut by PPO's clip and by
    their covariance."""
    r = ratio.log_ratio(x).exp()
    policy, metrics = ratio.clipped(r, x.advantage, cfg.clip_low, cfg.clip_high)
    cov = ratio.covariance(x)
    allowed = (
        (cov > cfg.clip_cov_lb) & (cov < cfg.clip_cov_ub) & (metrics["actor/pg_clipfrac"] == 0)
    )
    cut = ratio.largest(_draw(x), allowed, x.mask, cfg.clip_cov_ratio)
    metrics["algo/cov_clipped"] = cut.float()
    return LossOutput(per_token=torch.where(cut, 0.0, policy) * x.correction, metrics=metrics)


def _draw(x: LossInputs) -> Tensor:
    """Return a random number for each token [T], by splitmix64 without its last step. Products of
    int64 wrap around. Does not wait for the device."""
    bits = x.rollout_log_probs.detach().float().view(torch.int32).long()
    state = (bits << 24) ^ x.mask.cumsum(0)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        state = (state ^ (state >> shift)) * factor
    return (state >> 11).double()
