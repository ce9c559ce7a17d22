"""Estimate KL(p || p_ref) from samples of p, and adapt its coefficient to a target KL.

    d = log p_ref - log p

    kind        value                                            gradient
    k1          -d                  unbiased, may be negative    0 in expectation
    k2          d^2 / 2             biased, low variance         that of KL(p || p_ref)
    k3          exp(d) - 1 - d      unbiased, never negative     that of KL(p_ref || p)
    abs         |d|
    low_var_kl  k3 of d clamped to +-20, then clamped to +-10    0 if clamped
    k1+, k3+    as k1, k3                                        as k2 (straight through)

With kl_unbiased, the objective multiplies the estimate by p / p_old. The samples are those of
p_old, so value and gradient of k1 and k3 are then those of KL(p || p_ref) in expectation.
DeepSeek-V3.2, arXiv:2512.02556 section 3.1; TRL use_bias_correction_kl, slime use_unbiased_kl.

Differs from verl: k3 is exact; verl's k3 is its low_var_kl. exp(d) - 1 is computed as expm1(d),
because the plain difference would be rounding noise for nearly equal log-probs.

Sources: verl core_algos.kl_penalty; http://joschu.net/blog/kl-approx.html; the controller
arXiv:1909.08593, section 2.2.
"""

import math

from torch import Tensor


def estimate(kind: str, logp: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the KL estimate of each token by estimator `kind`, [T]; gradients flow to `logp`."""
    d = ref_log_probs - logp
    if kind.endswith("+"):
        value = estimate(kind.removesuffix("+"), logp, ref_log_probs).detach()
        square = d.square() / 2
        return value + (square - square.detach())
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return d.expm1() - d
    if kind == "abs":
        return d.abs()
    if kind == "low_var_kl":
        d = d.clamp(-20, 20)
        return (d.expm1() - d).clamp(-10, 10)
    raise ValueError(
        f"KL estimator {kind}: unknown; take k1, k2, k3, abs, low_var_kl, k1+ or k3+ "
        "(--algo.kl_type, --algo.kl_reward_type)"
    )


class AdaptiveController:
    """Factor on the KL coefficients, adapted to keep the KL at a target.

        e     = clip(KL / target - 1, -0.2, 0.2)
        scale = scale (1 + e samples / horizon)

    Differs from verl: a step with more samples than the horizon counts as one horizon, so that the
    factor cannot become negative. If the KL is not finite (skipped update), the factor stays.
    """

    def __init__(self, target: float, horizon: float) -> None:
        """Start with a factor of 1.

        Args:
            target: KL to keep; 0 keeps the factor at 1.
            horizon: number of samples over which the factor adapts.
        """
        self._target, self._horizon = target, horizon
        self.scale = 1.0

    def update(self, kl: float, num_samples: int) -> None:
        """Adapt the factor to the mean KL of a step of `num_samples` responses."""
        if not self._target or not math.isfinite(kl):
            return
        error = min(max(kl / self._target - 1, -0.2), 0.2)
        self.scale *= 1 + error * min(num_samples / self._horizon, 1.0)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale}

    def restore(self, state: dict[str, float]) -> None:
        """Restore the state that `state()` returned."""
        self.scale = float(state["scale"])
