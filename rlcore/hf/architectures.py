"""List the supported architectures: what each class of transformers does beyond config.json.

`hf.names` lists the tensors of an architecture, `hf.model` computes it for the torch engine, and
`mcore.build` and `mcore.bridge` build it for the learner.
"""

from dataclasses import dataclass
from typing import Literal

Switch = Literal["never", "always", "key"]
"""Whether models have a part; `key`: if a key of config.json is true."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One class of models in transformers."""

    class_name: str
    model_type: str
    qkv_bias: Switch = "never"
    """Bias of the query, key and value projections; its key is `attention_bias`."""
    qk_norm: Switch = "never"
    """RMSNorm of each head's query and key; its key is `use_qk_norm`."""
    has_mla: bool = False
    """Whether attention is multi-head latent attention (arXiv:2405.04434)."""
    router: Literal["softmax", "sigmoid"] | None = None
    """Score function of the routers; None: the model has no experts. With sigmoids, routers choose
    by score plus a bias, may choose groups of experts first, and experts may be shared."""
    head_dim: int | None = None
    """Default of `head_dim`; None: hidden size divided by the number of heads."""
    max_positions: int = 32768
    """Default of `max_position_embeddings`."""
    sliding_window: Switch = "never"
    """Whether attention reaches only `sliding_window` tokens; its key is `use_sliding_window`."""
    partial_rotary_factor: float | None = None
    """Default of `partial_rotary_factor`, the share of a head's dimensions that rotate; None: the
    class ignores this key."""


_ALL = (
    Architecture(
        class_name="Qwen2ForCausalLM",
        model_type="qwen2",
        qkv_bias="always",
        sliding_window="key",
    ),
    Architecture(
        class_name="Qwen3ForCausalLM",
        model_type="qwen3",
        qk_norm="always",
        head_dim=128,
        sliding_window="key",
    ),
    Architecture(class_name="LlamaForCausalLM", model_type="llama", max_positions=2048),
    Architecture(
        class_name="MistralForCausalLM",
        model_type="mistral",
        max_positions=131072,
        sliding_window="always",
    ),
    Architecture(
        class_name="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        qk_norm="always",
        router="softmax",
        sliding_window="key",
    ),
    Architecture(
        class_name="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        has_mla=True,
        router="sigmoid",
        max_positions=4096,
    ),
    Architecture(
        class_name="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        qkv_bias="key",
        qk_norm="key",
        router="sigmoid",
        max_positions=131072,
        partial_rotary_factor=0.5,
    ),
)
ARCHITECTURES = {arch.class_name: arch for arch in _ALL}
"""Architectures by the name of the class."""
BY_TYPE = {arch.model_type: arch for arch in _ALL}
"""Architectures by `model_type`."""
