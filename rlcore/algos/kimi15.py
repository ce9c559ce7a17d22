"""Kimi k1.5: policy gradient plus the squared log-ratio to the old policy. arXiv:2501.12599 eq. 3

    d = log p(a_t) - log p_old(a_t)
    L = -A log p(a_t) + tau / 2 d^2,        A = R - mean R

Differs from the paper, whose d is the sum over the response: here d is per token, as in ROLL.
d is not clamped, because its gradient pulls p back to p_old even if d is large. The correction
weight multiplies both terms, as in ROLL. Equals ROLL pg_variant "kimi15" (`_compute_kimi15_loss`)
and verl `compute_policy_loss_dro`, the gradient of DRO (arXiv:2405.19107), with tau = dro_beta.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from rlcore.algos.base import AlgoConfig
from rlcore.tensors import LossInputs, LossOutput
from rlcore.utils.bounds import at_least


@dataclass(frozen=True, kw_only=True)
class Kimi15Config(AlgoConfig):
    """Keys of `--algo kimi15`."""

    has_ratio: ClassVar[bool] = False

    norm_adv_by_std: bool = False
    """Whether to divide the advantages by their group's standard deviation; the paper only
    subtracts the mean."""
    tau: Annotated[float, at_least(0)] = 0.1
    """Coefficient of the squared log-ratio to the old policy."""


def loss(x: LossInputs, cfg: Kimi15Config) -> LossOutput:
    """Return the policy loss [T] and, as a metric, its term tau / 2 d^2."""
    pull = cfg.tau / 2 * (x.log_probs - x.old_log_probs).square()
    policy = (pull - x.advantage * x.log_probs) * x.correction
    return LossOutput(per_token=policy, metrics={"algo/pull": pull.detach()})
