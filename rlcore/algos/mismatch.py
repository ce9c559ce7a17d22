"""Metrics of the mismatch between learner and sampler, from sums over micro-batches and ranks.

p is the sampler's and q the learner's probability of a sampled token; w = q / p. "mean" is over
trained tokens, "[mean]" over responses with trained tokens. t indexes a response's trained tokens.

    rollout_corr/
      kl, k3_kl                mean -log w, mean (w - 1 - log w)
      training_log_ppl         [mean] h_q,       h_q = mean_t -log q
      training_ppl             [mean] exp h_q;   rollout_*: the same with p
      log_ppl_diff             [mean] h_q - h_p; also _abs_diff, _diff_max, _diff_min
      ppl_ratio                [mean] exp(h_q - h_p)
      chi2_token, chi2_seq     mean w^2 - 1, [mean] (prod_t w)^2 - 1, log clamped to +-20
      log_prob_diff_max        max over tokens of |log w|
      response_max_diff_*      mean and max over responses of max_t |p - q|
      response_mean_diff_*     mean and max over responses of mean_t |p - q|
      responses_above_half     share of responses with max_t |p - q| > 1/2
      score_is                 sum w_o R_o / sum w_o over responses, w_o = prod_t w: estimate of the
                               learner's mean score
      rollout_is_{mean,std,min,max}         of the weight u, capped at C = rollout_is_threshold,
                                            before batch normalisation
      rollout_is_uncapped_{mean,max}        of the weight before the cap, log clamped to +-20 (of
                                            tokens; of responses if rollout_is is sequence)
      rollout_is_eff_sample_size            (mean u)^2 / mean u^2
      rollout_is_ratio_fraction_{high,low}  share of uncapped weights above C, below 1/C (of
                                            tokens; of responses if rollout_is is sequence or
                                            geometric)
      rollout_rs_masked_fraction            share of rejected tokens
      rollout_rs_seq_masked_fraction        share of responses with a rejected token
    training/
      rollout_probs_diff_{mean,max,std}     |p - q|
      rollout_actor_probs_pearson_corr      of p and q; left out if p or q is constant
    training/off_policy/       v_t: version of token t; n: version of the weights in training
      token_staleness          mean, max of n - v_t
      trajectory_staleness     mean, max, min over responses of n - newest v_t
      trajectory_staleness_worst            mean, max, min over responses of n - oldest v_t
      trajectory_spans         mean, max, min over responses of newest v_t - oldest v_t + 1

All metrics are over the trained tokens before rejection. As in verl, rollout_is_* exist only if the
weight is used, and rollout_rs_* only if rollout_rs has rules.

Differs from verl: if rollout_is is sequence, verl's rollout_is_max and rollout_is_min are of the
uncapped weights; here rollout_is_uncapped_max has its maximum, and rollout_is_max is at most the
cap. Responses without trained tokens are not counted (verl counts them with log-prob 0). Standard
deviations divide by n, so that tokens counted on several ranks do not change them. k3 is computed
by expm1.

Sources: verl rollout_corr_helper.compute_offpolicy_metrics and compute_is_metrics,
utils/debug/metrics.calculate_debug_metrics; response_max_diff and response_mean_diff,
fengyao.notion.site/off-policy-rl.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.algos import sequence as sequences
from rlcore.algos.base import LOG_LIMIT, AlgoConfig
from rlcore.algos.correction import WHOLE
from rlcore.tensors import LossInputs

# Outside the range of the following bounds, `unhealthy` returns a note for the step line.
MAX_PROBS_DIFF = 0.5
"""Maximum healthy |p - q| of a step; the authors of TIS count responses above 0.5."""
MAX_K3 = 1e-2
"""Maximum healthy k3_kl. NeMo-RL advises 1e-3 for equal weights; stale samples have more."""
MIN_ESS = 0.9
MAX_CAPPED = 0.5
"""Maximum healthy share of weights above the cap. Correct weights have mean 1, so most of them are
below 1; beyond this share most weights are equal to the cap, and their sample size says nothing."""

ADDED = (
    "tokens",
    "k1",
    "k3",
    "w",
    "w2",
    "p",
    "q",
    "p2",
    "q2",
    "pq",
    "diff",
    "diff2",
    "weight",
    "weight2",
    "high",
    "low",
    "rejected",
    "staleness",
    "known_tokens",
    "responses",
    "log_ppl_p",
    "log_ppl_q",
    "ppl_p",
    "ppl_q",
    "log_ppl_abs_diff",
    "ppl_ratio",
    "w_response",
    "weight_response",
    "w2_response",
    "w_score",
    "high_response",
    "low_response",
    "max_diff",
    "mean_diff",
    "above_half",
    "rejected_responses",
    "newest_staleness",
    "oldest_staleness",
    "spans",
    "known_responses",
)
"""Names of the sums in `Sums.added`."""
HIGHEST = (
    "log_diff",
    "log_ppl_diff",
    "-log_ppl_diff",
    "diff",
    "mean_diff",
    "weight",
    "-weight",
    "uncapped",
    "staleness",
    "newest_staleness",
    "-newest_staleness",
    "oldest_staleness",
    "-oldest_staleness",
    "spans",
    "-spans",
)
"""Names of the maxima in `Sums.highest`. A leading minus: maximum of the negated values."""


@dataclass(frozen=True)
class Sums:
    """Sums and maxima over the tokens of one or several micro-batches; float64, on the loss's
    device. `total` combines several `Sums`."""

    added: Tensor
    """Sums in the order of ADDED, [len(ADDED)]."""
    highest: Tensor
    """Maxima in the order of HIGHEST, [len(HIGHEST)]; -inf if there are no values."""

    @staticmethod
    def total(parts: Sequence["Sums"]) -> "Sums":
        """Combine all `parts`. If there are none, return sums 0 and maxima -inf on the CPU."""
        if not parts:
            return Sums(
                torch.zeros(len(ADDED), dtype=torch.float64),
                torch.full((len(HIGHEST),), -math.inf, dtype=torch.float64),
            )
        return Sums(
            torch.stack([p.added for p in parts]).sum(0),
            torch.stack([p.highest for p in parts]).amax(0),
        )


@torch.no_grad()
def sums(x: LossInputs, log_w: Tensor, trained: Tensor, cfg: AlgoConfig, version: int) -> Sums:
    """Compute the sums of one micro-batch, without waiting for the device.

    Args:
        x: loss inputs; `mask` is `trained` without the rejected tokens.
        log_w: [T] the learner's log-prob minus the sampler's log-prob.
        trained: [T] mask of trained tokens before rejection.
        version: policy version of the weights in training.
    """
    where = (trained, x.sequence, x.num_sequences)
    log_w, log_p = log_w.double(), x.rollout_log_probs.double()
    log_q = log_p + log_w
    # Use p - 1 and q - 1 for precision near 1, where most probabilities are.
    p, q = log_p.expm1(), log_q.expm1()
    diff = (p - q).abs()
    tokens = trained.double()
    rejected = trained & ~x.mask
    age = version - x.versions.double()
    known = trained & (x.versions >= 0)

    count = sequences.total(tokens, *where)  # [B]
    some = count > 0
    log_ppl_p, log_ppl_q = sequences.mean(-log_p, *where), sequences.mean(-log_q, *where)
    log_ppl_diff = log_ppl_q - log_ppl_p
    log_w_sum = sequences.total(log_w, *where).clamp(-LOG_LIMIT, LOG_LIMIT)
    max_diff, mean_diff = sequences.maximum(diff, *where), sequences.mean(diff, *where)
    of_known = (known, x.sequence, x.num_sequences)
    newest, oldest = -sequences.maximum(-age, *of_known), sequences.maximum(age, *of_known)
    dated = oldest > -math.inf
    spans = oldest - newest + 1

    limited = log_w.clamp(-LOG_LIMIT, LOG_LIMIT)
    cap = cfg.rollout_is_threshold
    log_u = log_w_sum  # [B]
    if cfg.rollout_is in WHOLE:
        log_u = WHOLE[cfg.rollout_is](log_w, *where).clamp(-LOG_LIMIT, LOG_LIMIT)
    weight = (log_u[x.sequence] if cfg.rollout_is in WHOLE else limited).exp()
    capped = weight.clamp(max=cap)
    w_sum = log_w_sum.exp()  # [B]

    by_token = {
        "tokens": tokens,
        "k1": -log_w,
        "k3": log_w.expm1() - log_w,
        "w": limited.exp(),
        "w2": (2 * limited).exp(),
        "p": p,
        "q": q,
        "p2": p * p,
        "q2": q * q,
        "pq": p * q,
        "diff": diff,
        "diff2": diff.square(),
        "weight": capped,
        "weight2": capped.square(),
        "high": weight > cap,
        "low": weight < 1 / cap,
        "rejected": rejected,
    }
    by_response = {
        "responses": some,
        "log_ppl_p": log_ppl_p,
        "log_ppl_q": log_ppl_q,
        "ppl_p": log_ppl_p.exp(),
        "ppl_q": log_ppl_q.exp(),
        "log_ppl_abs_diff": log_ppl_diff.abs(),
        "ppl_ratio": log_ppl_diff.exp(),
        "w_response": w_sum,
        "weight_response": log_u.exp(),
        "w2_response": w_sum.square(),
        "w_score": w_sum * sequences.mean(x.score.double(), *where),
        "high_response": log_u.exp() > cap,
        "low_response": log_u.exp() < 1 / cap,
        "max_diff": max_diff,
        "mean_diff": mean_diff,
        "above_half": max_diff > 0.5,
        "rejected_responses": sequences.count(rejected, x.sequence, x.num_sequences) > 0,
    }
    by_dated = {
        "newest_staleness": newest,
        "oldest_staleness": oldest,
        "spans": spans,
        "known_responses": dated,
    }
    added = {
        name: torch.where(mask, value.double(), 0.0).sum()
        for mask, values in ((trained, by_token), (some, by_response), (dated, by_dated))
        for name, value in values.items()
    }
    added["staleness"] = torch.where(known, age, 0.0).sum()
    added["known_tokens"] = known.sum().double()
    spread = {
        "log_diff": (log_w.abs(), trained),
        "log_ppl_diff": (log_ppl_diff, some),
        "diff": (diff, trained),
        "mean_diff": (mean_diff, some),
        "weight": (capped, trained),
        "uncapped": (weight, trained),
        "staleness": (age, known),
        "newest_staleness": (newest, dated),
        "oldest_staleness": (oldest, dated),
        "spans": (spans, dated),
    }
    highest = [
        _highest(-value if name.startswith("-") else value, mask)
        for name in HIGHEST
        for value, mask in [spread[name.removeprefix("-")]]
    ]
    return Sums(torch.stack([added[name] for name in ADDED]), torch.stack(highest))


def _highest(values: Tensor, mask: Tensor) -> Tensor:
    """Return the largest value in the mask, -inf if the mask is empty."""
    start = values.new_full((1,), -math.inf)
    return torch.cat([start, torch.where(mask, values, -math.inf)]).amax()


def metrics(added: Sequence[float], highest: Sequence[float], cfg: AlgoConfig) -> dict[str, float]:
    """Compute the metrics from the sums of all ranks; empty if no token was trained."""
    s = dict(zip(ADDED, added, strict=True))
    top = dict(zip(HIGHEST, highest, strict=True))
    n, b = s["tokens"], s["responses"]
    if not n:
        return {}
    out = {
        "rollout_corr/kl": s["k1"] / n,
        "rollout_corr/k3_kl": s["k3"] / n,
        "rollout_corr/training_ppl": s["ppl_q"] / b,
        "rollout_corr/training_log_ppl": s["log_ppl_q"] / b,
        "rollout_corr/rollout_ppl": s["ppl_p"] / b,
        "rollout_corr/rollout_log_ppl": s["log_ppl_p"] / b,
        "rollout_corr/log_ppl_diff": (s["log_ppl_q"] - s["log_ppl_p"]) / b,
        "rollout_corr/log_ppl_abs_diff": s["log_ppl_abs_diff"] / b,
        "rollout_corr/log_ppl_diff_max": top["log_ppl_diff"],
        "rollout_corr/log_ppl_diff_min": -top["-log_ppl_diff"],
        "rollout_corr/ppl_ratio": s["ppl_ratio"] / b,
        "rollout_corr/chi2_token": s["w2"] / n - 1,
        "rollout_corr/chi2_seq": s["w2_response"] / b - 1,
        "rollout_corr/score_is": s["w_score"] / s["w_response"],
        "rollout_corr/log_prob_diff_max": top["log_diff"],
        "rollout_corr/response_max_diff_mean": s["max_diff"] / b,
        "rollout_corr/response_max_diff_max": top["diff"],
        "rollout_corr/response_mean_diff_mean": s["mean_diff"] / b,
        "rollout_corr/response_mean_diff_max": top["mean_diff"],
        "rollout_corr/responses_above_half": s["above_half"] / b,
        "training/rollout_probs_diff_mean": s["diff"] / n,
        "training/rollout_probs_diff_max": top["diff"],
        "training/rollout_probs_diff_std": _std(s["diff"], s["diff2"], n),
    }
    correlation = _pearson(s)
    if correlation is not None:
        out["training/rollout_actor_probs_pearson_corr"] = correlation
    if cfg.rollout_is != "none" and not (cfg.bypass_mode and cfg.has_ratio):
        whole = cfg.rollout_is in WHOLE
        high, low = ("high_response", "low_response") if whole else ("high", "low")
        out |= {
            "rollout_corr/rollout_is_mean": s["weight"] / n,
            "rollout_corr/rollout_is_std": _std(s["weight"], s["weight2"], n),
            "rollout_corr/rollout_is_min": -top["-weight"],
            "rollout_corr/rollout_is_max": top["weight"],
            "rollout_corr/rollout_is_uncapped_mean": (
                s["weight_response"] / b if whole else s["w"] / n
            ),
            "rollout_corr/rollout_is_uncapped_max": top["uncapped"],
            "rollout_corr/rollout_is_eff_sample_size": s["weight"] ** 2 / (s["weight2"] * n),
            "rollout_corr/rollout_is_ratio_fraction_high": s[high] / (b if whole else n),
            "rollout_corr/rollout_is_ratio_fraction_low": s[low] / (b if whole else n),
        }
    if cfg.rollout_rs:
        out["rollout_corr/rollout_rs_masked_fraction"] = s["rejected"] / n
        out["rollout_corr/rollout_rs_seq_masked_fraction"] = s["rejected_responses"] / b
    if s["known_tokens"]:
        out |= _staleness(s, top)
    return out


def _staleness(s: dict[str, float], top: dict[str, float]) -> dict[str, float]:
    prefix = "training/off_policy/"
    out = {
        prefix + "token_staleness/mean": s["staleness"] / s["known_tokens"],
        prefix + "token_staleness/max": top["staleness"],
    }
    names = {
        "trajectory_staleness": "newest_staleness",
        "trajectory_staleness_worst": "oldest_staleness",
        "trajectory_spans": "spans",
    }
    for name, figure in names.items():
        out[f"{prefix}{name}/mean"] = s[figure] / s["known_responses"]
        out[f"{prefix}{name}/max"] = top[figure]
        out[f"{prefix}{name}/min"] = -top["-" + figure]
    return out


def _std(total: float, squares: float, n: float) -> float:
    return math.sqrt(max(squares / n - (total / n) ** 2, 0.0))


def _pearson(s: dict[str, float]) -> float | None:
    """Return the correlation of p and q; None if p or q is constant up to rounding."""
    n = s["tokens"]
    var_p, var_q = s["p2"] - s["p"] ** 2 / n, s["q2"] - s["q"] ** 2 / n
    if not (var_p > 1e-12 * s["p2"] and var_q > 1e-12 * s["q2"]):
        return None
    found = (s["pq"] - s["p"] * s["q"] / n) / math.sqrt(var_p * var_q)
    return min(max(found, -1.0), 1.0)


def unhealthy(metrics: dict[str, float]) -> str:
    """Return a note for the step line if the mismatch is outside the healthy range, else ""."""
    diff = metrics.get("rollout_corr/response_max_diff_max", 0.0)
    k3 = metrics.get("rollout_corr/k3_kl", 0.0)
    ess = metrics.get("rollout_corr/rollout_is_eff_sample_size")
    capped = metrics.get("rollout_corr/rollout_is_ratio_fraction_high", 0.0)
    is_near = diff <= MAX_PROBS_DIFF and k3 <= MAX_K3 and capped <= MAX_CAPPED
    if is_near and (ess is None or ess >= MIN_ESS):
        return ""  # comparisons with NaN are false, so a NaN is reported
    k1 = metrics.get("rollout_corr/kl", 0.0)
    note = f"mismatch: max |dp| {diff:.2g}, k1 {k1:.2g}, k3 {k3:.2g}"
    if ess is None:
        return note
    highest = metrics.get("rollout_corr/rollout_is_uncapped_max", 1.0)
    return f"{note}, ess {ess:.2g}, max w {highest:.2g}"
