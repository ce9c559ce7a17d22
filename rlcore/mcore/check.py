"""Check the learner's settings before anything is built.

This module does not import Megatron, because the import would slow a dry run by seconds.
"""

import importlib.util

import torch

from rlcore.config import rules
from rlcore.config.schema import NO_ADAPTERS, LoraConfig, ModelConfig, TrainConfig
from rlcore.hf import lora as peft
from rlcore.hf.config import HFConfig
from rlcore.hf.rope_settings import Rope
from rlcore.mcore.layout import check_model
from rlcore.ops import native
from rlcore.utils.errors import ConfigError


def check(
    hf: HFConfig, model: ModelConfig, train: TrainConfig, lora: LoraConfig = NO_ADAPTERS
) -> None:
    """Check that the learner supports these settings. No process groups are needed.

    Raises:
        ConfigError: a setting is not supported; the text names the key, its value and what to do.
    """
    check_model(hf, train)
    if hf.has_expert_bias:
        _check_router(hf)
    if lora.rank:
        _check_adapters(hf, train, lora)
    cuda = torch.cuda.is_available()
    if train.true_on_policy:
        _check_true_on_policy(hf, model, train, cuda)
    if model.dtype == "float64" and train.distributed_optimizer:
        raise ConfigError(
            "--model.dtype float64: Megatron's distributed optimizer keeps fp32 states; "
            "use --no-train.distributed_optimizer or another dtype"
        )
    for name in ("moe_aux_loss_coef", "moe_z_loss_coef", "moe_bias_update_rate"):
        value = getattr(train, name)
        if value and not hf.num_experts:
            raise ConfigError(f"--train.{name} {value:g}: the model has no experts; leave it at 0")
        if value and lora.rank:
            raise ConfigError(
                f"--train.{name} {value:g}: with --lora.rank the routers are not trained; leave it "
                "at 0"
            )
    if train.moe_dispatcher == "flex":
        _check_flex(cuda)
    if train.moe_shared_expert_overlap and not hf.shared_intermediate_size:
        raise ConfigError(
            "--train.moe_shared_expert_overlap True: the model has no shared experts; leave it off"
        )
    if train.moe_bias_update_rate and not hf.has_expert_bias:
        raise ConfigError(
            f"--train.moe_bias_update_rate {train.moe_bias_update_rate:g}: the model's routers "
            "have no expert bias; leave it at 0, or use --train.moe_aux_loss_coef"
        )
    if train.transformer_impl == "te":
        if hf.mla:
            raise ConfigError(
                "--train.transformer_impl te: does not support latent attention; use "
                "--train.transformer_impl local"
            )
        if not cuda or importlib.util.find_spec("transformer_engine") is None:
            raise ConfigError(
                "--train.transformer_impl te: Transformer Engine is not installed here (it needs "
                "CUDA); install it with tools/setup.sh or use --train.transformer_impl local"
            )
        if not rules.has_own_attention(train) and not _megatron_scales(hf.rope):
            raise ConfigError(
                f"--train.transformer_impl te: Megatron has no RoPE scaling {hf.rope.kind} with "
                "this model's factors; use --train.transformer_impl local or --train.share_prefix "
                "true"
            )
    if train.apex and (
        not cuda or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None
    ):
        raise ConfigError(
            "--train.apex True: Apex' extension fused_weight_gradient_mlp_cuda is not installed; "
            "build it with tools/setup.sh --apex or leave --train.apex off"
        )


def _check_true_on_policy(hf: HFConfig, model: ModelConfig, train: TrainConfig, cuda: bool) -> None:
    """Check that sampler and learner have the same batch-invariant operations for this model."""
    key = "--train.true_on_policy True"
    if hf.num_experts or hf.mla:
        what = "experts" if hf.num_experts else "latent attention"
        raise ConfigError(f"{key}: supports dense models, and this one has {what}; turn it off")
    if train.transformer_impl == "te":
        return
    if cuda:
        raise ConfigError(
            f"{key}: the local layers have batch-invariant operations only on a CPU; use "
            "--train.transformer_impl te and --rollout.engine sglang on a GPU"
        )
    if model.dtype != "float32":
        raise ConfigError(
            f"--model.dtype {model.dtype}: on a CPU train.true_on_policy needs float32; set it, or "
            "turn true_on_policy off"
        )
    if hf.rope_dim != hf.rope.dims(hf.rope_dim):
        raise ConfigError(f"{key}: does not support RoPE of only a part of a head; turn it off")
    if native.torch_ops("batch-invariant operations") is None:
        raise ConfigError(
            f"{key}: the batch-invariant operations are native code, which does not run here; run "
            "bash tools/setup.sh, and leave RLCORE_NATIVE unset"
        )


def _check_flex(cuda: bool) -> None:
    if not cuda or importlib.util.find_spec("deep_ep") is None:
        raise ConfigError(
            "--train.moe_dispatcher flex: needs CUDA and DeepEP (package deep_ep), which is not "
            "installed here; install it, or use alltoall"
        )


def _check_router(hf: HFConfig) -> None:
    """Check that Megatron's router with sigmoids computes what the model's does."""
    if hf.experts_per_token == 1:
        raise ConfigError(
            "--model.path: num_experts_per_tok 1: Megatron does not divide the score of one expert "
            "by itself; use a model with 2 experts per token or more"
        )
    if hf.expert_groups > 1 and hf.experts_per_token // hf.groups_per_token != 2:
        raise ConfigError(
            f"--model.path: num_experts_per_tok {hf.experts_per_token} with topk_group "
            f"{hf.groups_per_token}: the model scores a group of experts by its best two, Megatron "
            "by as many as are taken of each group; use a model that takes 2 of each group"
        )


def check_replay(hf: HFConfig) -> None:
    """Raise ConfigError if the model has no experts, whose choice could be replayed."""
    if not hf.num_experts:
        raise ConfigError(
            "--algo.routing_replay: the model has no experts; leave it at none for a dense model"
        )


def _check_adapters(hf: HFConfig, train: TrainConfig, lora: LoraConfig) -> None:
    if hf.mla:
        raise ConfigError(
            f"--lora.rank {lora.rank}: adapters do not support latent attention; set it to 0"
        )
    if train.tp > hf.num_kv_heads:
        raise ConfigError(
            f"--train.tp {train.tp}: with --lora.rank it must be at most the model's "
            f"{hf.num_kv_heads} key-value heads; use --train.pp or --train.cp for the rest"
        )
    if lora.experts and train.etp > 1:
        raise ConfigError(
            f"--train.etp {train.etp}: adapters of experts are not divided; set --train.etp 1, or "
            "leave --lora.experts off"
        )
    overlaps = train.moe_shared_expert_overlap and train.tp > 1
    if overlaps and any(".shared_experts." in name for name in peft.adapted(hf, lora)):
        raise ConfigError(
            f"--train.moe_shared_expert_overlap True: with --train.tp {train.tp} shared experts "
            "cannot have adapters; turn it off, or set --lora.targets to projections of attention"
        )
    if lora.experts and not hf.num_experts:
        raise ConfigError("--lora.experts: the model has no experts; unset it")
    if not peft.adapted(hf, lora):
        raise ConfigError(
            f"--lora.targets {' '.join(lora.targets)}: are projections of experts; set "
            "--lora.experts, or name projections of attention"
        )


def _megatron_scales(rope: Rope) -> bool:
    """Return whether Megatron's own RoPE computes this scaling: none, or that of Llama 3.1."""
    fixed = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings
    return rope.kind == "default" or (rope.kind == "llama3" and fixed == (1, 4, 8192))
