"""Settings that all algorithms have in common. The tensors of a loss are in `rlcore/tensors.py`.

`trainer/objective.py` composes the objective of these parts:

    correction (sampler against learner), rejection      correction.py
    per-token policy loss                                the algorithm's own file
    + kl_coef KL(p || p_ref) - entropy_coef H            kl.py
    aggregation by global counts                         reduce.py
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from rlcore.utils.bounds import above, at_least, finite

Estimator = Literal[
    "grpo",
    "grpo_passk",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "gae",
]
Rejection = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KL = Literal["k1", "k2", "k3", "abs", "low_var_kl", "k1+", "k3+"]
Share = Annotated[float, at_least(0, at_most=1)]
Cap = Annotated[
    float,
    at_least(
        1,
        unbounded=True,
        note=", or equal log-probs would not have weight 1; inf does not truncate",
    ),
]
Clip = Annotated[float, at_least(0, unbounded=True)]
"""Distance of a bound from a ratio of 1, or the bound itself; inf means no bound."""
DualClip = Annotated[float, above(1, unbounded=True, off=0, note="; 0 turns it off")]
"""Bound of a ratio for negative advantages; a bound of 1 or less would clip an unchanged policy."""


LOG_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp, as in verl; e^20 is 5e8."""


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    has_ratio: ClassVar[bool] = True
    """The loss weighs tokens by p / p_old itself. With bypass_mode that ratio is the correction
    already; a loss without one gets the weight p / p_sampler instead."""
    uses_entropy: ClassVar[bool] = False
    """The loss has a gradient through `x.entropy`, which is left out otherwise to save time."""
    drops_tokens: ClassVar[bool] = False
    """The loss takes tokens out of the denominators (`LossOutput.mask`)."""

    adv_estimator: Estimator = "grpo"
    """How rewards become advantages: advantage.py and returns.py."""
    norm_adv_by_std: bool = True
    """Divide a group's advantages by its standard deviation (grpo, grpo_passk); off is Dr. GRPO."""
    whiten_advantages: bool = False
    """Shift and scale the advantages of a step to mean 0 and variance 1 over all trained tokens.
    reinforce_plus_plus, reinforce_plus_plus_baseline and gae always do."""
    gamma: Share = 1.0
    """Discount of reinforce_plus_plus and gae."""
    lam: Share = 1.0
    """Lambda of gae."""
    loss_agg_mode: Aggregation = "token-mean"
    """How per-token losses become one number; always over the global batch of an update."""
    equal_reward_groups: Literal["keep", "drop"] = "keep"
    """A group whose scores are all equal tells no answer from another. `keep` trains its rows as
    the other frameworks do, `drop` takes them out of the batch and its denominators."""
    truncated_responses: Literal["keep", "drop"] = "keep"
    """`drop` takes responses cut at rollout.max_tokens out of the batch and its denominators; they
    still count in their group's baseline (DAPO's overlong filtering)."""
    overlong_share: Share = 0.0
    """The last part of rollout.max_tokens, as a share, in which a longer response costs reward,
    linearly up to overlong_penalty (DAPO's soft overlong punishment). 0: off."""
    overlong_penalty: Annotated[float, at_least(0)] = 1.0
    """Reward that a response of rollout.max_tokens loses."""

    rollout_is: Literal["none", "token", "sequence"] = "token"
    """Importance weight min(p_old / p_sampler, cap) on the policy loss, of each token or of the
    whole sequence (the product)."""
    rollout_is_threshold: Cap = 2.0
    """Cap of the weight; inf does not truncate."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the step."""
    rollout_rs: tuple[Rejection, ...] = ()
    """Leave out tokens or whole responses where sampler and learner differ too much, and out of the
    denominators too. verl's names: <tokens>_<estimator>; all that are given must pass."""
    rollout_rs_threshold: tuple[str, ...] = ()
    """One for each of rollout_rs. For k1 bounds of p_sampler / p_old as lower_upper, such as
    0.5_2.0, or the upper one alone, whose inverse is the lower; an upper bound for k2 and k3.
    Empty: 0.5_2.0 for k1, 0.999_1.001 for seq_mean_k1, 0.01 for seq_mean_k3."""
    bypass_mode: bool = False
    """Take the sampler's log-probs for the old ones. Nothing is recomputed, and the ratio of the
    loss corrects sampler and staleness at once (PPO-IS); rollout_is then only works on losses
    without a ratio."""

    kl_coef: Annotated[float, at_least(0)] = 0.0
    """Weight of the KL to the reference model in the loss; above 0 keeps the start weights."""
    kl_type: KL = "k3"
    """Estimator of the KL in the loss. k1 has a gradient of zero in expectation and k3 one of the
    reverse KL: k1+ and k3+ have their values and k2's gradient."""
    kl_reward_coef: Annotated[float, at_least(0)] = 0.0
    """Weight of the KL to the reference model taken off the reward, token by token."""
    kl_reward_type: KL = "k1"
    """Estimator of the KL in the reward."""
    kl_target: Annotated[float, at_least(0)] = 0.0
    """Above 0, both weights are scaled to hold the KL at this value (adaptive controller)."""
    kl_horizon: Annotated[int, above(0)] = 10000
    """Samples over which the adaptive controller answers."""
    entropy_coef: Annotated[float, finite()] = 0.0
    """Weight of the entropy bonus."""

    @property
    def needs_reference(self) -> bool:
        """Whether the objective needs log-probs of the reference, the start weights."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    def problems(self) -> list[str]:
        """Return one error message per conflict between settings: key, value, allowed values. An
        algorithm extends it for its own keys; ranges are stated at the fields."""
        return []
