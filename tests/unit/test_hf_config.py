"""config.json in both spellings, what is refused, and how it is written back."""

import json
from pathlib import Path

import pytest
import torch

from rlcore.hf.config import HFConfig
from rlcore.hf.names import expected, num_parameters
from rlcore.hf.rope_settings import Rope
from tests import kit

# As transformers 4 wrote it for Qwen2.5-0.5B-Instruct.
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {**LLAMA3_SCALING, "rope_type": "llama3"},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}

MOONLIGHT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "kv_lora_rank": 512,
    "max_position_embeddings": 8192,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_the_spelling_of_transformers_4_is_read() -> None:
    hf = HFConfig.from_dict(QWEN2)
    assert (hf.arch, hf.head_dim, hf.qkv_bias, hf.qk_norm) == ("qwen2", 64, True, False)
    assert (hf.rope, hf.dtype) == (Rope(theta=1e6), "bfloat16")
    assert (hf.eos_ids, hf.pad_id, hf.tie_word_embeddings) == ((151645,), None, True)


def test_the_spelling_of_transformers_5_says_the_same() -> None:
    new = {**QWEN3_MOE, "num_local_experts": 128, "dtype": "bfloat16"}
    new["rope_parameters"] = {"rope_theta": 1000000.0, "rope_type": "default"}
    for key in ("num_experts", "rope_theta", "rope_scaling"):
        del new[key]
    old = HFConfig.from_dict({**QWEN3_MOE, "torch_dtype": "bfloat16"})
    assert vars(HFConfig.from_dict(new)) | {"raw": 0} == vars(old) | {"raw": 0}


MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        (MISTRAL, 4096),  # v0.1
        (MISTRAL | {"sliding_window": None}, 32768),  # v0.2, v0.3
        (MISTRAL | {"sliding_window": 65536}, 32768),
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, 4096),
        (QWEN2, 32768),
        (QWEN2 | {"sliding_window": 1024}, 32768),
        (QWEN2 | {"sliding_window": 1024, "use_sliding_window": True}, 1024),
        (QWEN2 | {"sliding_window": None, "use_sliding_window": True}, 32768),
        (LLAMA | {"sliding_window": 1024}, 131072),
    ],
)
def test_sequences_fit_the_sliding_window(raw: dict, want: int) -> None:
    hf = HFConfig.from_dict(raw)
    assert hf.max_positions == want and hf.to_dict().items() >= raw.items()
    if want == hf.sliding_window:
        with pytest.raises(ValueError, match=f"or the sliding window makes it {want}; use"):
            hf.with_(max_positions=want + 1)


def test_layers_keep_their_kinds() -> None:
    kinds = ["full_attention"] * 21 + ["sliding_attention"] * 3
    hf = HFConfig.from_dict(QWEN2 | {"use_sliding_window": True, "layer_types": kinds})
    assert hf.to_dict()["layer_types"] == kinds
    assert hf.with_(num_layers=22).to_dict()["layer_types"] == kinds[:22]


def test_llama_3_scaling_is_read() -> None:
    want = Rope(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=8192)
    assert HFConfig.from_dict(LLAMA).rope == want


