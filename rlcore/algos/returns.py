"""Advantage estimators with one advantage per token.

r_t is the reward of token t, V_t the critic's value before token t. t runs over the trained tokens
of a response, so t + 1 is the next trained token.

    estimator            G_t (returns)                     A_t
    reinforce_plus_plus  r_t + gamma G_{t+1}               G_t                        whitened
    remax                r_t + G_{t+1}                     G_t - R(greedy response)
    gae                  A_t + V_t                         d_t + gamma lam A_{t+1}    whitened
                         d_t = r_t + gamma V_{t+1} - V_t

    optimal_token_baseline, tir_*  r_t + G_{t+1}           G_t - B_t
                         B_t = sum_i G_it W_it / (sum_i W_it + 1e-8)

After the last trained token, G, A and V are 0. Tokens of a response outside the mask (the output of
a tool) are skipped: such tokens neither discount nor end a return. Results outside the mask are 0.
Computations are in float64.

B_t is the baseline of least variance at place t of a group's responses. W_t is the sum of w up to
t: w = (1 - 2 p + sum_v p_v^2) rho^2 is the squared gradient of log p by the logits, p the old
policy, rho the capped weight of rollout_is. Places count all tokens of a response, also those of
tools; with tir_optimal_token_baseline, which is for several turns, trained tokens only. Without
tools both are equal. B is 0 where only one response of the group has a trained token: the rest of
the longest, and groups of one. A is not whitened.

Differs from verl: verl's handle_zero_tail (off by default in optimal_token_baseline) gives B = 0 to
the longest response past the length of the second; off, A is nearly 0 there. If tools leave gaps,
its optimal_token_baseline takes a number of trained tokens for that place, and in a gap of all
others compares a response with itself. w is held at 0 or above, which float32 cannot promise.

Sources: verl core_algos.compute_{reinforce_plus_plus_outcome,remax_outcome,gae}_advantage*;
reinforce_plus_plus arXiv:2501.03262, remax arXiv:2310.10505, gae arXiv:1506.02438. The
baselines are verl core_algos.compute_{,multi_turn_}optimal_token_baseline_advantage,
arXiv:2602.07078.
Shapes: T packed tokens, M of them in the mask, B sequences.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.algos import correction
from rlcore.algos import sequence as sequences
from rlcore.algos.advantage import WHITEN_EPSILON
from rlcore.algos.base import AlgoConfig
from rlcore.tensors import Batch
from rlcore.utils.errors import ConfigError

TOKEN = ("reinforce_plus_plus", "remax", "gae")
"""Estimators with one advantage per token of a response alone. base.TOKEN_BASELINES compare the
responses of a group, in three steps: `baseline_terms`, `baseline_sums`, `above_baseline`.
Estimators with one advantage per response are in advantage.py."""
BASELINE_EPSILON = 1e-8
"""Number added to the sum of the weights of a baseline."""


def token_rewards(batch: Batch, rewards: Sequence[float], penalty: Tensor | None) -> Tensor:
    """Return the reward of each token, [T]: the response's reward on its last trained token, minus
    `penalty` [T] on all trained tokens.

    A sequence without trained tokens has no reward. The dtype is that of `penalty` or, if None, of
    the sampler's log-probs.
    """
    if len(rewards) != batch.num_sequences:
        raise ValueError(
            f"{len(rewards)} rewards for {batch.num_sequences} sequences: give one for each"
        )
    mask = batch.mask
    like = batch.rollout_log_probs if penalty is None else penalty
    dtype = torch.float32 if like is None else like.dtype
    sequence = batch.sequence_index.to(batch.mask.device)
    place = torch.arange(len(mask), dtype=torch.float64, device=mask.device)
    last = sequences.maximum(place, mask, sequence, batch.num_sequences)
    given = torch.tensor(rewards, dtype=dtype, device=mask.device)
    out = torch.where(mask & (place == last[sequence]), given[sequence], 0.0)
    return out if penalty is None else out - torch.where(mask, penalty, 0.0)


def advantages(
    batch: Batch, reward: Tensor, cfg: AlgoConfig, baseline: Sequence[float] | None
) -> tuple[Tensor, Tensor]:
    """Compute (advantage [T], returns [T]) by `cfg.adv_estimator`, before whitening, in `reward`'s
    dtype.

    Args:
        reward: [T] from `token_rewards`.
        baseline: reward of the greedy response for each sequence; only for remax.
    """
    where = batch.mask.nonzero().squeeze(1)  # [M]
    sequence = batch.sequence_index.to(batch.mask.device)[where]
    longest = max(batch.lengths, default=0)
    r = reward[where].double()
    if cfg.adv_estimator == "gae":
        assert batch.value_old is not None, "gae needs values"
        v = batch.value_old[where].double()
        delta = r + cfg.gamma * _later(v, sequence, 1) - v
        found = _discounted(delta, sequence, cfg.gamma * cfg.lam, longest)
        gains = found + v
    elif cfg.adv_estimator == "reinforce_plus_plus":
        found = gains = _discounted(r, sequence, cfg.gamma, longest)
    elif cfg.adv_estimator == "remax":
        assert baseline is not None and len(baseline) == batch.num_sequences, baseline
        base = torch.tensor(baseline, dtype=torch.float64, device=where.device)
        gains = _discounted(r, sequence, 1.0, longest)
        found = gains - base[sequence]
    else:
        raise ConfigError(
            f"--algo.adv_estimator {cfg.adv_estimator}: has one advantage per response; use one "
            f"of {', '.join(TOKEN)}"
        )
    zeros = torch.zeros_like(reward)
    return (
        zeros.index_copy(0, where, found.to(reward.dtype)),
        zeros.index_copy(0, where, gains.to(reward.dtype)),
    )


class BaselineTerms(NamedTuple):
    """Figures of the M trained tokens of a batch, [M] each."""

    where: Tensor  # index of the token in the batch
    group: Tensor  # index of its response's group
    place: Tensor  # number of the token in its response, from 0
    gain: Tensor  # reward to go, float64
    weight: Tensor  # W, float64


def baseline_terms(
    batch: Batch, reward: Tensor, cfg: AlgoConfig, groups: Sequence[int]
) -> BaselineTerms:
    """Return weights and rewards to go of a batch's trained tokens, for the token baselines.

    The batch needs `old_log_probs`, `rollout_log_probs` and `log_sum_pi_squared`.

    Args:
        reward: [T] from `token_rewards`.
        groups: index of each sequence's group.
    """
    assert batch.old_log_probs is not None and batch.log_sum_pi_squared is not None
    assert batch.rollout_log_probs is not None
    every = batch.sequence_index.to(batch.mask.device)
    where = batch.mask.nonzero().squeeze(1)
    sequence, longest = every[where], max(batch.lengths, default=0)
    log_w = batch.old_log_probs - batch.rollout_log_probs
    rho = correction.weights(cfg, log_w, batch.mask, every, batch.num_sequences)[where].double()
    logp = batch.old_log_probs[where].double()
    others = batch.log_sum_pi_squared[where].double().exp() - (2 * logp).exp()
    w = (logp.expm1().square() + others.clamp(min=0)) * rho.square()
    # A sum up to a token is the sum from the token on in the reverse order.
    weight = _discounted(w.flip(0), sequence.flip(0), 1.0, longest).flip(0)
    order = torch.arange(len(where), device=where.device)
    place = where if cfg.adv_estimator == "optimal_token_baseline" else order
    first = torch.searchsorted(sequence, sequence)  # of the token's response
    return BaselineTerms(
        where=where,
        group=torch.tensor(groups, dtype=torch.int64, device=where.device)[sequence],
        place=place - place[first],
        gain=_discounted(reward[where].double(), sequence, 1.0, longest),
        weight=weight,
    )


def baseline_sums(x: BaselineTerms, num_groups: int, longest: int) -> Tensor:
    """Return sum G W, sum W and number of responses for each group and place, [groups, longest, 3]
    float64; the caller adds the sums of all batches and ranks."""
    figures = torch.stack([x.gain * x.weight, x.weight, torch.ones_like(x.gain)], -1)
    out = figures.new_zeros(num_groups * longest, 3)
    return out.index_add_(0, x.group * longest + x.place, figures).view(num_groups, longest, 3)


def above_baseline(x: BaselineTerms, reward: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return (advantage [T], returns [T]) in `reward`'s dtype; `sums`: those of `baseline_sums`,
    added over all batches and ranks of the step."""
    total, weight, count = sums.to(x.gain.device)[x.group, x.place].unbind(-1)
    baseline = torch.where(count > 1, total / (weight + BASELINE_EPSILON), 0.0)
    zeros = torch.zeros_like(reward)
    return (
        zeros.index_copy(0, x.where, (x.gain - baseline).to(reward.dtype)),
        zeros.index_copy(0, x.where, x.gain.to(reward.dtype)),
    )


