"""KL(p || p_ref) estimated from samples of p. http://joschu.net/blog/kl-approx.html

d  = log p_ref - log p
k1 = -d                 unbiased, may be negative
k2 = d^2 / 2            biased, low variance
k3 = exp(d) - 1 - d     unbiased, never negative
"""

from torch import Tensor


def estimate(kind: str, logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Per-token estimate [T]; gradients flow through `logp`. `kind`: k1, k2 or k3."""
    d = logp_ref - logp
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    return d.expm1() - d  # exp(d) - 1 would be rounding noise for nearly equal log-probs
