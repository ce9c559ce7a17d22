"""REINFORCE with a leave-one-out baseline, summed over the response. Williams 1992,
arXiv:2402.14740

    L = -w A log p(a_t),        A_i = R_i - mean of the other rewards       (adv_estimator rloo)

w is the rollout-correction weight; with bypass_mode it is p / p_sampler of the current forward
pass.

Same as arXiv:2402.14740. The loss is summed over tokens, because the response is one action.
Equals verl `compute_policy_loss_reinforce`, the loss of its preset bypass_pg_is (bypass_mode,
rollout_is sequence).
"""

from dataclasses import dataclass
from typing import ClassVar

from rlcore.algos.base import Aggregation, AlgoConfig, Estimator
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig(AlgoConfig):
    """Keys of `--algo reinforce`."""

    has_ratio: ClassVar[bool] = False

    adv_estimator: Estimator = "rloo"
    """Advantage estimator."""
    loss_agg_mode: Aggregation = "seq-mean-token-sum"
    """Aggregation of per-token losses."""


def loss(x: LossInputs, cfg: ReinforceConfig) -> LossOutput:
    """Return the policy loss [T]."""
    return LossOutput(per_token=-x.advantage * x.log_probs * x.correction, metrics={})
