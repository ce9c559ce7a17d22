"""Statistics of each sequence over its packed tokens in `mask`.

Shapes: T tokens, B sequences. Every rank that computes a loss holds all tokens of its sequences,
also with context parallelism.
"""

import torch
from torch import Tensor


def total(values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return each sequence's sum, [B]; 0 if no token is in the mask. Differentiable."""
    kept = torch.where(mask, values, 0.0)
    return values.new_zeros(num_sequences).index_add(0, sequence, kept)


def count(mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return each sequence's number of tokens in the mask, [B] float32."""
    zeros = torch.zeros(num_sequences, device=mask.device)
    return zeros.index_add(0, sequence, mask.float())


def mean(values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return each sequence's mean, [B]; 0 if no token is in the mask. Differentiable."""
    n = count(mask, sequence, num_sequences).to(values.dtype)
    return total(values, mask, sequence, num_sequences) / n.clamp(min=1)


def maximum(values: Tensor, mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Return each sequence's maximum, [B]; -inf if no token is in the mask."""
    start = values.new_full((num_sequences,), float("-inf"))
    kept = torch.where(mask, values, float("-inf"))
    return start.scatter_reduce(0, sequence, kept, "amax")
