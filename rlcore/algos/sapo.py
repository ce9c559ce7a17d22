"""SAPO: a smooth gate instead of a clip. arXiv:2511.20347

    r   = p(a_t) / p_old(a_t)
    tau = tau_pos where A > 0, else tau_neg
    L   = -(4 / tau) sigmoid(tau (r - 1)) A

The gradient is -g r A grad log p with the gate g = 4 s (1 - s), s = sigmoid(tau (r - 1)). g is 1 at
r = 1 and falls on both sides, faster if tau is larger. The metric algo/gate is g.

Same as the paper. Equals verl `compute_policy_loss_sapo`, TRL loss_type "sapo" and
AReaL `sapo_loss_fn` at token level (averaged there over tokens, here per response first).
"""

from dataclasses import dataclass
from typing import Annotated

import torch

from rlcore.algos import ratio
from rlcore.algos.base import Aggregation, AlgoConfig
from rlcore.tensors import LossInputs, LossOutput
from rlcore.utils.bounds import above


@dataclass(frozen=True, kw_only=True)
class SAPOConfig(AlgoConfig):
    """Keys of `--algo sapo`."""

    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    """Aggregation of per-token losses."""
    tau_pos: Annotated[float, above(0, note="; the paper has 1.0 and 1.05")] = 1.0
    """Steepness of the gate where the advantage is positive."""
    tau_neg: Annotated[float, above(0, note="; the paper has 1.0 and 1.05")] = 1.05
    """Steepness of the gate where the advantage is zero or negative."""


def loss(x: LossInputs, cfg: SAPOConfig) -> LossOutput:
    """Return the policy loss [T] and, as a metric, the gate's factor on the gradient."""
    r = ratio.log_ratio(x).exp()
    tau = torch.full_like(r, cfg.tau_neg).masked_fill(x.advantage > 0, cfg.tau_pos)
    s = torch.sigmoid(tau * (r - 1))
    gate = (4 * s * (1 - s)).detach()
    return LossOutput(
        per_token=-(4 / tau) * s * x.advantage * x.correction, metrics={"algo/gate": gate}
    )
