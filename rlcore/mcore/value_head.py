"""The output layer of a critic: one number for every token, in place of Megatron's logits.

    V = w . h        h: hidden state after the final norm; w: as many weights, no bias

w starts at 0. A fresh critic then says 0 everywhere and the first advantages are those of the
rewards alone. Random weights would add a function of the hidden state that nobody asked for: with a
standard deviation of 0.02 and 4096 hidden units of size 1 it is 1.3, as large as the rewards. The
trunk gets its first gradient in the second update. A bias would lag: Adam moves every weight by
about the learning rate, and a hidden state has thousands of them.

Differs from verl (`LinearForLastLayer`), which starts as torch.nn.Linear does and multiplies in the
parameters' dtype, and from slime, which has a bias and starts with normal weights of 0.02.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


class ValueHead(torch.nn.Module):
    """Hidden states [L, 1, H] -> values [L, 1, 1] in float32, or float64 in a float64 model. Every
    tensor-parallel rank has the same weights; under sequence parallel each multiplies its part of
    the tokens, and Megatron adds up the gradients of a weight that is marked so."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel = bool(config.sequence_parallel)
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        )
        mark = self.sequence_parallel
        self.weight.sequence_parallel = mark  # type: ignore[attr-defined]  # Megatron reads it

    def forward(
        self, hidden: Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """The arguments and the pair are those of Megatron's output layer."""
        dtype = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        values = F.linear(hidden.to(dtype), self.weight.to(dtype))
        if self.sequence_parallel:
            # Every rank has the same loss of all tokens, so each takes its part of the gradient.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
