"""KL-Cov: pull the few tokens that would lower the entropy most towards p_old. arXiv:2505.22617

    c_t = (A_t - mean A) (log p(a_t) - mean log p)            means over the micro-batch
    L   = -r A, r = p(a_t) / p_old(a_t)
    L   = -r A + ppo_kl_coef |log r| for the max(1, kl_cov_ratio N) tokens of largest c_t;
          N: trained tokens of the micro-batch

Nothing is clipped. Means and N are those of a micro-batch, as in verl, so that the gradient depends
on train.tokens_per_micro_batch. In the first update of a step r is 1, and the term has no gradient.

Equals verl `compute_policy_loss_kl_cov`, except that log r is clamped to +-20.
"""

from dataclasses import dataclass
from typing import Annotated

import torch

from rlcore.algos import ratio
from rlcore.algos.base import AlgoConfig
from rlcore.tensors import LossInputs, LossOutput
from rlcore.utils.bounds import above, at_least


@dataclass(frozen=True, kw_only=True)
class KLCovConfig(AlgoConfig):
    """Keys of `--algo kl_cov`."""

    kl_cov_ratio: Annotated[float, above(0, at_most=1)] = 2e-4
    """Share of a micro-batch's tokens that have the KL term, at least one token."""
    ppo_kl_coef: Annotated[float, at_least(0)] = 1.0
    """Coefficient of the KL term."""


def loss(x: LossInputs, cfg: KLCovConfig) -> LossOutput:
    """Return the policy loss [T] and, as a metric, the share of tokens with the KL term."""
    d = ratio.log_ratio(x)
    cov = ratio.covariance(x)
    pulled = ratio.largest(cov, x.mask, x.mask, cfg.kl_cov_ratio)
    policy = -d.exp() * x.advantage + torch.where(pulled, cfg.ppo_kl_coef * d.abs(), 0.0)
    metrics = {"algo/cov_pulled": pulled.float()}
    return LossOutput(per_token=policy * x.correction, metrics=metrics)
