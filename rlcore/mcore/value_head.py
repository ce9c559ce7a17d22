"""Define the output layer of a critic: one value per token, in place of Megatron's logits.

A value is the dot product of the weights and the hidden state after the final norm. The weights
start at 0, so a new critic returns 0 everywhere, and the first advantages depend only on the
rewards. Random weights would add an arbitrary function of the hidden state: with a standard
deviation of 0.02 and 4096 hidden units of size 1, this function is about 1.3, as large as rewards.
The layers below the head get their first gradient in the second update. There is no bias, because
it would learn too slowly: Adam moves each weight by about the learning rate, and thousands of
weights outpace one bias.

verl's head (`LinearForLastLayer`) is initialised like torch.nn.Linear and multiplies in the
parameters' dtype. slime's head has a bias and initial weights of standard deviation 0.02.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


class ValueHead(torch.nn.Module):
    """Linear layer from hidden states [L, 1, H] to values [L, 1, 1].

    Values are float32, or float64 in a float64 model. Every tensor-parallel rank has the same
    weights. With sequence parallelism each rank computes its part of the tokens, and an attribute
    of the weight makes Megatron sum the gradients."""

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
        """Return the values; the signature is that of Megatron's output layer."""
        dtype = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        values = F.linear(hidden.to(dtype), self.weight.to(dtype))
        if self.sequence_parallel:
            # All ranks compute the same loss on all tokens, so each keeps its part of the gradient.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
