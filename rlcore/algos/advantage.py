"""Advantage estimators with one advantage per response.

R_1..R_n are the rewards of a group, m their mean and s their standard deviation (divisor n - 1).
l_i is the number of trained tokens of response i.

    estimator                     A_i                                              n = 1
    grpo                          (R_i - m) / (s + 1e-6)                           R / (1 + 1e-6)
    grpo, norm_adv_by_std off     R_i - m                                          R
    gdpo                          whitened(sum_k w_k grpo_k)                       whitened(...)
    grpo_passk                    the best: (R_1st - R_2nd) / (s + 1e-6), others 0 ConfigError
    maxrl                         (R_i - m) / (m + 1e-6), R_i >= 0                 R
    rloo                          R_i - sum_{j != i} R_j / (n - 1)                 R
    reinforce_plus_plus_baseline  whitened(R_i - m)                                whitened(R)
    opo                           R_i - sum_j l_j R_j / sum_j l_j                  R
    gpg                           alpha (R_i - m)                                  alpha R
    none                          0                                                0

grpo_k is grpo of the rewards by term k of a sum of rewards, such as `--reward math:1,judge:0.5`,
and w_k the weight of the term. alpha is the number of responses of the step, divided by the number
of responses with a reward other than 0. Whitening is over the trained tokens of the step:

    whitened(A) = (A - mean A) / sqrt(var A + 1e-8)     var with N - 1 for N tokens

With rewards 0 and 1 the m of maxrl is the group's share of successes; dividing by it gives the
gradient of log(success rate), cut after as many terms as the group has responses, instead of that
of the success rate. A negative reward has no such meaning and raises ConfigError.

If all rewards of a group are equal, its advantages are exactly 0 before whitening. Responses
without trained tokens do not count in opo's baseline or in the whitening.

Differs from verl: computations are in float64, without rounding if rewards are equal. Whitening
over at most one token gives 0, where verl raises an error. TRL's normalize_then_sum is gdpo with
1e-4 beside the deviations, and normalises the sums over the responses, not over their tokens. For a
group of one response, rloo gives the reward, as verl's `rloo`; verl's `rloo_vectorized` gives 0.
maxrl equals its authors' function, whose group of one has the advantage R / 1e-6.

Sources: verl core_algos.compute_*_outcome_advantage; grpo arXiv:2402.03300, its mean alone
arXiv:2503.20783 (Dr. GRPO), gdpo arXiv:2601.05242, grpo_passk arXiv:2503.19595, maxrl
arXiv:2602.02710 (github.com/tajwarfahim/maxrl, compute_maxrl_outcome_advantage), rloo
arXiv:2402.14740, reinforce_plus_plus_baseline arXiv:2501.03262, opo arXiv:2505.23585, gpg
arXiv:2504.02546.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlcore.algos.base import TOKEN_BASELINES, AlgoConfig
from rlcore.utils.errors import ConfigError

EPSILON = 1e-6
WHITEN_EPSILON = 1e-8

BY_RESPONSE = ("grpo", "gdpo", "grpo_passk", "maxrl", "rloo", "reinforce_plus_plus_baseline", "opo")
BY_GROUP = (*BY_RESPONSE, *TOKEN_BASELINES)
"""Advantage estimators that need several responses to the same prompt."""


def problems(cfg: AlgoConfig) -> list[str]:
    """Return one error message for each setting that the advantage estimator excludes."""
    name, out = cfg.adv_estimator, []
    if name == "gdpo":
        others = {
            f"--algo.kl_reward_coef {cfg.kl_reward_coef:g}": cfg.kl_reward_coef,
            f"--algo.overlong_share {cfg.overlong_share:g}": cfg.overlong_share,
            f"--algo.equal_reward_groups {cfg.equal_reward_groups}": (
                cfg.equal_reward_groups != "keep"
            ),
        }
        out += [acts_on_sum(key) for key, is_on in others.items() if is_on]
    elif name in TOKEN_BASELINES:
        out += _token_baseline(cfg)
    elif name == "maxrl":
        out += [
            f"--algo.{key} {getattr(cfg, key):g}: lowers rewards below 0, by whose mean "
            "adv_estimator maxrl divides; set it to 0, or use grpo"
            for key in ("overlong_share", "kl_reward_coef")
            if getattr(cfg, key)
        ]
    elif name == "none":
        idle = {
            f"--algo.kl_reward_coef {cfg.kl_reward_coef:g}": cfg.kl_reward_coef,
            f"--algo.overlong_share {cfg.overlong_share:g}": cfg.overlong_share,
            "--algo.whiten_advantages": cfg.whiten_advantages,
        }
        out += [
            f"{key}: has no effect, since --algo.adv_estimator none uses no rewards; unset it, or "
            "use another estimator"
            for key, is_on in idle.items()
            if is_on
        ]
    handling = cfg.equal_reward_groups
    if handling == "replace" and name == "remax":
        out.append(
            "--algo.equal_reward_groups replace: with adv_estimator remax a prompt also has a "
            "greedy response, which is not replaced with its group; set it to keep"
        )
    elif handling != "keep" and name not in (*BY_RESPONSE, "gpg"):
        out.append(
            f"--algo.equal_reward_groups {handling}: with adv_estimator {name} groups of equal "
            "rewards are worth training on as well; set it to keep"
        )
    return out


def acts_on_sum(key: str) -> str:
    """Return the error message for a key that gdpo excludes."""
    return (
        f"{key}: acts on the sum of the rewards, and --algo.adv_estimator gdpo on its terms; unset "
        "it, or use grpo"
    )


def _token_baseline(cfg: AlgoConfig) -> list[str]:
    """Check that the pass of old log-probs can give what a token baseline needs: the sums of
    squared probabilities of all responses."""
    name, out = f"--algo.adv_estimator {cfg.adv_estimator}", []
    if cfg.bypass_mode:
        out.append(
            f"--algo.bypass_mode: skips the pass of old log-probs, but {name} needs the sums of "
            "squared probabilities from it; use one of the two"
        )
    if cfg.routing_replay == "old":
        out.append(
            f"--algo.routing_replay old: the pass of old log-probs cannot give both routes and the "
            f"sums of squared probabilities that {name} needs; use rollout or none"
        )
    if cfg.truncated_responses == "drop":
        out.append(
            f"--algo.truncated_responses drop: {name} needs the log-probs of all responses of a "
            "group, but dropped ones get none; set it to keep"
        )
    return out


@dataclass(frozen=True)
class GroupRewards:
    """Rewards and lengths of the responses to one prompt."""

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    """Number of tokens in each response that the policy sampled (without output of tools)."""
    trained: tuple[int, ...] = ()
    """Number of trained tokens of each response, for whitening; 0 if the response was dropped after
    sampling. Empty: no response was dropped."""
    terms: tuple[tuple[float, ...], ...] = ()
    """Scores of each response by the terms of a sum of rewards, for gdpo; empty: one reward."""
    weights: tuple[float, ...] = ()
    """Weight of each term."""

    def __post_init__(self) -> None:
        if not self.rewards or len(self.rewards) != len(self.lengths):
            raise ValueError(
                f"a group has {len(self.rewards)} rewards and {len(self.lengths)} lengths: give "
                "one of each for every response, at least one"
            )
        if self.terms and {len(t) for t in self.terms} != {len(self.weights)}:
            raise ValueError(
                f"a group has {len(self.weights)} weights and responses of "
                f"{sorted({len(t) for t in self.terms})} terms: give one weight for each term"
            )


Groups = Sequence[GroupRewards]


def is_equal(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal, so that the group gives no gradient."""
    return max(rewards) - min(rewards) < 1e-8


