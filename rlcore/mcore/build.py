"""Build Megatron's model from a Hugging Face config: settings, layers and chunks.

The same layers run on CPU and GPU: Megatron's local layers with rlcore's RMSNorm and core
attention. `train.transformer_impl te` uses Transformer Engine's layers instead, if installed.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules

from rlcore.config import rules
from rlcore.config.schema import NO_ADAPTERS, LoraConfig, ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.mcore import parallel, wgrad
from rlcore.mcore.activation import SwiGLU
from rlcore.mcore.attention import CoreAttention
from rlcore.mcore.check import check
from rlcore.mcore.experts import experts_of
from rlcore.mcore.layout import ParallelLayout
from rlcore.mcore.lora import attach
from rlcore.mcore.mla import LatentAttention
from rlcore.mcore.norm import RMSNorm
from rlcore.mcore.shared_heads import SharedHeadsAttention
from rlcore.mcore.shim import patch_moe_utils
from rlcore.mcore.value_head import ValueHead
from rlcore.utils.log import announce

Head = Literal["lm", "value"]
"""Output of the model per token: logits (`lm`), or one value (`value`, for a critic)."""


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Return the number of embedding rows: the vocabulary size rounded up to a multiple of `tp`.
    Rows beyond the vocabulary are never looked up and have probability 0."""
    return -(-vocab_size // tp) * tp


def dtype_of(model: ModelConfig) -> torch.dtype:
    """Return the torch dtype of the model's parameters."""
    return getattr(torch, model.dtype)


def transformer_config(hf: HFConfig, model: ModelConfig, train: TrainConfig) -> TransformerConfig:
    """Return Megatron's `TransformerConfig` for this model, dtype and parallel layout."""
    dtype = dtype_of(model)
    cuda = torch.cuda.is_available()
    local = train.transformer_impl == "local"
    settings: dict = {
        "num_layers": hf.num_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_heads,
        "num_query_groups": hf.num_kv_heads,
        "kv_channels": hf.head_dim,
        "ffn_hidden_size": hf.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.qkv_bias,
        "qk_layernorm": hf.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": train.tp,
        "pipeline_model_parallel_size": train.pp,
        "context_parallel_size": train.cp,
        "expert_model_parallel_size": train.ep,
        "expert_tensor_parallel_size": train.etp,
        "sequence_parallel": train.sp and train.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # The loss is a sum over tokens; the learner divides it once, by the global normaliser.
        "calculate_per_token_loss": True,
        "variable_seq_lengths": train.pp > 1,
        # Otherwise the host waits for the GPU after every send, a workaround for old torch.
        "batch_p2p_sync": False,
        "moe_token_dispatcher_type": train.moe_dispatcher,
        "moe_shared_expert_overlap": train.moe_shared_expert_overlap,
        # Megatron's init must run: it marks tensor-parallel weights for the gradient norm.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "use_cpu_initialization": not cuda,
        "gradient_accumulation_fusion": train.apex or (local and wgrad.prepare(dtype)),
        "persist_layer_norm": False,
        "apply_rope_fusion": not local,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": cuda,
        "use_te_activation_func": not cuda,
        "cross_entropy_loss_fusion": False,
        "attention_softmax_in_fp32": True,
        "cuda_graph_scope": [],
    }
    if train.vpp > 1:
        settings |= {
            "virtual_pipeline_model_parallel_size": train.vpp,
            "microbatch_group_size_per_vp_stage": train.pp,
            # With batched sends, two stages of two chunks compute a wrong loss without an error.
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    if train.pp_layers:
        stages = [["decoder"] * count for count in train.pp_layers]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        settings["pipeline_model_parallel_layout"] = stages
    if train.recompute != "none":
        settings["recompute_granularity"] = train.recompute
        if train.recompute == "full":
            settings |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if train.true_on_policy and not local:
        settings |= {"batch_invariant_mode": True, "attention_backend": AttnBackend.flash}
    if hf.num_experts:
        settings |= {
            "num_moe_experts": hf.num_experts,
            "moe_router_topk": hf.experts_per_token,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_pre_softmax": not hf.norm_topk_prob,
            "moe_shared_expert_intermediate_size": hf.shared_intermediate_size or None,
            "moe_router_dtype": "fp32" if dtype is not torch.float64 else "fp64",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_bias_update_rate": 0.0,  # balance.py updates biases
            "moe_grouped_gemm": not local,
            "moe_permute_fusion": False,
        }
    if hf.has_expert_bias:
        settings |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": hf.routing_scale,
        }
    if hf.expert_groups > 1:
        settings |= {
            "moe_router_num_groups": hf.expert_groups,
            "moe_router_group_topk": hf.groups_per_token,
        }
    return TransformerConfig(**settings)


def _leave(weight: torch.Tensor) -> None:
    """Leave the weight unchanged; Megatron gets this function as its weight initialisation."""


def _forget_routes(moe: MoELayer, *_: object) -> None:
    """Drop what a dispatcher keeps of its last forward. With full recomputation the probabilities
    keep the layer's input and its gradient alive until the next step (Megatron's issue 3221)."""
    dispatcher = moe.token_dispatcher
    if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
        dispatcher.probs = dispatcher.routing_map = None
        dispatcher.reversed_local_input_permutation_mapping = None


def _own_groups(moe: MoELayer) -> None:
    """Mark the experts' parameters, so that their gradients are summed over the ranks that hold
    the same parts. With ep 1, Megatron takes the data-parallel ranks, also if etp is not tp."""
    for param in moe.experts.parameters():
        param.allreduce = False  # Megatron reads it


def _block_spec(
    hf: HFConfig,
    config: TransformerConfig,
    train: TrainConfig,
    layers: range,
    experts: type[SequentialMLP] | None,
) -> TransformerBlockSubmodules:
    """Return the spec of a model chunk with these layers. Only a spec of the block can replace the
    final norm, which belongs to the block."""
    te = train.transformer_impl == "te"
    make, norm = (_te_spec, LayerNormImpl) if te else (_local_spec, RMSNorm)
    forms = {form: make(hf, config, train, form, experts) for form in hf.forms}
    specs = [forms[hf.has_experts(layer)] for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _te_spec(
    hf: HFConfig,
    config: TransformerConfig,
    train: TrainConfig,
    has_experts: bool,
    experts: type[SequentialMLP] | None,
) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    parts = layer.submodules
    _share_heads(config, parts.self_attention)
    if has_experts:
        # This norm is a module of its own; checkpoints name it as those of all other layers.
        parts.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    if rules.has_own_attention(train):
        attention = parts.self_attention.submodules
        attention.core_attention = CoreAttention
    return layer


def _local_spec(
    hf: HFConfig,
    config: TransformerConfig,
    train: TrainConfig,
    has_experts: bool,
    experts: type[SequentialMLP] | None,
) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if hf.mla:
        parts.self_attention = ModuleSpec(module=LatentAttention, params={"hf": hf})
    else:
        _share_heads(config, parts.self_attention)
        attention = parts.self_attention.submodules
        attention.core_attention = CoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    if has_experts and experts is not None:
        parts.mlp.submodules.experts.module = experts
    if config.use_te_activation_func:
        mlp = parts.mlp.submodules
        if has_experts:
            mlp.experts.submodules.activation_func = SwiGLU
        else:
            mlp.activation_func = SwiGLU
        if has_experts and mlp.shared_experts is not None:
            mlp.shared_experts.submodules.activation_func = SwiGLU
    return layer


def _share_heads(config: TransformerConfig, spec: ModuleSpec) -> None:
    """With more tensor-parallel ranks than key-value heads, let neighbouring ranks share a head."""
    tp, heads = config.tensor_model_parallel_size, config.num_query_groups
    if tp > heads:
        spec.module = SharedHeadsAttention
        spec.params["neighbours"] = parallel.neighbours(tp // heads)


def build(
    hf: HFConfig,
    model: ModelConfig,
    train: TrainConfig,
    layout: ParallelLayout,
    device: torch.device,
    head: Head = "lm",
    lora: LoraConfig = NO_ADAPTERS,
) -> list[GPTModel]:
    """Build this rank's model chunks; the process groups of `layout` must exist. Only a value head
    is initialised; all other weights are undefined, and those of adapters."""
    check(hf, model, train, lora)
    if hf.num_experts:
        patch_moe_utils()
    config = transformer_config(hf, model, train)
    if config.batch_invariant_mode:
        # Import late, because the module needs Triton.
        from megatron.core.transformer.custom_layers import batch_invariant_kernels

        batch_invariant_kernels.enable_batch_invariant_mode()
    announce("layers", "Transformer Engine" if train.transformer_impl == "te" else "Megatron local")
    if config.gradient_accumulation_fusion:
        announce("weight gradients", "added up in float32 within the products")
    experts = None
    # The grouped GEMM takes weights, and so passes adapters by.
    if hf.num_experts and train.transformer_impl != "te" and not (lora.rank and lora.experts):
        experts = experts_of(config, device)
    chunks = []
    for stage in range(layout.vpp):
        vp_stage = stage if layout.vpp > 1 else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=_block_spec(
                hf, config, train, layout.layers(hf.num_layers, stage), experts
            ),
            vocab_size=padded_vocab(hf.vocab_size, train.tp),
            max_sequence_length=hf.max_positions,
            pre_process=layout.is_first_stage and stage == 0,
            post_process=layout.is_last_stage and stage == layout.vpp - 1,
            share_embeddings_and_output_weights=hf.tie_word_embeddings and head == "lm",
            # The own core attention applies RoPE itself (rope.py).
            position_embedding_type="none" if rules.has_own_attention(train) else "rope",
            rotary_base=hf.rope.theta,
            rotary_percent=hf.rope.partial,
            rope_scaling=hf.rope.kind == "llama3",
            rope_scaling_factor=hf.rope.factor,
            parallel_output=True,
            vp_stage=vp_stage,
        )
        if head == "value" and chunk.post_process:
            chunk.output_layer = ValueHead(config)
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                module.register_forward_hook(_forget_routes)
                if layout.has_own_expert_groups:
                    _own_groups(module)
        chunks.append(chunk.to(device))
        if lora.rank:
            attach(chunk, hf, lora, recompute=train.recompute == "full")
    assert parallel_state.model_parallel_is_initialized()
    return chunks
