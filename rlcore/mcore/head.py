"""The actor's output layer, taken out of Megatron's model so that `ops/head.py` can apply it in
chunks of tokens (`--train.head_chunk_tokens`). The layer keeps its weight, its place in checkpoints
and its optimizer state.
"""

from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


class LateHead:
    """Of the model chunk with the last layer, which gives hidden states from now on."""

    def __init__(self, chunk: Any) -> None:
        """`chunk` is a GPTModel before it is wrapped."""
        self._chunk = chunk
        self._sequence_parallel = chunk.output_layer.sequence_parallel
        chunk.output_layer.forward = _nothing

    @property
    def weight(self) -> Tensor:
        """[V/tp, H]; a tied model's is the embedding's."""
        if self._chunk.share_embeddings_and_output_weights:
            return self._chunk.shared_embedding_or_output_weight()
        return self._chunk.output_layer.weight

    @property
    def weight_grad(self) -> Tensor | None:
        """Where Megatron's data-parallel wrapper collects the weight's gradient, in fp32 for a
        bfloat16 model. What is added there needs no autograd."""
        return getattr(self.weight, "main_grad", None)

    def rows(self, outputs: Tensor) -> Tensor:
        """The model's outputs [1, L or L/tp, H] as hidden states [L, H] on every tensor-parallel
        rank. Each then has a share of their gradient, which backward adds up."""
        hidden = outputs.squeeze(0)
        group = parallel_state.get_tensor_model_parallel_group()
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=group)
        return copy_to_tensor_model_parallel_region(hidden, group=group)


def _nothing(
    hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, None]:
    """In place of the output layer's forward, whose arguments and pair these are."""
    return hidden, None
