"""Self-attention with more tensor-parallel ranks than key-value heads.

Several neighbouring ranks then share a query group: its queries, one key and one value. Each holds
an equal part of the group's rows in linear_qkv, gathers the group's outputs, and keeps the key, the
value and the queries of its own heads. Backward sums the gradients over these ranks.

Megatron's own layers gather the outputs of all groups on every rank, and keep them for backward.
The parameters and their division are Megatron's, so checkpoints and optimizer need nothing new.
"""

from typing import Any

import torch.distributed as dist
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class SharedHeadsAttention(SelfAttention):
    """Self-attention whose query group is shared by the ranks of `neighbours`."""

    def __init__(self, *args: Any, neighbours: dist.ProcessGroup, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._neighbours = neighbours

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map the input [T, 1, hidden] to this rank's queries [T, 1, heads, dim] and to the key and
        the value [T, 1, 1, dim] of its group."""
        assert split_qkv and not output_gate, "rlcore sets neither option"
        part, _ = self.linear_qkv(hidden_states)
        group = all_gather_last_dim_from_tensor_parallel_region(part, group=self._neighbours)
        heads = group.unflatten(-1, (-1, self.hidden_size_per_attention_head))
        num_own = (heads.size(-2) - 2) // self._neighbours.size()
        own = heads.narrow(-2, self._neighbours.rank() * num_own, num_own)
        # Views would keep the heads of the other ranks in memory.
        query, key, value = (
            x.contiguous() for x in (own, heads[..., -2:-1, :], heads[..., -1:, :])
        )
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value
