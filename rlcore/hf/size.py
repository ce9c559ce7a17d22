"""Size of a model: its parameters, KV cache and FLOPs, from its config.json."""

import math
from dataclasses import dataclass

from rlcore.hf.config import HFConfig
from rlcore.hf.lora import LoraSettings, num_adapter_parameters
from rlcore.hf.names import num_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Model properties that determine the cost of a transformer."""

    name: str
    parameters: float
    """All parameters; a tied head counts once."""
    layers: int
    hidden: int
    attention: int
    """Width of the attention: heads times size of a head, the mean of keys and values."""
    kv_heads: int
    layer_kv_bytes: float
    """Bytes of a layer's keys and values of one token in training."""
    cache_heads: int
    """Number of heads over which an engine's tensor parallelism divides its KV cache."""
    kv_bytes: float
    """Bytes of KV cache per token, over all layers."""
    embeddings: float
    """Parameters that are looked up and not multiplied: the input embeddings, unless the head uses
    them too."""
    head: float
    """Parameters of the output layer, tied or not."""
    experts: float = 0.0
    """Parameters of all experts, over all layers; 0: a dense model."""
    expert_share: float = 1.0
    """Share of a layer's experts that a token uses."""
    experts_per_token: int = 0
    adapters: float = 0.0
    """Parameters of LoRA adapters, if only they are trained; 0: all weights are."""

    @property
    def trained(self) -> float:
        """Return the number of parameters that have gradients and optimizer states."""
        return self.adapters or self.parameters

    @property
    def dense(self) -> float:
        """Return the number of parameters in the matrix products of every token."""
        return self.parameters - self.embeddings - self.experts

    @property
    def products(self) -> float:
        """Return the number of parameters in the matrix products of one token, which uses only
        `experts_per_token` experts of a layer."""
        return self.dense + self.experts * self.expert_share

    def train_flops(self, tokens: float, squares: float) -> float:
        """Return the FLOPs of forward and backward passes over sequences with `tokens` in all and
        `squares` as the sum of their squared lengths. Attention is causal: half of all pairs.
        Weights that are not trained have no gradient, which is a third of the FLOPs."""
        linear = 4 * self.products + 6 * self.adapters if self.adapters else 6 * self.products
        return linear * tokens + 6 * self.layers * self.attention * squares


def size_of(hf: HFConfig, name: str = "", lora: LoraSettings | None = None) -> ModelSize:
    """Return the properties of the model that a config.json describes, trained as `lora` says."""
    one = 3.0 * hf.hidden_size * hf.moe_intermediate_size
    experts = one * hf.num_experts * len(hf.moe_layers)
    return ModelSize(
        name=name or hf.arch,
        parameters=float(num_parameters(hf)),
        layers=hf.num_layers,
        hidden=hf.hidden_size,
        attention=hf.num_heads * (hf.head_dim + hf.value_dim) // 2,
        kv_heads=hf.num_kv_heads,
        layer_kv_bytes=2.0 * hf.num_kv_heads * (hf.head_dim + hf.value_dim),
        cache_heads=hf.cache_shape[1],
        kv_bytes=2.0 * hf.num_layers * math.prod(hf.cache_shape),
        embeddings=0.0 if hf.tie_word_embeddings else float(hf.vocab_size * hf.hidden_size),
        head=float(hf.vocab_size * hf.hidden_size),
        experts=experts,
        expert_share=hf.experts_per_token / hf.num_experts if hf.num_experts else 1.0,
        experts_per_token=hf.experts_per_token,
        adapters=float(num_adapter_parameters(hf, lora)) if lora and lora.rank else 0.0,
    )
