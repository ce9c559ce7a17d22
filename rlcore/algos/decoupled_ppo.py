"""Decoupled PPO: clip the ratio p / p_prox, and weight tokens by the mismatch.
arXiv:2110.00641, arXiv:2505.24298

    r = p / p_prox       p_prox: the learner before the first update of this step (old_log_probs)
    w = sg(p_prox / p_behave)                p_behave: the sampler that generated the token
    L = -w min(r A, clip(r, 1 - low, 1 + high) A), and PPO's dual clip if clip_dual is on

If w exceeds behave_cap, `token_mask` removes the token's loss but keeps the token in the
denominator, and `truncate` sets w to the cap. `none` always uses w = 1.

Differs from the papers only by the cap, which behave_cap inf removes. Equals AReaL
`ppo_actor_loss_fn`: token_mask is rejection_sampling {level: token, action: mask, metric: ratio,
upper: 5} (its old behave_imp_weight_cap), truncate is action clamp, none is no rejection_sampling.
verl's token-level rollout_is on ppo equals truncate.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from rlcore.algos import ratio
from rlcore.algos.base import LOG_LIMIT, AlgoConfig, Clip, DualClip, Weighting
from rlcore.tensors import LossInputs, LossOutput
from rlcore.utils.bounds import above


@dataclass(frozen=True, kw_only=True)
class DecoupledPPOConfig(AlgoConfig):
    """Keys of `--algo decoupled_ppo`."""

    rollout_is: Weighting = "none"
    """Importance weight p_old / p_sampler that the objective applies. Must be `none` if algo.behave
    is not `none`, because algo.behave already applies this weight."""
    behave: Literal["token_mask", "truncate", "none"] = "token_mask"
    """Handling of tokens whose weight p_prox / p_behave exceeds behave_cap. `token_mask`: no loss.
    `truncate`: weight behave_cap. `none`: all tokens have weight 1."""
    behave_cap: Annotated[float, above(0, unbounded=True, note="; inf is no cap")] = 5.0
    """Maximum weight p_prox / p_behave; inf: no cap."""
    clip_low: Clip = 0.2
    """Lower clip range; the ratio p / p_prox is clipped at 1 - clip_low."""
    clip_high: Clip = 0.2
    """Upper clip range; the ratio p / p_prox is clipped at 1 + clip_high."""
    clip_dual: DualClip = 0.0
    """Dual clip, the maximum ratio where the advantage is negative; 0: off."""

    def problems(self) -> list[str]:
        out = super().problems()
        if self.behave != "none" and self.rollout_is != "none":
            out.append(
                f"--algo.rollout_is {self.rollout_is}: decoupled_ppo weighs by p_old / p_sampler "
                "itself; set it to none, or algo.behave to none"
            )
        if self.bypass_mode:
            out.append(
                "--algo.bypass_mode True: makes p_prox the sampler, so decoupled_ppo has nothing "
                "to weigh; use --algo ppo"
            )
        return out


def loss(x: LossInputs, cfg: DecoupledPPOConfig) -> LossOutput:
    """Return the policy loss [T] and, as metrics, clip fractions, mean weight and share of tokens
    whose weight exceeds the cap."""
    r = ratio.log_ratio(x).exp()
    policy, metrics = ratio.clipped(r, x.advantage, cfg.clip_low, cfg.clip_high, cfg.clip_dual)
    log_w = (x.old_log_probs - x.rollout_log_probs).detach().clamp(-LOG_LIMIT, LOG_LIMIT)
    weight = log_w.exp()
    over = weight > cfg.behave_cap
    metrics["algo/behave_over_cap"] = over.float()
    if cfg.behave != "none":
        above = 0.0 if cfg.behave == "token_mask" else cfg.behave_cap
        weight = torch.where(over, above, weight)
        metrics["algo/behave_weight"] = weight
        policy = policy * weight
    return LossOutput(per_token=policy * x.correction, metrics=metrics)
