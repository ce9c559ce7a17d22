"""The torch engine's forward against transformers, for every architecture and RoPE scaling."""

import copy
from dataclasses import replace

import pytest
import torch

from rlcore.hf.cache import Cache
from rlcore.hf.config import HFConfig
from rlcore.hf.model import CausalLM, ForwardInputs
from rlcore.hf.rope_settings import Rope
from tests.contracts.engine_contract import load_oracle, weights

ROWS, LENGTH, PREFIX = 3, 40, 25
STD = 0.15
TOKENS = torch.randint(61, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 4,
    "original_max_position_embeddings": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rope_parameters": YARN},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "rope_parameters": PLAIN | {"rope_type": "linear", "factor": 2.5},
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_parameters": SCALED},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "rope_parameters": PLAIN,
        "head_dim": 16,
        "sliding_window": LENGTH,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "rope_parameters": PLAIN,
        "head_dim": 8,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
}
CONFIGS["glm4_moe"] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5},
    "head_dim": 8,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
MLA = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "rope_parameters": PLAIN,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,  # not that of the latents' norms
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
EXPERTS = "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"
EXPERTS += "n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace"
CONFIGS["deepseek_v3"] = MLA | {key: CONFIGS["glm4_moe"][key] for key in EXPERTS}
ALL_DENSE = CONFIGS["deepseek_v3"] | {"first_k_dense_replace": 2}
ALL_DENSE["rope_parameters"] = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}
CONFIGS["deepseek_v3_dense"] = ALL_DENSE | {"q_lora_rank": None, "qk_nope_head_dim": 5}
CONFIGS["deepseek_v3_in_halves"] = ALL_DENSE | {"rope_interleave": False}
CONFIGS["qwen3_moe_mixed"] = CONFIGS["qwen3_moe"] | {"decoder_sparse_step": 2}
for _name, _config in CONFIGS.items():
    CONFIGS[_name] = BASE | {"model_type": _name.removesuffix("_mixed")} | _config


def oracle_logits(config, dtype, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    # A copy, because transformers changes it.
    hf = AutoConfig.for_model(**copy.deepcopy(config | changes))
    model = AutoModelForCausalLM.from_config(
        hf, attn_implementation="eager", experts_implementation="eager"
    )
    model = model.to(dtype).eval()
    load_oracle(model, weights(HFConfig.from_dict(config), 3, STD))
    with torch.no_grad():
        return model(TOKENS).logits


def make(config, dtype, **changes):
    hf = replace(HFConfig.from_dict(config), **changes)
    model = CausalLM(hf, dtype=dtype, device=torch.device("cpu"), max_tokens=64)
    model.allocate()
    for name, tensor in weights(hf, 3, STD).items():
        model.load(name, tensor)
    cache = Cache(
        hf.num_layers,
        hf.cache_shape,
        dtype=dtype,
        device=torch.device("cpu"),
        max_slots=8,
        max_columns=64,
        budget=512,
    )
    cache.reserve(5, LENGTH, 0)
    return model, cache


def step_of(tokens, start, slot, causal):
    rows, new = tokens.shape
    positions = torch.arange(start, start + new).expand(rows, -1)
    return ForwardInputs(tokens, positions, slot, [(0, rows, start + new)], causal)


@pytest.mark.parametrize("arch", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@torch.inference_mode()
def test_logits_equal_transformers_whole_in_parts_and_token_by_token(arch, dtype):
    config = CONFIGS[arch]
    compare(*make(config, dtype), oracle_logits(config, dtype))


@pytest.mark.parametrize("partial", [0.25, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@torch.inference_mode()
def test_partial_rotation_is_that_of_glm_without_experts(partial, dtype):
    """With YaRN too, so that numbers other than 1 multiply the dimensions that rotate."""
    config = CONFIGS["qwen3"] | {"rope_parameters": YARN}
    model, cache = make(config, dtype)
    rope = replace(model.hf.rope, partial=partial)
    glm = {"model_type": "glm4_moe", "use_qk_norm": True, "partial_rotary_factor": partial}
    want = oracle_logits(config, dtype, first_k_dense_replace=2, **glm)
    compare(*make(config, dtype, rope=rope), want)
    rotated = model.logits(model.forward(step_of(TOKENS, 0, 0, True), cache))
    assert (rotated - want).abs().max() > 0.1


def compare(model, cache, want):
    """Compare the logits of TOKENS, whole, in parts and token by token, with `want`."""
    # transformers normalises in float32 even in a float64 model, so both are compared at 1e-5.
    tokens, limit = TOKENS, 1e-5
    whole = model.logits(model.forward(step_of(tokens, 0, 0, True), cache))
    assert (whole - want).abs().max() <= limit
    if model.dtype == torch.float64:  # but with itself the float64 engine agrees to the last digits
        want, limit = whole, 1e-12

    model.fill(step_of(tokens[:, :PREFIX], 0, 2, True), cache)
    part = model.forward(step_of(tokens[:, PREFIX:-3], PREFIX, 2, False), cache)
    assert (model.logits(part) - want[:, PREFIX:-3]).abs().max() <= limit
    for at in range(LENGTH - 3, LENGTH):
        one = step_of(tokens[:, at : at + 1], at, 2, False)
        one.spans = [(0, 2, at + 1), (2, 3, at + 1)]
        logits = model.logits(model.forward(one, cache))
        assert (logits[:, 0] - want[:, at]).abs().max() <= limit


@pytest.mark.parametrize("arch", CONFIGS)
@torch.inference_mode()
def test_bfloat16_stays_near_float32(arch):
    config = CONFIGS[arch]
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        model, cache = make(config, dtype)
        logits[dtype] = model.logits(model.forward(step_of(TOKENS, 0, 0, True), cache))
    exact, rough = logits.values()
    assert rough.dtype == torch.float32
    error = (exact - rough).norm(dim=-1) / exact.norm(dim=-1)  # [B, S]
    assert error.median() < 0.03  # a few tokens may take another expert
    assert error.max() < 0.05 or "moe" in arch


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_every_name_has_its_own_memory_and_comes_back_as_it_was_loaded(partial):
    config = CONFIGS["qwen3_moe"]
    model, _ = make(config, torch.float32, rope=Rope(theta=1e4, partial=partial))
    for name, tensor in weights(model.hf, 3, STD).items():
        view = model.views[name]
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            assert all(torch.equal(head.reshape(-1), tensor) for head in view)
        else:
            assert torch.equal(view.reshape(tensor.shape), tensor), name
