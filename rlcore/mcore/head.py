"""Take the actor's output layer out of Megatron's forward pass.

`ops/head.py` applies the layer in chunks of tokens (`--train.head_chunk_tokens`). The layer keeps
its weight, its place in checkpoints and its optimizer state.
"""

from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


class LateHead:
    """Output layer of the last model chunk, whose forward returns hidden states, not logits."""

    def __init__(self, chunk: Any) -> None:
        """Replace the forward of the output layer of `chunk`, a GPTModel without wrappers."""
        self._chunk = chunk
        self._sequence_parallel = chunk.output_layer.sequence_parallel
        chunk.output_layer.forward = _nothing

    @property
    def weight(self) -> Tensor:
        """Weight of the output layer, [V/tp, H]; in a tied model, the embedding's weight."""
        if self._chunk.share_embeddings_and_output_weights:
            return self._chunk.shared_embedding_or_output_weight()
        return self._chunk.output_layer.weight

    @property
    def weight_grad(self) -> Tensor | None:
        """Gradient buffer of the weight in Megatron's data-parallel wrapper, fp32 for a bfloat16
        model. Callers may add gradients to the buffer without autograd."""
        return getattr(self.weight, "main_grad", None)

    def rows(self, outputs: Tensor) -> Tensor:
        """Convert the model's outputs [1, L, H] (sequence parallelism: [1, L/tp, H]) to hidden
        states [L, H] on every tensor-parallel rank. Backward sums the gradient over the ranks."""
        hidden = outputs.squeeze(0)
        group = parallel_state.get_tensor_model_parallel_group()
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=group)
        return copy_to_tensor_model_parallel_region(hidden, group=group)


def _nothing(
    hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, None]:
    """Return the hidden states unchanged, with the signature of the output layer's forward."""
    return hidden, None
