"""GRPO: the group mean is the baseline, the clipped ratio is the step. arXiv:2402.03300

    r_t = p(a_t) / p_old(a_t)
    L   = -sum_t w_t min(r_t A, clip(r_t, 1 - low, 1 + high) A) / N  (+ kl_coef KL - entropy_coef H)

w_t is the rollout-correction weight min(p_old / p_sampler, C), detached (`ratio.py`).

Differs from the paper: the upper clip is wider (DAPO's clip-higher), no reference KL by default,
the loss is averaged over all tokens of the update (`loss_agg_mode`), not per sequence first.
Shapes: T packed tokens of one micro-batch.
"""

from dataclasses import dataclass

from rlcore.algos.base import AlgoConfig
from rlcore.algos.kl import estimate
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(AlgoConfig):
    clip_low: float = 0.2
    """The ratio is held above 1 - clip_low."""
    clip_high: float = 0.28
    """The ratio is held below 1 + clip_high; larger keeps more exploration."""


def loss(x: LossInputs, cfg: GRPOConfig) -> LossOutput:
    """Per-token loss [T] and verl's metrics."""
    log_ratio = x.logp - x.logp_old  # [T]
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    gain, held = ratio * x.advantage, clipped * x.advantage
    policy = -gain.minimum(held) * x.correction
    per_token = policy - cfg.entropy_coef * x.entropy if cfg.entropy_coef else policy
    metrics = {
        "actor/pg_loss": policy.detach(),
        "actor/pg_clipfrac": (held < gain).float(),
        "actor/ppo_kl": -log_ratio.detach(),
        "actor/entropy": x.entropy.detach(),
    }
    if cfg.kl_coef:
        kl = estimate(cfg.kl_type, x.logp, x.logp_ref)
        per_token = per_token + cfg.kl_coef * kl
        metrics["actor/kl_loss"] = kl.detach()
    return LossOutput(per_token=per_token, metrics=metrics)
