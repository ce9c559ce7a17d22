"""Dr. GRPO: GRPO without its two biases, of length and of difficulty. arXiv:2503.20783

    A = R - mean R                                           no division by the group's std
    r = p(a_t) / p_old(a_t)
    L = -min(r A, clip(r, 1 - low, 1 + high) A)              A >= 0
    L = min(that, -dual A)                                   A < 0

summed over a response, divided by the constant rollout.max_tokens and not by the response's
length, then averaged over responses.

Differs from the paper in the dual clip (verl's; 0 turns it off). Equals verl
`compute_policy_loss_vanilla` with norm_adv_by_std_in_grpo False. TRL: loss_type
"dr_grpo", scale_rewards "none".
"""

from dataclasses import dataclass

from rlcore.algos import ratio
from rlcore.algos.base import Aggregation, AlgoConfig, Clip, DualClip
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class DrGRPOConfig(AlgoConfig):
    norm_adv_by_std: bool = False
    """Divide a group's advantages by its standard deviation; that is the bias of difficulty."""
    loss_agg_mode: Aggregation = "seq-mean-token-sum-norm"
    """How per-token losses become one number; a mean over a response is the bias of length."""
    clip_low: Clip = 0.2
    """The ratio is held above 1 - clip_low."""
    clip_high: Clip = 0.2
    """The ratio is held below 1 + clip_high."""
    clip_dual: DualClip = 3.0
    """Where the advantage is negative the ratio counts up to this; 0 turns it off."""


def loss(x: LossInputs, cfg: DrGRPOConfig) -> LossOutput:
    """Return the policy loss [T] and clip fractions."""
    r = ratio.log_ratio(x).exp()
    policy, metrics = ratio.clipped(r, x.advantage, cfg.clip_low, cfg.clip_high, cfg.clip_dual)
    return LossOutput(per_token=policy * x.correction, metrics=metrics)