def _centred(rewards: Sequence[float]) -> list[float]:
    """Return each reward minus the group's mean. For a group of one, return the reward itself."""
    if len(rewards) == 1:
        return list(rewards)
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)  # exact, because a rounding error would be divided by 1e-6
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def _scale(rewards: Sequence[float], cfg: AlgoConfig) -> float:
    """Return the std of the rewards (1 for one reward) + 1e-6, or 1 if norm_adv_by_std is off."""
    if not cfg.norm_adv_by_std:
        return 1.0
    if len(rewards) == 1:
        return 1.0 + EPSILON
    squares = math.fsum(a * a for a in _centred(rewards))
    return math.sqrt(squares / (len(rewards) - 1)) + EPSILON


def grpo(groups: Groups, cfg: AlgoConfig) -> list[list[float]]:
    """Return each reward minus its group's mean, divided by the group's std (`_scale`)."""
    out = []
    for g in groups:
        scale = _scale(g.rewards, cfg)
        out.append([a / scale for a in _centred(g.rewards)])
    return out


def gdpo(groups: Groups, cfg: AlgoConfig) -> list[list[float]]:
    """Return the weighted sum of grpo's advantages by each term of the reward; `outcome` then
    whitens it. A term of large spread does not drown the others, as in a sum of rewards."""
    out = []
    for g in groups:
        total = [0.0] * len(g.rewards)
        for k, weight in enumerate(g.weights or (1.0,)):
            rewards = [terms[k] for terms in g.terms] or list(g.rewards)
            scale = _scale(rewards, cfg)
            centred = _centred(rewards)
            total = [t + weight * a / scale for t, a in zip(total, centred, strict=True)]
        out.append(total)
    return out


def grpo_passk(groups: Groups, cfg: AlgoConfig) -> list[list[float]]:
    """Return the best reward's lead over the second best, divided by `_scale`; 0 for others."""
    out = []
    for i, g in enumerate(groups):
        if len(g.rewards) < 2:
            raise ConfigError(
                f"--algo.adv_estimator grpo_passk: group {i} has one response, but needs two or "
                "more; raise --rollout.samples_per_prompt"
            )
        second, first = sorted(g.rewards)[-2:]
        best = g.rewards.index(first)
        lead = (first - second) / _scale(g.rewards, cfg)
        out.append([lead if j == best else 0.0 for j in range(len(g.rewards))])
    return out


