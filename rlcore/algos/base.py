"""The settings that every algorithm has. The shapes it works on are in `rlcore/tensors.py`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    adv_estimator: Literal["grpo"] = "grpo"
    """How a group's rewards become advantages."""
    norm_adv_by_std: bool = True
    """Divide a group's advantages by its standard deviation; off is Dr. GRPO."""
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How per-token losses become one number; always over the global batch of an update."""
    equal_reward_groups: Literal["keep", "drop"] = "keep"
    """A group whose rewards are all equal has no advantage. `keep` trains its rows as the other
    frameworks do, `drop` takes them out of the batch and its denominators."""
    rollout_is: Literal["none", "token"] = "token"
    """Truncated importance sampling between sampler and learner."""
    rollout_is_threshold: float = 2.0
    """Cap of the importance weight; inf does not truncate."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference model in the loss; above 0 keeps the start weights."""
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL. In the loss, k1 has a gradient of zero in expectation: take k2 or k3."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
