"""ROLL's truncated importance sampling: the ratio is a detached weight, clamped to 0 to 1.

    r = p(a_t) / p_old(a_t)
    L = -sg(clip(r, clip_min, clip_max)) A log p(a_t)

The TIS between sampler and learner is another one: `rollout_is token`, which works with every loss
and caps p_old / p_sampler (default: at 2). Equals ROLL pg_variant "tis" (`_compute_tis_loss`).
"""

from dataclasses import dataclass

from rlcore.algos import ratio
from rlcore.algos.base import AlgoConfig, Clip
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class TISRatio01Config(AlgoConfig):
    """Keys of `--algo tis_ratio01`."""

    clip_min: Clip = 0.0
    """Minimum weight p / p_old of a token."""
    clip_max: Clip = 1.0
    """Maximum weight p / p_old of a token; inf: no bound."""

    def problems(self) -> list[str]:
        out = super().problems()
        if self.clip_min > self.clip_max:
            out.append(
                f"--algo.clip_min {self.clip_min}: must be at most algo.clip_max {self.clip_max}"
            )
        return out


def loss(x: LossInputs, cfg: TISRatio01Config) -> LossOutput:
    """Return the policy loss [T] and, as metrics, the shares of clamped weights."""
    r = ratio.log_ratio(x).detach().exp()
    weight = r.clamp(cfg.clip_min, cfg.clip_max)
    metrics = {
        "actor/pg_clipfrac": (r != weight).float(),
        "actor/pg_clipfrac_lower": (r < weight).float(),
    }
    return LossOutput(per_token=-weight * x.advantage * x.log_probs * x.correction, metrics=metrics)
