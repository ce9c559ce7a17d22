"""TOPR: a constant weight for good responses, a tapered weight for bad responses. arXiv:2503.14286

    r = p(a_t) / p_old(a_t)                       level token
    r = prod_t p(a_t) / p_old(a_t)                level sequence
    L = -positive_weight A log p(a_t)             score > 0
    L = -negative_weight sg(min(r, 1)) A log p(a_t)      else

`score` is the raw reward, before shaping and baseline.

Differs from the paper: the ratio is per token unless level is sequence, the advantage replaces the
return, and a score of 0 counts as negative. Equals ROLL pg_variant "topr" (level token) with
topr_positive_weight and topr_negative_weight (weighted TOPR).
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from rlcore.algos import sequence
from rlcore.algos.base import AlgoConfig
from rlcore.tensors import LossInputs, LossOutput
from rlcore.utils.bounds import at_least


@dataclass(frozen=True, kw_only=True)
class TOPRConfig(AlgoConfig):
    """Keys of `--algo topr`."""

    uses_score: ClassVar[bool] = True

    level: Literal["token", "sequence"] = "token"
    """Ratio, capped at 1, that scales responses with a score of 0 or less. `token`: the ratio of
    each token (ROLL). `sequence`: the ratio of the whole sequence (paper)."""
    positive_weight: Annotated[float, at_least(0)] = 1.0
    """Weight of responses with a score above 0."""
    negative_weight: Annotated[float, at_least(0)] = 1.0
    """Weight of responses with a score of 0 or less."""


def loss(x: LossInputs, cfg: TOPRConfig) -> LossOutput:
    """Return the policy loss [T] and, as metrics, the shares of tokens whose ratio is capped at 1
    and of tokens in positive responses."""
    d = (x.log_probs - x.old_log_probs).detach()
    if cfg.level == "sequence":
        d = sequence.total(d, x.mask, x.sequence, x.num_sequences)[x.sequence]
    taper = d.clamp(max=0).exp()
    good = x.score > 0
    weight = torch.where(good, cfg.positive_weight, cfg.negative_weight * taper)
    metrics = {
        "actor/pg_clipfrac": (~good & (d > 0)).float(),
        "algo/positive": good.float(),
    }
    return LossOutput(per_token=-weight * x.advantage * x.log_probs * x.correction, metrics=metrics)
