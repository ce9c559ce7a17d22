"""PPO: advantages from a critic, and a clipped ratio that keeps the policy near the old policy.
arXiv:1707.06347

    r = p(a_t) / p_old(a_t)
    L = -min(r A, clip(r, 1 - low, 1 + high) A)
    L = min(L, -dual A)                                      dual clip, only where A < 0

Differs from the paper in the dual clip (arXiv:1912.09729): without it, a token with a negative
advantage that became much more likely has an unbounded loss. Lower and upper clip have own keys.
Equals verl `compute_policy_loss_vanilla`. The same loss with group baselines is grpo.
"""

from dataclasses import dataclass

from rlcore.algos import ratio
from rlcore.algos.base import AlgoConfig, Clip, DualClip, Estimator
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class PPOConfig(AlgoConfig):
    """Keys of `--algo ppo`."""

    adv_estimator: Estimator = "gae"
    """Advantage estimator; gae trains a critic."""
    clip_low: Clip = 0.2
    """Lower clip range; the ratio p / p_old is clipped at 1 - clip_low."""
    clip_high: Clip = 0.2
    """Upper clip range; the ratio p / p_old is clipped at 1 + clip_high."""
    clip_dual: DualClip = 3.0
    """Dual clip, the maximum ratio where the advantage is negative; 0: off."""


def loss(x: LossInputs, cfg: PPOConfig) -> LossOutput:
    """Return the policy loss [T] and, as metrics, the clip fractions."""
    r = ratio.log_ratio(x).exp()
    policy, metrics = ratio.clipped(r, x.advantage, cfg.clip_low, cfg.clip_high, cfg.clip_dual)
    return LossOutput(per_token=policy * x.correction, metrics=metrics)
