"""GKD: generalised Jensen-Shannon divergence between teacher and policy, at every sampled token.
arXiv:2306.13649

    q: teacher, p: policy, over the teacher's K likeliest tokens and all others as one
    m = beta q + (1 - beta) p
    L = beta KL(q || m) + (1 - beta) KL(p || m)              0 < beta < 1
    L = KL(q || p)                                           beta 0, forward KL
    L = KL(p || q)                                           beta 1, reverse KL

The gradient goes through p, not through the choice of the samples. Rewards are measured, not
trained on. `tail` off leaves out the other tokens: then L is not a divergence of distributions, and
may be negative.

Differs from the paper: K tokens (--teacher.top_k) instead of the whole vocabulary. Equals TRL's
GKDTrainer (`generalized_jsd_loss`) if K is the vocabulary; with beta 0 and without tail verl's
distillation loss_mode "forward_kl_topk". The paper's and TRL's lambda draws each batch from the
policy or from the data; --data.demonstration_share mixes both in every update.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlcore.algos.base import AlgoConfig, Estimator, Share, Weighting
from rlcore.tensors import LossInputs, LossOutput

LEAST = 1e-6
"""Least probability of the other tokens together, which rounding may make 0."""


@dataclass(frozen=True, kw_only=True)
class GKDConfig(AlgoConfig):
    """Keys of `--algo gkd`."""

    has_ratio: ClassVar[bool] = False
    uses_teacher_top: ClassVar[bool] = True
    takes_demonstrations: ClassVar[bool] = True

    adv_estimator: Estimator = "none"
    """Advantage estimator; the loss has no advantages."""
    rollout_is: Weighting = "none"
    """Importance weight of the policy loss; the loss compares distributions, so it has none."""
    beta: Share = 0.5
    """Share of the teacher in the mixture m; 0: forward KL, 1: reverse KL."""
    tail: bool = True
    """Whether the tokens that are not among the teacher's likeliest count, as one."""

    def problems(self) -> list[str]:
        out = super().problems()
        for key, usual in (
            ("adv_estimator", "none"),
            ("rollout_is", "none"),
            ("off_policy_mask_threshold", 0),
        ):
            if getattr(self, key) != usual:
                out.append(
                    f"--algo.{key} {getattr(self, key)}: has no effect with --algo gkd; leave it "
                    f"at {usual}, or use --algo opd"
                )
        if self.teacher_kl_coef:
            out.append(
                f"--algo.teacher_kl_coef {self.teacher_kl_coef:g}: has no effect with --algo gkd, "
                "which has no advantages; leave it at 0, or use --algo opd"
            )
        return out


def loss(x: LossInputs, cfg: GKDConfig) -> LossOutput:
    """Return the divergence of each token [T] and, as metrics, the probability of the teacher's
    likeliest tokens under teacher and policy."""
    assert x.top_log_probs is not None and x.teacher_top_log_probs is not None
    q, p = x.teacher_top_log_probs.to(x.top_log_probs.dtype), x.top_log_probs
    metrics = {
        "actor/teacher_top_mass": q.exp().sum(-1),
        "actor/top_mass": p.detach().exp().sum(-1),
    }
    if cfg.tail:
        q, p = with_tail(q), with_tail(p)
    return LossOutput(per_token=divergence(q, p, cfg.beta), metrics=metrics)


def with_tail(logp: Tensor) -> Tensor:
    """Append the log-prob of all other tokens: [T, K] to [T, K + 1]."""
    rest = (1 - logp.exp().sum(-1, keepdim=True)).clamp(min=LEAST)
    return torch.cat([logp, rest.log()], -1)


def divergence(q: Tensor, p: Tensor, beta: float) -> Tensor:
    """Return the generalised Jensen-Shannon divergence [T] of log-probs q and p, [T, K] each."""
    if beta == 0:
        return kl(q, p)
    if beta == 1:
        return kl(p, q)
    share = torch.tensor(beta, dtype=p.dtype, device=p.device)
    mixture = torch.logaddexp(q + share.log(), p + torch.log1p(-share))
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)


def kl(a: Tensor, b: Tensor) -> Tensor:
    """Return KL(a || b) of log-probs, [T]."""
    return (a.exp() * (a - b)).sum(-1)
