"""DPPO: bound how far a token's probability moves, not its ratio. arXiv:2602.04879

    r = p(a_t) / p_old(a_t)
    D = p(a_t) - p_old(a_t)                                             divergence tv
    D = sign(p(a_t) - p_old(a_t)) KL((p_old, 1 - p_old) || (p, 1 - p))  divergence kl
    L = -sg(min(r, clip_max)) A log p(a_t)
    L = 0                           where A > 0 and D > clip_high, or A < 0 and D < -clip_low

Both divergences look at the sampled token against all others together (the paper's Binary-TV and
Binary-KL). A rare token may change its ratio a lot, a likely token may not.

p_old of the paper is the sampler, which is --algo.bypass_mode. Equals verl
`compute_policy_loss_dppo_tv` and `compute_policy_loss_dppo_kl`; its scripts use 0.15 and 0.05.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from rlcore.algos import ratio
from rlcore.algos.base import AlgoConfig, Clip
from rlcore.tensors import LossInputs, LossOutput
from rlcore.utils.bounds import at_least

LEAST = 1e-8  # added to 1 - p, which may be 0, as in verl


@dataclass(frozen=True, kw_only=True)
class DPPOConfig(AlgoConfig):
    """Keys of `--algo dppo`."""

    divergence: Literal["tv", "kl"] = "tv"
    """Divergence between p_old and p at the sampled token. `tv`: difference of the probabilities.
    `kl`: KL of token or not; clip_low and clip_high of 0.05 then suit."""
    clip_low: Annotated[float, at_least(0, unbounded=True)] = 0.15
    """Divergence beyond which a token of negative advantage, whose probability has fallen, has no
    gradient; inf: no bound."""
    clip_high: Annotated[float, at_least(0, unbounded=True)] = 0.15
    """Divergence beyond which a token of positive advantage, whose probability has risen, has no
    gradient; inf: no bound."""
    clip_max: Clip = 20.0
    """Maximum weight p / p_old of a token; inf: no bound."""


def loss(x: LossInputs, cfg: DPPOConfig) -> LossOutput:
    """Return the policy loss [T] and, as metrics, the shares of tokens without gradient and of
    other tokens whose weight is capped."""
    r = ratio.log_ratio(x).detach().exp()
    moved = divergence(cfg.divergence, x.log_probs.detach(), x.old_log_probs)
    cut = torch.where(x.advantage > 0, moved > cfg.clip_high, moved < -cfg.clip_low)
    policy = -r.clamp(max=cfg.clip_max) * x.advantage * x.log_probs * x.correction
    metrics = {
        "actor/pg_clipfrac": cut.float(),
        "actor/pg_clipfrac_lower": (~cut & (r > cfg.clip_max)).float(),
    }
    return LossOutput(per_token=torch.where(cut, 0.0, policy), metrics=metrics)


def divergence(kind: str, logp: Tensor, old: Tensor) -> Tensor:
    """Return how far each token's probability has moved, [T]; negative if it has fallen."""
    move = logp.exp() - old.exp()
    if kind == "tv":
        return move
    logp, old = logp.clamp(max=0), old.clamp(max=0)  # rounding may put them above 0
    rest, rest_old = LEAST - logp.expm1(), LEAST - old.expm1()
    kl = old.exp() * (old - logp) - old.expm1() * (rest_old / rest).log()
    return move.sign() * kl
