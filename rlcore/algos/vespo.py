"""VESPO: a smooth weight of whole sequences instead of a clip. arXiv:2602.10693

    W   = prod_t p(a_t) / p_old(a_t)                         one number per sequence
    phi = W^k exp(lambda (1 - W))                            k and lambda by the sign of A
    L   = -sg(phi) A log p(a_t)

phi is 1 at W = 1, largest at W = k / lambda, and falls to 0 on both sides.

W of the paper is p / p_sampler, which is --algo.bypass_mode; otherwise the correction weight
multiplies the loss. The log of a token's ratio, and that of W, are clamped to +-20. Equals TRL
loss_type "vespo", except that TRL multiplies its token weights (use_vllm) into W.
"""

from dataclasses import dataclass
from typing import Annotated

import torch

from rlcore.algos import ratio, sequence
from rlcore.algos.base import LOG_LIMIT, AlgoConfig
from rlcore.tensors import LossInputs, LossOutput
from rlcore.utils.bounds import above, at_least


@dataclass(frozen=True, kw_only=True)
class VESPOConfig(AlgoConfig):
    """Keys of `--algo vespo`."""

    k_pos: Annotated[float, at_least(0)] = 2.0
    """Exponent of W where the advantage is 0 or more; larger: responses that the policy has left
    count less."""
    lambda_pos: Annotated[float, above(0)] = 3.0
    """Decay of the weight for large W where the advantage is 0 or more."""
    k_neg: Annotated[float, at_least(0)] = 3.0
    """Exponent of W where the advantage is negative."""
    lambda_neg: Annotated[float, above(0)] = 2.0
    """Decay of the weight for large W where the advantage is negative."""


def loss(x: LossInputs, cfg: VESPOConfig) -> LossOutput:
    """Return the policy loss [T] and, as a metric, the weight phi."""
    d = ratio.log_ratio(x).detach().double()
    log_w = sequence.total(d, x.mask, x.sequence, x.num_sequences).clamp(-LOG_LIMIT, LOG_LIMIT)
    log_w = log_w[x.sequence]  # [T]
    good = x.advantage >= 0
    k = torch.full_like(log_w, cfg.k_neg).masked_fill(good, cfg.k_pos)
    decay = torch.full_like(log_w, cfg.lambda_neg).masked_fill(good, cfg.lambda_pos)
    phi = (k * log_w + decay * (1 - log_w.exp())).exp().to(x.log_probs.dtype)
    policy = -phi * x.advantage * x.log_probs * x.correction
    return LossOutput(per_token=policy, metrics={"algo/phi": phi})
