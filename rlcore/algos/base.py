"""Settings that all algorithms have in common.

The tensors of a loss are in `rlcore/tensors.py`. `algos/objective.py` composes the objective:

    weights and rejection for sampler mismatch           correction.py
    per-token policy loss                                the algorithm's own file
    + kl_coef KL(p || p_ref) - entropy_coef H            kl.py
    aggregation by global counts                         reduce.py
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from rlcore.utils.bounds import above, at_least, finite

Estimator = Literal[
    "grpo",
    "gdpo",
    "grpo_passk",
    "maxrl",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "gae",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "none",
]
TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""Estimators with one advantage per token that compare the responses of a group (returns.py)."""
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
Weighting = Literal["none", "token", "sequence", "geometric"]
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
"""Clip range of a ratio: distance of the bound from 1, or the bound itself; inf: no bound."""
DualClip = Annotated[float, above(1, unbounded=True, off=0, note="; 0 turns it off")]
"""Maximum ratio where the advantage is negative; 1 or less would clip an unchanged policy."""


LOG_LIMIT = 20.0
"""Limit of log-ratios, which are clamped to +-20 before exp, as in verl (e^20 is 5e8)."""


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """Keys of every algorithm."""

    has_ratio: ClassVar[bool] = True
    """Whether the loss contains the ratio p / p_old. With bypass_mode, this ratio is also the
    rollout correction; a loss without the ratio gets the weight p / p_sampler instead."""
    uses_entropy: ClassVar[bool] = False
    """Whether the loss has a gradient through `x.entropy`; if not, that gradient is skipped to save
    time."""
    uses_score: ClassVar[bool] = False
    """Whether the loss reads the raw reward `x.score`, besides the advantage."""
    uses_teacher_top: ClassVar[bool] = False
    """Whether the loss compares the learner with the teacher's likeliest tokens
    (`x.top_log_probs`)."""
    takes_demonstrations: ClassVar[bool] = False
    """Whether the loss can train responses that the policy has not sampled
    (`--data.demonstrations`). Such a loss reads neither advantages nor the sampler's log-probs."""
    drops_tokens: ClassVar[bool] = False
    """Whether the loss removes tokens from the denominators (`LossOutput.mask`)."""

    adv_estimator: Estimator = "grpo"
    """Advantage estimator, see rlcore/algos/advantage.py and returns.py; gae trains a critic, and
    none gives 0, for losses and KL terms that need no reward."""
    norm_adv_by_std: bool = True
    """Whether to divide the advantages by their group's standard deviation (grpo, grpo_passk,
    gdpo); off in Dr. GRPO."""
    whiten_advantages: bool = False
    """Whether to shift and scale the advantages of a step to mean 0 and variance 1 over all trained
    tokens. Always on for gdpo, reinforce_plus_plus, reinforce_plus_plus_baseline and gae."""
    gamma: Share = 1.0
    """Discount factor of reinforce_plus_plus and gae."""
    lam: Share = 1.0
    """Lambda of gae: decay factor of later temporal differences."""
    loss_agg_mode: Aggregation = "token-mean"
    """Aggregation of per-token losses by verl's modes, always over the global batch of an update
    (rlcore/algos/reduce.py)."""
    equal_reward_groups: Literal["keep", "drop", "replace"] = "keep"
    """Handling of groups whose scores are all equal, so that no response is preferred. `keep`:
    train on them. `drop`: remove them from the batch and its denominators. `replace`: sample other
    prompts in their place (DAPO's dynamic sampling)."""
    max_replaced_groups: Annotated[float, above(0)] = 4.0
    """Maximum number of groups replaced per step, as a multiple of data.prompts_per_step, with
    equal_reward_groups replace. Beyond it a step trains on fewer groups, or with --mode async also
    on groups of equal scores."""
    truncated_responses: Literal["keep", "drop"] = "keep"
    """Handling of responses cut at rollout.max_tokens. `keep`: train on them. `drop`: remove them
    from the batch and its denominators, but not from their group's baseline (DAPO's overlong
    filtering)."""
    overlong_share: Share = 0.0
    """Final share of rollout.max_tokens in which a response loses reward, linearly with its length
    up to overlong_penalty (DAPO's soft overlong punishment); 0: off."""
    overlong_penalty: Annotated[float, at_least(0)] = 1.0
    """Reward subtracted from a response of rollout.max_tokens tokens, if overlong_share > 0."""

    rollout_is: Weighting = "token"
    """Importance weight min(p_old / p_sampler, threshold) on the policy loss. `token`: of each
    token. `sequence`: of the whole response (product over tokens). `geometric`: geometric mean over
    the response's tokens. `none`: no weight."""
    rollout_is_threshold: Cap = 2.0
    """Upper bound of the rollout_is weight; inf: no truncation."""
    rollout_is_batch_normalize: bool = False
    """Whether to divide the rollout_is weights by their mean over the step."""
    rollout_rs: tuple[Rejection, ...] = ()
    """Rules (verl's names, <tokens>_<estimator>) that reject tokens or responses for which sampler
    and learner differ too much. Rejected tokens do not count in denominators; a token must pass all
    rules."""
    rollout_rs_threshold: tuple[str, ...] = ()
    """Thresholds, one per rule of rollout_rs. A k1 rule takes bounds of p_sampler / p_old as
    lower_upper, such as 0.5_2.0, or upper alone (lower is then 1 / upper). A k2 or k3 rule takes an
    upper bound. Empty: 0.5_2.0 for token_k1 and seq_sum_k1, 0.999_1.001 for seq_mean_k1, 0.01 for
    seq_mean_k3."""
    off_policy_mask_threshold: Annotated[float, at_least(0)] = 0.0
    """Off-policy sequence mask. A token of negative advantage has no policy loss if the mean of
    log(p_sampler / p) over its response exceeds this threshold. The token still counts in
    denominators, KL and entropy. 0: off."""
    bypass_mode: bool = False
    """Whether to use the sampler's log-probs as old log-probs instead of recomputing them. The
    loss's ratio then corrects mismatch and staleness at once (PPO-IS), and rollout_is affects only
    losses without a ratio."""

    routing_replay: Literal["none", "old", "rollout"] = "none"
    """Routing replay of mixtures of experts (rlcore/mcore/ROUTING.md). `none`: routers choose in
    every pass. `old` (R2): later updates of a step use the experts chosen in the pass of the old
    log-probs, so that the ratio p / p_old does not jump. `rollout` (R3): every pass of the learner
    uses the experts chosen by the engine, which also brings its log-probs closer to the sampler's.
    """

    kl_coef: Annotated[float, at_least(0)] = 0.0
    """Coefficient of the KL to the reference model in the loss; above 0, the initial weights are
    kept as reference."""
    kl_type: KL = "k3"
    """Estimator of the KL in the loss. k1 has gradient 0 in expectation, k2 that of KL(p || p_ref),
    k3 that of KL(p_ref || p). k1+ and k3+ have the values of k1 and k3 and the gradient of k2."""
    kl_unbiased: bool = False
    """Whether to multiply the KL in the loss by p / p_old. On samples of p_old, k1 and k3 then have
    value and gradient of KL(p || p_ref) in expectation."""
    kl_reward_coef: Annotated[float, at_least(0)] = 0.0
    """Coefficient of the KL to the reference model that is subtracted from the reward of each
    token."""
    kl_reward_type: KL = "k1"
    """Estimator of the KL in the reward (rlcore/algos/kl.py)."""
    kl_target: Annotated[float, at_least(0)] = 0.0
    """Target KL of the adaptive controller, which scales kl_coef and kl_reward_coef; 0: fixed
    coefficients."""
    kl_horizon: Annotated[int, above(0)] = 10000
    """Horizon of the adaptive KL controller, in samples; larger values adapt more slowly."""
    teacher_kl_coef: Annotated[float, at_least(0)] = 0.0
    """Coefficient of the reverse KL to --teacher.models, that is log p_old - log p_teacher of each
    token, which is subtracted from the token's advantage."""
    entropy_coef: Annotated[float, finite()] = 0.0
    """Coefficient of the entropy bonus."""

    @property
    def needs_reference(self) -> bool:
        """Whether the objective needs log-probs of the reference model (the initial weights)."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def needs_teacher(self) -> bool:
        """Whether the objective needs log-probs of a teacher (`--teacher.models`)."""
        return self.teacher_kl_coef > 0 or self.uses_teacher_top

    def problems(self) -> list[str]:
        """Return one error message per conflict between settings, with key, value and allowed
        values. An algorithm extends this method for its own keys."""
        out = []
        if self.kl_coef and self.kl_unbiased and self.kl_type not in ("k1", "k3", "low_var_kl"):
            out.append(
                f"--algo.kl_type {self.kl_type}: multiplied by p / p_old (algo.kl_unbiased), it "
                "has not the gradient of the KL; use k1, k3 or low_var_kl, or leave kl_unbiased out"
            )
        if self.kl_target and not self.needs_reference:
            out.append(
                f"--algo.kl_target {self.kl_target}: has no KL coefficient to adapt; set "
                "algo.kl_coef or algo.kl_reward_coef above 0"
            )
        for key in ("equal_reward_groups", "truncated_responses"):
            if getattr(self, key) == "drop" and self.needs_reference:
                out.append(
                    f"--algo.{key} drop: drops samples that algo.kl_coef and algo.kl_reward_coef "
                    "keep close to the reference; set it to keep, or both coefficients to 0"
                )
        for key in ("entropy_coef", "teacher_kl_coef"):
            if self.equal_reward_groups == "drop" and getattr(self, key):
                out.append(
                    f"--algo.equal_reward_groups drop: drops samples that algo.{key} trains on; "
                    "set it to keep, or the coefficient to 0"
                )
        most = AlgoConfig.max_replaced_groups
        if self.equal_reward_groups != "replace" and self.max_replaced_groups != most:
            out.append(
                "--algo.max_replaced_groups: has no effect without --algo.equal_reward_groups "
                "replace"
            )
        return out