@pytest.mark.parametrize(
    ("raw", "parameters"),
    [
        (QWEN2, 494_032_768),
        (LLAMA, 8_030_261_248),
        (MISTRAL, 7_241_732_096),
        (QWEN3_MOE, 30_532_122_624),
    ],
)
def test_the_expected_tensors_hold_the_published_number_of_parameters(
    raw: dict, parameters: int
) -> None:
    assert num_parameters(HFConfig.from_dict(raw)) == parameters


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; use a model"),
        ({"architectures": None, "model_type": "mamba"}, "'mamba' is not supported"),
        ({"hidden_act": "gelu"}, "`hidden_act` 'gelu' is not supported"),
        ({"layer_types": ["sliding_attention"]}, "`layer_types` .* is not supported"),
        ({"layer_types": ["linear_attention"]}, "`layer_types` .* is not supported"),
        ({"sliding_window": 0}, "`sliding_window` 0: must be a whole number from 1"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config`"),
        ({"mlp_only_layers": [0.5]}, "`mlp_only_layers` .0.5.: must be a list of numbers"),
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"num_key_value_heads": 4}, "num_attention_heads 14: must be a multiple of"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        HFConfig.from_dict(QWEN2 | change)


def test_layers_with_experts_are_those_of_transformers() -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    few = QWEN3_MOE | {"num_hidden_layers": 5, "num_experts": 8, "vocab_size": 8}
    for change in (
        {"mlp_only_layers": [0, 3]},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ):
        hf = HFConfig.from_dict(few | change)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**(few | change)))
        theirs = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
        assert [hf.has_experts(i) for i in range(5)] == theirs
        assert num_parameters(hf) == sum(p.numel() for p in model.parameters())
    dense = HFConfig.from_dict(few | {"decoder_sparse_step": 8})
    assert dense.num_experts == 0 and not dense.moe_layers


def test_a_model_with_latents_has_the_sizes_of_transformers() -> None:
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    for change in ({}, {"q_lora_rank": 1536}):
        hf = HFConfig.from_dict(MOONLIGHT | change)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(DeepseekV3Config(**(MOONLIGHT | change)))
        biases = 26 * 64  # no parameters in transformers
        assert num_parameters(hf) - biases == sum(p.numel() for p in model.parameters())
    assert (hf.head_dim, hf.rope_dim, hf.value_dim) == (192, 64, 128)
    assert hf.cache_shape == (1, 1, 576)
    assert hf.mla is not None and hf.mla.is_interleaved
    with pytest.raises(ValueError, match="cannot change head_dim"):
        hf.with_(head_dim=64)


def test_layers_that_predict_more_tokens_are_not_exported() -> None:
    hf = HFConfig.from_dict(MOONLIGHT | {"num_nextn_predict_layers": 1})
    assert hf.num_mtp_layers == 1 and hf.to_dict()["num_nextn_predict_layers"] == 0
    assert not any(name.startswith("model.layers.27") for name in expected(hf))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kv_lora_rank": None}, "`kv_lora_rank` is missing"),
        ({"q_lora_rank": 0}, "`q_lora_rank` 0: must be a whole number from 1"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8: must be 16 as num_attention_heads"),
        ({"v_head_dim": 256}, "v_head_dim 256: must be at most 192, the sum of"),
        ({"qk_rope_head_dim": 33}, "qk_rope_head_dim 33, of which 33 rotate"),
        ({"rope_interleave": 1}, "`rope_interleave` 1: must be true or false"),
        ({"attention_bias": True}, "`attention_bias` True is not supported"),
        ({"moe_layer_freq": 2}, "`moe_layer_freq` 2 is not supported"),
    ],
)
def test_latents_that_are_not_computed_are_refused(change: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        HFConfig.from_dict(MOONLIGHT | change)


@pytest.mark.parametrize(
    "change",
    [
        {"n_group": 3},
        {"n_group": 8, "topk_group": 4},
        {"topk_group": 5},
        {"topk_group": 1},
    ],
)
def test_groups_of_experts_that_cannot_be_are_refused(change: dict) -> None:
    """The model has 8 experts, of which a token uses 4."""
    with pytest.raises(
        ValueError, match="n_group . with topk_group .: n_group must divide the 8 e"
    ):
        HFConfig.from_dict(kit.tiny_config("glm4_moe") | change)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gone: no such folder"):
        HFConfig.from_folder(tmp_path / "gone")
    with pytest.raises(ValueError, match="has no config.json"):
        HFConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        HFConfig.from_folder(tmp_path)


def test_changed_sizes_are_written_back_and_the_rest_stays() -> None:
    layers = {"layer_types": ["full_attention"] * 24}
    hf = HFConfig.from_dict(QWEN2 | layers).with_(num_layers=2, dtype="float32")
    expect = QWEN2 | {"num_hidden_layers": 2, "torch_dtype": "float32"}
    assert hf.to_dict() == expect | {"layer_types": ["full_attention"] * 2}
    again = HFConfig.from_dict(json.loads(json.dumps(hf.to_dict())))
    assert vars(again) | {"raw": 0} == vars(hf) | {"raw": 0}
    assert list(expected(hf))[-1] == "model.norm.weight"


def test_what_transformers_finds_the_class_by_is_always_written() -> None:
    by_name = {key: value for key, value in QWEN2.items() if key != "model_type"}
    by_type = {key: value for key, value in QWEN2.items() if key != "architectures"}
    assert HFConfig.from_dict(by_name).to_dict() == HFConfig.from_dict(by_type).to_dict() == QWEN2


def test_a_change_that_config_json_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot change qkv_bias"):
        HFConfig.from_dict(QWEN2).with_(qkv_bias=False)
