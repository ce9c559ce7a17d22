"""GSPO: ratio and clip of whole sequences instead of tokens. arXiv:2507.18071

    s   = exp(mean_t (log p(a_t) - log p_old(a_t)))          one number per sequence
    s_t = sg(s) p(a_t) / sg(p(a_t))                          replaces s at level token (GSPO-token)
    L   = -min(s A, clip(s, 1 - low, 1 + high) A)

L is averaged over a response's tokens, then over responses. If advantage and correction weight are
the same for all tokens of a response, both levels have the same value and gradient. Otherwise, at
token level, a token's advantage and weight act only on that token.

Differs from the paper: GSPO-token is the default, because verl computes it and correction weights
are per token; log s is at most 10, as in verl.
Equals verl `compute_policy_loss_gspo` (token), TRL importance_sampling_level "sequence" with
loss_type "grpo". LUSPO (arXiv:2602.05261, TRL loss_type "luspo") multiplies the loss of a response
by its length: level sequence, loss_agg_mode seq-mean-token-sum, clips of 2e-3 and 2.5e-3.
"""

from dataclasses import dataclass
from typing import Literal

from rlcore.algos import ratio, sequence
from rlcore.algos.base import Aggregation, AlgoConfig, Clip
from rlcore.tensors import LossInputs, LossOutput

LOG_MAX = 10.0  # maximum log of a sequence's ratio, as in verl


@dataclass(frozen=True, kw_only=True)
class GSPOConfig(AlgoConfig):
    """Keys of `--algo gspo`."""

    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    """Aggregation of per-token losses."""
    level: Literal["sequence", "token"] = "token"
    """Quantity that carries the gradient. `sequence`: the sequence's ratio. `token`: each token's
    log-prob, with the sequence's ratio as a constant factor (GSPO-token)."""
    clip_low: Clip = 3e-4
    """Lower clip range; the sequence's ratio is clipped at 1 - clip_low."""
    clip_high: Clip = 4e-4
    """Upper clip range; the sequence's ratio is clipped at 1 + clip_high."""


def loss(x: LossInputs, cfg: GSPOConfig) -> LossOutput:
    """Return the policy loss [T] and, as a metric, the clip fraction."""
    where = (x.mask, x.sequence, x.num_sequences)
    log_s = sequence.mean(x.log_probs - x.old_log_probs, *where)[x.sequence]  # [T]
    if cfg.level == "token":
        log_s = log_s.detach() + (x.log_probs - x.log_probs.detach())
    s = log_s.clamp(max=LOG_MAX).exp()
    policy, metrics = ratio.clipped(s, x.advantage, cfg.clip_low, cfg.clip_high)
    return LossOutput(per_token=policy * x.correction, metrics=metrics)
