"""Rollout correction: weights and rejection for the mismatch between sampler and learner.

    w_t = p_old(a_t) / p_sampler(a_t)         log w clamped to +-20; C = rollout_is_threshold

    rollout_is   weight                                        name
    token        min(w_t, C)                                   TIS; C = inf: vanilla IS
    sequence     min(prod_t w_t, C) on every token             sequence TIS
    geometric    min(exp(mean_t log w_t), C) on every token    AReaL's sequence level

    rollout_rs   keeps the token or the whole response if
    token_k1     lower <= 1 / w_t <= upper                     token MIS; with a weight: IcePop
    seq_sum_k1   lower <= prod_t 1 / w_t <= upper              sequence MIS
    seq_mean_k1  lower <= exp(mean_t -log w_t) <= upper        geometric
    *_k2         (log w)^2 / 2 <= upper
    *_k3         w - 1 - log w <= upper                        seq_mean_k3: k3 rejection
    seq_max_*    max_t of k2 or k3 <= upper

The bounds of k1 apply to p_sampler / p_old, the inverse of the weight, as in verl: IcePop's
alpha <= w <= beta is token_k1 with 1/beta_1/alpha. Weights are detached and multiply the policy
loss; they have no lower bound. Rejected tokens do not count in the denominators. Weights and rules
are computed over all trained tokens of a response, before any rejection. Equal log-probs give
weight 1 exactly and are never rejected.

    off_policy_mask_threshold d   no policy loss if A_t < 0 and mean_t log(p_sampler / p) > d

The mask compares the sampler with p of the current update, so it sees mismatch, staleness and the
updates of this step. Unlike rejection, it leaves the token in the denominators and in the KL, as in
its sources; so N is known before the update.

Differs from verl: k3 is computed by expm1, the bounds of k1 must enclose 1, and each rule has its
own threshold (verl: one for all). Weights outside the mask are finite; verl's are 0.

Sources: verl rollout_corr_helper.compute_rollout_correction_weights and
compute_rollout_rejection_mask; TIS, fengyao.notion.site/off-policy-rl; MIS and geometric rejection,
richardli.xyz/rl-collapse; IcePop, arXiv:2510.18855; the mask, DeepSeek-V3.2, arXiv:2512.02556
section 3.1, TRL `get_off_policy_mask`, slime `compute_opsm_mask` (with p_old for p_sampler, unless
use_rollout_logprobs).
Shapes: T packed tokens, B sequences. `log_w` [T] is log p_old - log p_sampler.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.algos import sequence as sequences
from rlcore.algos.base import LOG_LIMIT, AlgoConfig
from rlcore.tensors import LossInputs
from rlcore.utils.errors import ConfigError

DEFAULTS = {
    "token_k1": "0.5_2.0",
    "seq_sum_k1": "0.5_2.0",
    "seq_mean_k1": "0.999_1.001",
    "seq_mean_k3": "0.01",
}
"""Default thresholds of the rules, used if rollout_rs_threshold is empty."""


WHOLE = {"sequence": sequences.total, "geometric": sequences.mean}
"""Figure of log w over a response's tokens, for the levels whose weight is that of the response."""


class Rule(NamedTuple):
    """One rejection rule of rollout_rs, with the inclusive bounds of its statistic."""

    name: str
    lower: float
    upper: float


def weights(
    cfg: AlgoConfig, log_w: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int
) -> Tensor:
    """Return the correction weights [T], detached and capped, before batch normalisation."""
    kept = torch.where(mask, log_w.detach(), 0.0)
    if cfg.rollout_is == "none":
        return torch.ones_like(kept)
    if cfg.rollout_is in WHOLE:
        of_response = WHOLE[cfg.rollout_is](kept.double(), mask, sequence, num_sequences)
        kept = of_response[sequence].to(kept.dtype)
    return kept.clamp(-LOG_LIMIT, LOG_LIMIT).exp().clamp(max=cfg.rollout_is_threshold)


def normalisation_sums(
    cfg: AlgoConfig, log_w: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int
) -> Tensor:
    """Return sum and count of the weights, [2] float64, over trained tokens. If a weight is that of
    a whole sequence, count each sequence with trained tokens once. Summed over all ranks, the two
    numbers give the `mean`."""
    found = weights(cfg, log_w, mask, sequence, num_sequences).double()
    if cfg.rollout_is in WHOLE:
        found = sequences.mean(found, mask, sequence, num_sequences)
        mask = sequences.count(mask, sequence, num_sequences) > 0
    kept = torch.where(mask, found, 0.0)
    return torch.stack([kept.sum(), mask.sum().double()])