def _later(values: Tensor, sequence: Tensor, steps: int) -> Tensor:
    """Return each token's value `steps` trained tokens later, [M]; 0 past the sequence's end."""
    out = torch.zeros_like(values)
    if steps < len(values):
        same = sequence[steps:] == sequence[:-steps]
        out[:-steps] = torch.where(same, values[steps:], 0.0)
    return out


def _discounted(values: Tensor, sequence: Tensor, factor: float, longest: int) -> Tensor:
    """Return sum_i factor^i values[t + i] to the end of the sequence, [M].

    The sum over 2 k tokens is the sum over k tokens plus factor^k times the sum k tokens later.
    Doubling k thus needs log2(longest) passes over the packed tokens; a loop needs `longest`.
    """
    total, steps = values, 1
    while steps < longest:
        total = total + factor**steps * _later(total, sequence, steps)
        steps *= 2
    return total


def whitening_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Return count, sum and sum of squares over the mask, [3] float64; the caller adds the sums of
    all ranks.

    The variance from these sums has an error of about 1e-16 mean^2. This error is negligible
    compared to the added 1e-8 while advantages are below 1e3.
    """
    kept = torch.where(mask, values.double(), 0.0)
    return torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()])


def whitened(values: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
    """Return (A - mean) / sqrt(var + 1e-8), [T], with the unbiased variance of the tokens in
    `sums`.

    The result is 0 outside the mask. If `sums` counts at most one token, the result is 0
    everywhere; verl's `masked_whiten` raises an error.
    """
    count, total, squares = sums.double().to(values.device)
    mean = total / count.clamp(min=1)
    variance = ((squares - total * mean) / (count - 1).clamp(min=1)).clamp(min=0)
    out = (values.double() - mean) * (variance + WHITEN_EPSILON).rsqrt()
    return torch.where(mask & (count > 1), out, 0.0).to(values.dtype)
