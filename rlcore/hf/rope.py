"""Compute RoPE frequencies, optionally with Llama 3's scaling, for learner and engine."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, float] | None = None
) -> Tensor:
    """Return RoPE's inverse frequencies, float32 [head_dim / 2]; `scaling`: Llama 3's settings."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (theta**exponent)
    if scaling is None:
        return inverse
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > context / low, inverse / factor, inverse)
    medium = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(medium, blended, scaled)
