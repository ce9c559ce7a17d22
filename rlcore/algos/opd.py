"""On-policy distillation: a teacher scores every token that the policy samples.
arXiv:2306.13649 (beta 1); https://thinkingmachines.ai/blog/on-policy-distillation

    A = -teacher_kl_coef (log p_old(a_t) - log p_teacher(a_t))
    r = p(a_t) / p_old(a_t)
    L = -min(r A, clip(r, 1 - low, 1 + high) A)
    L = min(L, -dual A)                                      dual clip, only where A < 0

The expected gradient is that of KL(p || p_teacher) at each sampled prefix, up to the clips. Rewards
are measured, not trained on. To train on both, set `teacher_kl_coef` with another algorithm, such
as grpo: the objective subtracts the same term from its advantages.

Differs from the sources: clips; p_old is the learner's, not the sampler's (`bypass_mode` takes the
sampler's). Equals verl's distillation loss_mode "k1" with use_policy_gradient and policy loss
"vanilla".
"""

from dataclasses import dataclass
from typing import Annotated

from rlcore.algos import ratio
from rlcore.algos.base import AlgoConfig, Clip, DualClip, Estimator
from rlcore.tensors import LossInputs, LossOutput
from rlcore.utils.bounds import above


@dataclass(frozen=True, kw_only=True)
class OPDConfig(AlgoConfig):
    """Keys of `--algo opd`."""

    adv_estimator: Estimator = "none"
    """Advantage estimator of rewards; `none` trains on the teacher alone."""
    teacher_kl_coef: Annotated[float, above(0)] = 1.0
    """Coefficient of the reverse KL to --teacher.models in each token's advantage."""
    clip_low: Clip = 0.2
    """Lower clip range; the ratio p / p_old is clipped at 1 - clip_low."""
    clip_high: Clip = 0.2
    """Upper clip range; the ratio p / p_old is clipped at 1 + clip_high."""
    clip_dual: DualClip = 3.0
    """Dual clip, the maximum ratio where the advantage is negative; 0: off."""


def loss(x: LossInputs, cfg: OPDConfig) -> LossOutput:
    """Return the policy loss [T] and, as metrics, the clip fractions."""
    r = ratio.log_ratio(x).exp()
    policy, metrics = ratio.clipped(r, x.advantage, cfg.clip_low, cfg.clip_high, cfg.clip_dual)
    return LossOutput(per_token=policy * x.correction, metrics=metrics)
