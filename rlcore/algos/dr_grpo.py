"""Dr. GRPO: GRPO without its length bias and its difficulty bias. arXiv:2503.20783

    A = R - mean R                                           no division by the group's std
    r = p(a_t) / p_old(a_t)
    L = -min(r A, clip(r, 1 - low, 1 + high) A)
    L = min(L, -dual A)                                      dual clip, only where A < 0

L is summed over a response, divided by the constant rollout.max_tokens instead of the response's
length, then averaged over responses.

Differs from the paper in verl's dual clip; 0 turns it off. Equals verl
`compute_policy_loss_vanilla` with norm_adv_by_std_in_grpo False. TRL: loss_type
"dr_grpo", scale_rewards "none".
"""

from dataclasses import dataclass

from rlcore.algos import ratio
from rlcore.algos.base import Aggregation, AlgoConfig, Clip, DualClip
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class DrGRPOConfig(AlgoConfig):
    """Keys of `--algo dr_grpo`."""

    norm_adv_by_std: bool = False
    """Whether to divide the advantages by their group's standard deviation, which causes a
    difficulty bias."""
    loss_agg_mode: Aggregation = "seq-mean-token-sum-norm"
    """Aggregation of per-token losses; a mean over each response causes a length bias."""
    clip_low: Clip = 0.2
    """Lower clip range; the ratio p / p_old is clipped at 1 - clip_low."""
    clip_high: Clip = 0.2
    """Upper clip range; the ratio p / p_old is clipped at 1 + clip_high."""
    clip_dual: DualClip = 3.0
    """Dual clip, the maximum ratio where the advantage is negative; 0: off."""


def loss(x: LossInputs, cfg: DrGRPOConfig) -> LossOutput:
    """Return the policy loss [T] and, as metrics, the clip fractions."""
    r = ratio.log_ratio(x).exp()
    policy, metrics = ratio.clipped(r, x.advantage, cfg.clip_low, cfg.clip_high, cfg.clip_dual)
    return LossOutput(per_token=policy * x.correction, metrics=metrics)
