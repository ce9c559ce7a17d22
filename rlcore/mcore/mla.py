"""Multi-head latent attention (MLA) for Megatron's layer spec, arXiv:2405.04434.

    latent, shared key = down-projection of the hidden state
    keys, values of all heads = up-projection of the latent; each key ends with the shared key

Queries may have a latent of their own. RoPE rotates the ends of queries, and the shared key before
it is copied to the heads.

    down-projections and norms of latents   replicated
    up-projections, queries                 column-parallel, by head
    output                                  row-parallel

With sequence parallelism each rank computes the latents of its own tokens, and only latents are
gathered. An attribute of the replicated weights makes Megatron sum their gradients over the ranks.

Own code instead of Megatron's MLASelfAttention, whose RoPE runs in Python for each sequence and has
no positions for shared prefixes.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rlcore.hf.config import LATENT_EPS, HFConfig
from rlcore.mcore.attention import CoreAttention, Packed
from rlcore.mcore.norm import RMSNorm
from rlcore.mcore.rope import rotate


class LatentAttention(MegatronModule):
    """Self-attention of Megatron's layers in models with `HFConfig.mla`."""

    def __init__(
        self, config: Any, layer_number: int, pg_collection: Any, *, hf: HFConfig, **_: Any
    ) -> None:
        super().__init__(config=config)
        assert hf.mla is not None
        self._mla, self._tp = hf.mla, pg_collection.tp
        self._recomputes = config.recompute_granularity == "selective"
        mla, heads = hf.mla, hf.num_heads
        self._num_heads, self._head_dim = heads // self._tp.size(), hf.head_dim
        if mla.q_rank is None:
            self.linear_q_proj = self._up(hf.hidden_size, heads * hf.head_dim)
        else:
            self.linear_q_down_proj = Replicated(config, hf.hidden_size, mla.q_rank)
            self.q_layernorm = RMSNorm(config, mla.q_rank, LATENT_EPS)
            self.linear_q_up_proj = self._up(mla.q_rank, heads * hf.head_dim)
        self.linear_kv_down_proj = Replicated(config, hf.hidden_size, mla.kv_rank + mla.rope_dim)
        self.kv_layernorm = RMSNorm(config, mla.kv_rank, LATENT_EPS)
        self.linear_kv_up_proj = self._up(mla.kv_rank, heads * (mla.nope_dim + mla.value_dim))
        self.core_attention = CoreAttention(
            config,
            layer_number,
            AttnMaskType.causal,
            "self",
            softmax_scale=hf.softmax_scale,
            pg_collection=pg_collection,
        )
        self.linear_proj = RowParallelLinear(
            heads * mla.value_dim,
            hf.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self._tp,
        )

    def _up(self, width: int, rows: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            width,
            rows,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            tp_group=self._tp,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Packed | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Map the input [T, 1, hidden] to the attention's output, without bias; the signature is
        that of Megatron's attention."""
        packed = packed_seq_params
        assert packed is not None and packed.cos is not None and packed.sin is not None
        heads = self._heads(hidden_states, packed.cos, packed.sin)
        rotated = replace(packed, cos=None, sin=None)

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.core_attention(query, key, value, None, packed_seq_params=rotated)

        mixed = checkpoint(core, False, *heads) if self._recomputes else core(*heads)
        return self.linear_proj(mixed.unsqueeze(1))

    def _heads(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [T, heads, dim] and values [T, heads, value_dim] of this rank's
        heads."""
        mla = self._mla
        if mla.q_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        query = query.view(-1, self._num_heads, self._head_dim)
        latent, shared = self.linear_kv_down_proj(hidden).tensor_split((mla.kv_rank,), -1)
        expanded, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        expanded = expanded.view(-1, self._num_heads, mla.nope_dim + mla.value_dim)
        # Each rank has the gradient of its own heads; backward adds them.
        if self.config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self._tp)
        else:
            shared = copy_to_tensor_model_parallel_region(shared, group=self._tp)
        nope, turned = query.tensor_split((mla.nope_dim,), -1)
        query = torch.cat((nope, rotate(self._paired(turned), cos, sin)), -1)
        shared = rotate(self._paired(shared), cos, sin).expand(-1, self._num_heads, -1)
        nope, value = expanded.tensor_split((mla.nope_dim,), -1)
        return query, torch.cat((nope, shared), -1), value

    def _paired(self, x: Tensor) -> Tensor:
        """Order the dimensions as `rotate` pairs them; dot products do not depend on the order."""
        if not self._mla.is_interleaved:
            return x
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class Replicated(torch.nn.Module):
    """Projection without bias, of which each tensor-parallel rank has the whole weight."""

    def __init__(self, config: Any, width: int, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows, width, dtype=config.params_dtype))
        mark = bool(config.sequence_parallel)
        self.weight.sequence_parallel = mark  # type: ignore[attr-defined]  # Megatron reads it

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
