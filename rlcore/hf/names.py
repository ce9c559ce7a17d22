"""List names and shapes of all tensors of a model on disk, in one fixed order.

Order: embedding, layers by number, final norm, lm_head (absent if tied); inside a layer, the order
of `layer_shapes`. Experts have one tensor per projection each, as in transformers.
"""

import math
from typing import TYPE_CHECKING

from rlcore.hf.config import HFConfig, LatentSizes

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
EXPERT_BIAS = "mlp.gate.e_score_correction_bias"
"""Bias of a router's choice: float32 in a model of any dtype."""


def dtype_of(name: str, dtype: "torch.dtype") -> "torch.dtype":
    """Return the data type of tensor `name` in a model of `dtype`."""
    import torch  # slow, and plans need only names

    return torch.float32 if name.endswith(EXPERT_BIAS) else dtype


def layer_prefix(layer: int) -> str:
    """Return the name prefix of a layer, such as `model.layers.3.` for layer 3."""
    return f"model.layers.{layer}."


def layer_shapes(hf: HFConfig, layer: int) -> dict[str, Shape]:
    """Return the shapes of a layer's tensors by name, without the layer's prefix. Matrices are
    [out, in]."""
    hidden = hf.hidden_size
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    shapes |= _latent(hf, hf.mla) if hf.mla else _heads(hf)
    shapes["self_attn.o_proj.weight"] = (hidden, hf.num_heads * hf.value_dim)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    if not hf.has_experts(layer):
        return shapes | _mlp("mlp.", hidden, hf.intermediate_size)
    shapes["mlp.gate.weight"] = (hf.num_experts, hidden)
    if hf.has_expert_bias:
        shapes[EXPERT_BIAS] = (hf.num_experts,)
    for expert in range(hf.num_experts):
        shapes |= _mlp(f"mlp.experts.{expert}.", hidden, hf.moe_intermediate_size)
    if hf.shared_intermediate_size:
        shapes |= _mlp("mlp.shared_experts.", hidden, hf.shared_intermediate_size)
    return shapes


def _heads(hf: HFConfig) -> dict[str, Shape]:
    hidden = hf.hidden_size
    queries, keys = hf.num_heads * hf.head_dim, hf.num_kv_heads * hf.head_dim
    projections = (("q", queries), ("k", keys), ("v", keys))
    shapes: dict[str, Shape] = {
        f"self_attn.{name}_proj.weight": (out, hidden) for name, out in projections
    }
    if hf.qkv_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (out,) for name, out in projections}
    if hf.qk_norm:
        shapes["self_attn.q_norm.weight"] = (hf.head_dim,)
        shapes["self_attn.k_norm.weight"] = (hf.head_dim,)
    return shapes


def _latent(hf: HFConfig, mla: LatentSizes) -> dict[str, Shape]:
    hidden, queries = hf.hidden_size, hf.num_heads * hf.head_dim
    shapes: dict[str, Shape] = {"self_attn.q_proj.weight": (queries, hidden)}
    if mla.q_rank:
        shapes = {
            "self_attn.q_a_proj.weight": (mla.q_rank, hidden),
            "self_attn.q_a_layernorm.weight": (mla.q_rank,),
            "self_attn.q_b_proj.weight": (queries, mla.q_rank),
        }
    keys_and_values = hf.num_heads * (mla.nope_dim + mla.value_dim)
    return shapes | {
        "self_attn.kv_a_proj_with_mqa.weight": (mla.kv_rank + mla.rope_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (mla.kv_rank,),
        "self_attn.kv_b_proj.weight": (keys_and_values, mla.kv_rank),
    }


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def expected(hf: HFConfig) -> dict[str, Shape]:
    """Return the shapes of all tensors of the model by name, in the order of export."""
    shapes: dict[str, Shape] = {EMBED: (hf.vocab_size, hf.hidden_size)}
    forms = {form: layer_shapes(hf, layer) for form, layer in hf.forms.items()}
    for number in range(hf.num_layers):
        prefix = layer_prefix(number)
        shapes |= {prefix + name: shape for name, shape in forms[hf.has_experts(number)].items()}
    shapes[NORM] = (hf.hidden_size,)
    if not hf.tie_word_embeddings:
        shapes[HEAD] = (hf.vocab_size, hf.hidden_size)
    return shapes


def num_parameters(hf: HFConfig) -> int:
    """Return the number of parameters of the model; a tied head counts once."""
    return sum(math.prod(shape) for shape in expected(hf).values())
