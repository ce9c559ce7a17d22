"""The critic's loss: squared error to the returns, with PPO's value clip.

    L = max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2) / 2

V is the critic's value, V_old the value before the first update of the step, G the return.
Sources: verl core_algos.compute_value_loss; PPO's first implementation (arXiv:1707.06347).
Shapes: T packed tokens of one micro-batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.tensors import LossOutput, ValueInputs


def loss(x: ValueInputs, clip: float) -> LossOutput:
    """Return the value loss [T], 0 outside the mask. `clip` is the clip range c; inf: no clip."""
    bounded = torch.clamp(x.value, x.value_old - clip, x.value_old + clip)
    plain = torch.where(x.mask, x.value - x.returns, 0.0).square()
    clipped = torch.where(x.mask, bounded - x.returns, 0.0).square()
    per_token = torch.maximum(plain, clipped) / 2
    metrics = {
        "critic/vf_loss": per_token.detach(),
        "critic/vf_clipfrac": (clipped > plain).to(plain.dtype),
        "critic/vpred_mean": torch.where(x.mask, x.value, 0.0).detach(),
    }
    return LossOutput(per_token=per_token, metrics=metrics)


def variance_sums(value: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return the number of tokens in the mask and their sums of G, G^2, G - V and (G - V)^2, with
    returns G and values V: [5] float64. The caller adds these over all ranks."""
    gain = torch.where(mask, returns.double(), 0.0)
    error = torch.where(mask, returns.double() - value.double(), 0.0)
    parts = [mask.double(), gain, gain.square(), error, error.square()]
    return torch.stack([p.sum() for p in parts])


def explained_variance(sums: Sequence[float]) -> float:
    """Return 1 - var(G - V) / (var G + 1e-5) of returns G and values V: verl's
    critic/vf_explained_var. 1 is a perfect critic; 0 is a critic that predicts only the mean. With
    fewer than two tokens, the result is 0."""
    count, gain, gain2, error, error2 = sums
    if count < 2:
        return 0.0
    left = (error2 - error * error / count) / (count - 1)
    spread = (gain2 - gain * gain / count) / (count - 1)
    return 1 - max(left, 0.0) / (max(spread, 0.0) + 1e-5)
