"""CISPO with only the upper bound, as in MiniMax-M1. arXiv:2506.13585, arXiv:2510.13786

    r = p(a_t) / p_old(a_t)
    L = -sg(min(r, clip_max)) A log p(a_t)

Differs from the M1 paper, which writes the bound as 1 + eps_high and does not state its value:
clip_max bounds the ratio itself, and 5 is TRL's setting of ScaleRL (arXiv:2510.13786).
Equals TRL loss_type "cispo" with epsilon_high = clip_max. `cispo` has the two-sided bound.
"""

from dataclasses import dataclass
from typing import Annotated

from rlcore.algos import ratio
from rlcore.algos.base import AlgoConfig
from rlcore.tensors import LossInputs, LossOutput
from rlcore.utils.bounds import above


@dataclass(frozen=True, kw_only=True)
class CISPOM1Config(AlgoConfig):
    """Keys of `--algo cispo_m1`."""

    clip_max: Annotated[float, above(0, unbounded=True, note=", or no token has a gradient")] = 5.0
    """Maximum weight p / p_old of a token; inf: no bound."""


def loss(x: LossInputs, cfg: CISPOM1Config) -> LossOutput:
    """Return the policy loss [T] and, as a metric, the share of clipped weights."""
    r = ratio.log_ratio(x).detach().exp()
    weight = r.clamp(max=cfg.clip_max)
    return LossOutput(
        per_token=-weight * x.advantage * x.log_probs * x.correction,
        metrics={"actor/pg_clipfrac": (r > weight).float()},
    )
