"""DAPO: wider upper clip, token-level mean, no groups of equal rewards, overlong punishment.
arXiv:2503.14476

    r = p(a_t) / p_old(a_t)
    L = -min(r A, clip(r, 1 - low, 1 + high) A)
    L = min(L, -dual A)                                      dual clip, only where A < 0

L is averaged over all trained tokens of the update. Groups with equal rewards are replaced by
groups of other prompts, in every mode (dynamic sampling). A response that enters the last fifth of
rollout.max_tokens loses reward, linearly up to 1.

Differs from the paper: a step replaces at most max_replaced_groups x data.prompts_per_step groups,
and then has fewer. Further prompts start one by one, in place of a group that is complete, not in
batches. The dual clip at 10 is that of the published verl script, and overlong filtering
(truncated_responses drop) is off, as in that script. Equals verl `compute_policy_loss_vanilla`
with that script's clips.
"""

from dataclasses import dataclass
from typing import Literal

from rlcore.algos import ratio
from rlcore.algos.base import AlgoConfig, Clip, DualClip
from rlcore.tensors import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class DAPOConfig(AlgoConfig):
    """Keys of `--algo dapo`."""

    clip_low: Clip = 0.2
    """Lower clip range; the ratio p / p_old is clipped at 1 - clip_low."""
    clip_high: Clip = 0.28
    """Upper clip range (clip-higher); the ratio p / p_old is clipped at 1 + clip_high."""
    clip_dual: DualClip = 10.0
    """Dual clip, the maximum ratio where the advantage is negative; 0: off."""
    equal_reward_groups: Literal["keep", "drop", "replace"] = "replace"
    """Handling of groups whose scores are all equal. `keep`: train on them. `drop`: remove them
    from the batch. `replace`: sample other prompts in their place, dynamic sampling."""
    overlong_share: float = 0.2
    """Final share of rollout.max_tokens in which a response loses reward, linearly with its length
    up to overlong_penalty; 0: off."""


def loss(x: LossInputs, cfg: DAPOConfig) -> LossOutput:
    """Return the policy loss [T] and, as metrics, the clip fractions."""
    r = ratio.log_ratio(x).exp()
    policy, metrics = ratio.clipped(r, x.advantage, cfg.clip_low, cfg.clip_high, cfg.clip_dual)
    return LossOutput(per_token=policy * x.correction, metrics=metrics)
