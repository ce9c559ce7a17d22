"""GPG: the plain policy gradient, with advantages scaled up to make up for groups without gradient.
arXiv:2504.02546

    L = -A log p(a_t),        A = alpha (R - mean R)          (adv_estimator gpg)

Differs from the paper in alpha, which is verl's: the number of samples divided by the number of
samples with a reward other than 0. Equals verl `compute_policy_loss_gpg`.
"""

from dataclasses import dataclass
from typing import ClassVar

from rlcore.algos.base import AlgoConfig, Estimator
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class GPGConfig(AlgoConfig):
    """Keys of `--algo gpg`."""

    has_ratio: ClassVar[bool] = False

    adv_estimator: Estimator = "gpg"
    """Advantage estimator."""


def loss(x: LossInputs, cfg: GPGConfig) -> LossOutput:
    """Return the policy loss [T]."""
    return LossOutput(per_token=-x.advantage * x.log_probs * x.correction, metrics={})
