"""Rollout correction: weights for the mismatch between sampler and learner.

    w_t = min(p_old(a_t) / p_sampler(a_t), C)

Truncated importance sampling (TIS): no lower bound, so w < 1 stays; the weight is detached and
multiplies the clipped policy gradient. C = inf is vanilla importance sampling. Equal log-probs give
exactly 1. Metrics follow verl's `rollout_corr/*`.
"""

from torch import Tensor

LOG_LIMIT = 20.0  # |log w| beyond this is clamped before exp, as in verl

NO_SUMS = dict.fromkeys(("count", "k1", "k3", "diff", "max_diff", "w", "w2", "high", "max_w"), 0.0)
NO_SUMS["min_w"] = float("inf")


def token_tis(logp_old: Tensor, logp_sampler: Tensor, cap: float) -> Tensor:
    """[T] detached weights in (0, cap]."""
    log_w = (logp_old - logp_sampler).detach().clamp(-LOG_LIMIT, LOG_LIMIT)
    return log_w.exp().clamp(max=cap)


def mismatch_sums(
    logp_old: Tensor, logp_sampler: Tensor, weight: Tensor, mask: Tensor, cap: float
) -> dict[str, float]:
    """Sums over the masked tokens from which `mismatch_metrics` makes global figures; add the sums
    of all ranks first (`max` and `min` keys by maximum and minimum)."""
    old, mu = logp_old[mask].double(), logp_sampler[mask].double()
    w = weight[mask].double()
    raw = (old - mu).clamp(-LOG_LIMIT, LOG_LIMIT)
    diff = (old.exp() - mu.exp()).abs()
    some = diff.numel() > 0
    return {
        "count": float(diff.numel()),
        "k1": float(-raw.sum()),
        "k3": float((raw.expm1() - raw).sum()),
        "diff": float(diff.sum()),
        "max_diff": float(diff.max()) if some else 0.0,
        "w": float(w.sum()),
        "w2": float(w.square().sum()),
        "high": float((raw.exp() > cap).sum()),
        "max_w": float(w.max()) if some else 0.0,
        "min_w": float(w.min()) if some else float("inf"),
    }


def mismatch_metrics(s: dict[str, float]) -> dict[str, float]:
    """Global mismatch figures from summed `mismatch_sums`."""
    n = max(s["count"], 1.0)
    mean, square = s["w"] / n, s["w2"] / n
    return {
        "rollout_corr/kl": s["k1"] / n,
        "rollout_corr/k3_kl": s["k3"] / n,
        "rollout_corr/rollout_is_mean": mean,
        "rollout_corr/rollout_is_std": max(square - mean * mean, 0.0) ** 0.5,
        "rollout_corr/rollout_is_max": s["max_w"],
        "rollout_corr/rollout_is_min": s["min_w"] if s["count"] else 0.0,
        "rollout_corr/rollout_is_eff_sample_size": mean * mean / square if square else 0.0,
        "rollout_corr/rollout_is_ratio_fraction_high": s["high"] / n,
        "training/rollout_probs_diff_mean": s["diff"] / n,
        "training/rollout_probs_diff_max": s["max_diff"],
    }
