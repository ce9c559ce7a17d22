"""Compute RoPE frequencies, with or without scaling, for learner and engine."""

import math

import torch
from torch import Tensor

from rlcore.hf.rope_settings import Rope


def inverse_frequencies(head_dim: int, rope: Rope) -> Tensor:
    """Return RoPE's inverse frequencies, float32 [rotating dimensions / 2]."""
    dims, theta = rope.dims(head_dim), rope.theta
    if rope.kind == "dynamic":  # the base of sequences of `factor` times the original length
        theta *= (rope.factor**2 - rope.factor + 1) ** (dims / (dims - 2))
    exponent = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
    inverse = 1.0 / (theta**exponent)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    return _yarn(inverse, dims, rope) if rope.kind == "yarn" else inverse


def _llama3(inverse: Tensor, rope: Rope) -> Tensor:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    scaled = torch.where(wavelength > context / low, inverse / rope.factor, inverse)
    medium = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(medium, blended, scaled)


def _yarn(inverse: Tensor, dims: int, rope: Rope) -> Tensor:
    """Divide slow frequencies by the factor, leave fast ones, and blend linearly in between
    (arXiv:2309.00071). The limits are as in transformers and SGLang."""

    def pair(turns: float) -> float:
        """Return the index of the pair with this many turns in the original positions."""
        turn_length = rope.original_max_position_embeddings / (2 * math.pi * turns)
        return dims * math.log(turn_length) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    steps = torch.arange(len(inverse), dtype=torch.float32) - first
    scaled = (steps / ((last - first) or 0.001)).clamp(0, 1)
    return inverse / rope.factor * scaled + inverse * (1 - scaled)
