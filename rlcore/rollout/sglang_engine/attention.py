"""Attention over drafts in plain torch, because SGLang has none for a CPU."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def extend(
    original: Callable[..., Tensor],
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
) -> Tensor:
    """Wrap `TorchNativeAttnBackend.forward_extend` for steps that verify drafts, not for prefills.

    A verify step has `draft_token_num` tokens per request after the `seq_lens` tokens in the cache.
    Attention is causal. A single token is computed as in SGLang's decode step.
    """
    if not forward_batch.forward_mode.is_target_verify():
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache)
    # The mask below supports no sliding window; `HFConfig` rejects models with a window earlier.
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        raise NotImplementedError("drafts on a CPU do not support a sliding window")
    if save_kv_cache:
        where = KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc)
        backend.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    values = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)
    table, width = backend.req_to_token_pool.req_to_token, forward_batch.spec_info.draft_token_num
    q = q.reshape(-1, width, layer.tp_q_head_num, layer.qk_head_dim)
    out = q.new_empty((*q.shape[:-1], layer.v_head_dim))
    for i, past in enumerate(forward_batch.seq_lens.tolist()):
        at = table[forward_batch.req_pool_indices[i], : past + width].long()
        mask = None
        if width > 1:
            mask = torch.ones(width, past + width, dtype=torch.bool, device=q.device).tril(past)
        out[i] = scaled_dot_product_attention(
            q[i].transpose(0, 1)[None],
            keys[at].transpose(0, 1)[None].to(q.dtype),
            values[at].transpose(0, 1)[None].to(q.dtype),
            attn_mask=mask,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )[0].transpose(0, 1)
    return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