def mean(total: float, count: float) -> float:
    """Return the mean weight of a step from the sums of all ranks, by which its weights are divided
    if rollout_is_batch_normalize is on. If all weights are nearly 0, return 1."""
    return total / count if total > 1e-8 * count else 1.0


def keep(
    cfg: AlgoConfig, log_w: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int
) -> Tensor:
    """Return which tokens pass all rules of rollout_rs, [T] bool; True outside the mask.

    A token whose log w is NaN passes, so that the NaN reaches the loss and is detected there.
    """
    out = torch.ones_like(mask)
    if not cfg.rollout_rs:
        return out
    where = (mask, sequence, num_sequences)
    d = log_w.detach().clamp(-LOG_LIMIT, LOG_LIMIT)
    estimates = {"k1": -d, "k2": d.square() / 2, "k3": d.expm1() - d}
    for rule in thresholds(cfg):
        tokens, _, kind = rule.name.rpartition("_")
        value = estimates[kind]
        if tokens != "token":
            figure = {
                "seq_sum": sequences.total,
                "seq_mean": sequences.mean,
                "seq_max": sequences.maximum,
            }[tokens]
            value = figure(value.double(), *where)[sequence].to(value.dtype)
        out &= ~((value < rule.lower) | (value > rule.upper))
    return out | ~mask


def off_policy(cfg: AlgoConfig, x: LossInputs, trained: Tensor) -> Tensor:
    """Return which tokens have no policy loss by off_policy_mask_threshold, [T] bool.

    Args:
        x: loss inputs with the final advantages.
        trained: [T] mask of trained tokens before rejection.
    """
    gap = (x.rollout_log_probs - x.log_probs).detach().double()
    drift = sequences.mean(gap, trained, x.sequence, x.num_sequences)
    return (x.advantage < 0) & (drift > cfg.off_policy_mask_threshold)[x.sequence]


def thresholds(cfg: AlgoConfig) -> list[Rule]:
    """Return the rules of rollout_rs. Raise ConfigError if a threshold is invalid or missing."""
    given = cfg.rollout_rs_threshold
    if given and len(given) != len(cfg.rollout_rs):
        raise ConfigError(
            f"--algo.rollout_rs_threshold {','.join(given)}: {len(given)} values for the "
            f"{len(cfg.rollout_rs)} of rollout_rs; give one for each rule, in order"
        )
    if given:
        return [_parsed(name, text) for name, text in zip(cfg.rollout_rs, given, strict=True)]
    for name in cfg.rollout_rs:
        if name not in DEFAULTS:
            raise ConfigError(
                f"--algo.rollout_rs {name}: has no default; set --algo.rollout_rs_threshold, one "
                "value for each rule of rollout_rs"
            )
    return [_parsed(name, DEFAULTS[name]) for name in cfg.rollout_rs]


def problems(cfg: AlgoConfig) -> list[str]:
    """Return one error message for each invalid setting of weights and rejection."""
    given = cfg.rollout_rs_threshold
    paired = given and len(given) == len(cfg.rollout_rs)
    out = []
    if cfg.bypass_mode and cfg.rollout_is_batch_normalize:
        out.append(
            "--algo.rollout_is_batch_normalize: needs the weights before the first update, but "
            "algo.bypass_mode computes them during it; unset one of the two keys"
        )
    # Parse each rule with its threshold separately, so that every wrong threshold is reported.
    for name, text in zip(cfg.rollout_rs, given, strict=True) if paired else ():
        try:
            _parsed(name, text)
        except ConfigError as e:
            out.append(str(e))
    if not paired:
        try:
            thresholds(cfg)
        except ConfigError as e:
            out.append(str(e))
    return out


def _parsed(name: str, text: str) -> Rule:
    where = f"--algo.rollout_rs_threshold {text}"
    parts = [_number(p) for p in text.split("_")]
    if not name.endswith("k1"):
        if len(parts) != 1 or not 0 < parts[0] < math.inf:
            raise ConfigError(f"{where}: {name} takes one number above 0, such as 0.01")
        return Rule(name, -math.inf, parts[0])
    if len(parts) == 1:
        parts.insert(0, 1 / parts[0] if parts[0] else math.nan)
    if len(parts) != 2 or not 0 < parts[0] <= 1 <= parts[1]:
        raise ConfigError(
            f"{where}: {name} takes lower_upper with 0 < lower <= 1 <= upper, such as "
            f"{DEFAULTS[name]}, or the upper bound alone, whose inverse is the lower one"
        )
    return Rule(name, math.log(parts[0]), math.log(parts[1]))


def _number(text: str) -> float:
    """Parse a number. If the text is no number, return NaN, which fails every comparison."""
    try:
        return float(text)
    except ValueError:
        return math.nan