def maxrl(groups: Groups, cfg: AlgoConfig) -> list[list[float]]:
    """Return each reward minus its group's mean, divided by the mean + 1e-6. For a group of one,
    return the reward itself."""
    out = []
    for i, g in enumerate(groups):
        if min(g.rewards) < 0:
            raise ConfigError(
                f"--algo.adv_estimator maxrl: group {i} has the reward {min(g.rewards):g}, but all "
                "must be 0 or more, since their mean is a divisor; shift the rewards, or use grpo"
            )
        n = len(g.rewards)
        scale = 1.0 if n == 1 else math.fsum(g.rewards) / n + EPSILON
        out.append([a / scale for a in _centred(g.rewards)])
    return out


def rloo(groups: Groups, cfg: AlgoConfig) -> list[list[float]]:
    """Return each reward minus the mean of its group's other rewards. This is n / (n - 1) times the
    difference from the group's mean."""
    out = []
    for g in groups:
        n = len(g.rewards)
        out.append([a * n / max(n - 1, 1) for a in _centred(g.rewards)])
    return out


def reinforce_plus_plus_baseline(groups: Groups, cfg: AlgoConfig) -> list[list[float]]:
    """Return each reward minus its group's mean; `outcome` then whitens the advantages."""
    return [_centred(g.rewards) for g in groups]


def opo(groups: Groups, cfg: AlgoConfig) -> list[list[float]]:
    """Return each reward minus the length-weighted mean reward of its group. This baseline has the
    least variance if a response's gradient grows with its length. Without tokens it is 0."""
    out = []
    for g in groups:
        tokens = sum(g.lengths)
        if len(g.rewards) > 1 and max(g.rewards) == min(g.rewards):
            out.append([0.0] * len(g.rewards))
            continue
        base = 0.0
        if len(g.rewards) > 1 and tokens:
            base = math.fsum(n * r for n, r in zip(g.lengths, g.rewards, strict=True)) / tokens
        out.append([r - base for r in g.rewards])
    return out


def gpg(groups: Groups, cfg: AlgoConfig) -> list[list[float]]:
    """Return each reward minus its group's mean, times alpha: the number of responses of the step,
    divided by the number of responses with a reward other than 0."""
    rewards = [r for g in groups for r in g.rewards]
    alpha = len(rewards) / max(sum(r != 0 for r in rewards), 1)
    return [[alpha * a for a in _centred(g.rewards)] for g in groups]


def none(groups: Groups, cfg: AlgoConfig) -> list[list[float]]:
    """Return 0 for every response."""
    return [[0.0] * len(g.rewards) for g in groups]


OUTCOME: dict[str, Callable[[Groups, AlgoConfig], list[list[float]]]] = {
    f.__name__: f
    for f in (grpo, gdpo, grpo_passk, maxrl, rloo, reinforce_plus_plus_baseline, opo, gpg, none)
}
"""Estimators with one advantage per response, by name; returns.py has those per token."""


def outcome(groups: Groups, cfg: AlgoConfig) -> list[list[float]]:
    """Compute the advantages of all responses of a step by `cfg.adv_estimator`: one list for each
    group, in order."""
    if cfg.adv_estimator not in OUTCOME:
        raise ConfigError(
            f"--algo.adv_estimator {cfg.adv_estimator}: has no single advantage per response; use "
            f"one of {', '.join(OUTCOME)}"
        )
    for i, g in enumerate(groups):
        for j, r in enumerate(g.rewards):
            if not math.isfinite(r):
                raise ValueError(
                    f"reward {r} of response {j} of group {i}: must be finite; fix the reward "
                    "function"
                )
    out = OUTCOME[cfg.adv_estimator](groups, cfg)
    if cfg.whiten_advantages or cfg.adv_estimator in ("gdpo", "reinforce_plus_plus_baseline"):
        return whitened(out, groups)
    return out


def whitened(values: list[list[float]], groups: Groups) -> list[list[float]]:
    """Shift and scale advantages to mean 0 and variance 1 over the trained tokens of all groups."""
    flat = [
        (a, n)
        for row, g in zip(values, groups, strict=True)
        for a, n in zip(row, g.trained or g.lengths, strict=True)
        if n
    ]
    tokens = sum(n for _, n in flat)
    if tokens < 2:
        return [[0.0] * len(row) for row in values]
    start = flat[0][0]  # subtract this value, so that the mean of equal values is exact
    mean = start + math.fsum(n * (a - start) for a, n in flat) / tokens
    variance = math.fsum(n * (a - mean) ** 2 for a, n in flat) / (tokens - 1)
    scale = math.sqrt(variance + WHITEN_EPSILON)
    return [[(a - mean) / scale for a in row] for row in values]
