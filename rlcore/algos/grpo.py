"""GRPO: PPO's clipped ratio, with the group's mean reward as baseline. arXiv:2402.03300

    r = p(a_t) / p_old(a_t)
    L = -w min(r A, clip(r, 1 - low, 1 + high) A)
    L = min(L, -w dual A)                                    dual clip, only where A < 0

w is the rollout-correction weight, detached; the objective adds KL, entropy and aggregation.

Differs from the paper: a wider upper clip (DAPO's clip-higher), a dual clip, and no reference KL
by default. The loss is averaged over all tokens of the update, not per sequence first.
Equals verl `compute_policy_loss_vanilla` with clip_ratio_high 0.28; TRL loss_type "dapo" with
epsilon_high 0.28 and delta 3, which is the dual clip.
"""

from dataclasses import dataclass

from rlcore.algos import ratio
from rlcore.algos.base import AlgoConfig, Clip, DualClip
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(AlgoConfig):
    """Keys of `--algo grpo`."""

    clip_low: Clip = 0.2
    """Lower clip range; the ratio p / p_old is clipped at 1 - clip_low."""
    clip_high: Clip = 0.28
    """Upper clip range; the ratio p / p_old is clipped at 1 + clip_high, and larger values keep
    more exploration."""
    clip_dual: DualClip = 3.0
    """Dual clip, the maximum ratio where the advantage is negative; 0: off."""


def loss(x: LossInputs, cfg: GRPOConfig) -> LossOutput:
    """Return the policy loss [T] and, as metrics, the clip fractions."""
    r = ratio.log_ratio(x).exp()
    policy, metrics = ratio.clipped(r, x.advantage, cfg.clip_low, cfg.clip_high, cfg.clip_dual)
    return LossOutput(per_token=policy * x.correction, metrics=metrics)
