"""RoPE's frequencies beside those of transformers, and which settings are refused."""

from typing import Any

import pytest
import torch

from rlcore.hf.config import HFConfig
from rlcore.hf.rope import inverse_frequencies
from rlcore.hf.rope_settings import Rope, read_rope
from tests import kit

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with other limits": YARN | {"beta_fast": 16, "beta_slow": 2.5},
    "yarn between dimensions": YARN | {"truncate": False},
    "yarn of one limit": YARN | {"beta_fast": 1, "truncate": False},
    "yarn of few positions": YARN | {"original_max_position_embeddings": 5},
    "yarn without slow dimensions": YARN | {"beta_slow": 1e-6},
    "yarn of no positions": YARN | {"original_max_position_embeddings": 1},
    "yarn with mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn with half of mscale": YARN | {"mscale": 0.7},
    "yarn with its own factor": YARN | {"attention_factor": 1.3, "mscale": 2.0},
    "yarn that scales nothing": YARN | {"factor": 1.0},
}


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("case", SETTINGS)
def test_frequencies_and_attention_factor_are_those_of_transformers(
    case: str, partial: float
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = SETTINGS[case] | {"rope_theta": 5000.0, "partial_rotary_factor": partial}
    config = LlamaConfig(head_dim=32, max_position_embeddings=64, rope_parameters=dict(settings))
    kind = settings["rope_type"]
    # Dynamic scaling: transformers uses our fixed frequencies only for sequences of full length.
    want, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=256 if kind == "dynamic" else None)
    rope = read_rope({"rope_parameters": settings}, "here", partial=0.25)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    found = inverse_frequencies(32, rope)
    assert found.dtype == torch.float32 and found.shape == want.shape == (16 * partial,)
    assert torch.allclose(found, want, rtol=1e-6, atol=0)
    plain = inverse_frequencies(32, Rope(theta=5000.0, partial=partial))
    changes = not torch.allclose(found, plain, rtol=1e-6, atol=0)
    assert changes == (case not in ("yarn of no positions", "yarn that scales nothing"))


def test_sglangs_factor_multiplies_the_default() -> None:
    # DeepSeek-R1-0528-Qwen3-8B: cos and sin are not scaled.
    settings = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "attn_factor": 0.8782488562869419,
    }
    hf = HFConfig.from_dict(
        kit.tiny_config(max_position_embeddings=131072, rope_scaling=settings, rope_theta=1e6)
    )
    assert hf.rope.attention_factor == pytest.approx(1.0, abs=1e-12)
    assert (hf.rope.theta, hf.max_positions) == (1e6, 131072)


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"type": "linear", "factor": 2.5}, 320),
        ({"type": "dynamic", "factor": 2.5}, 320),
        ({"type": "default"}, 128),
        (LLAMA3, 128),
        (YARN, 1024),
    ],
)
def test_the_longest_sequence_follows_the_scaling(settings: dict[str, Any], want: int) -> None:
    old = HFConfig.from_dict(kit.tiny_config(rope_scaling=settings, rope_theta=500.0))
    new = {"rope_type": settings.get("type"), "rope_theta": 500.0} | settings
    found = HFConfig.from_dict(kit.tiny_config(rope_parameters=new))
    assert old.max_positions == found.max_positions == want
    assert old.rope == found.rope and old.rope.theta == 500.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "RoPE scaling 'longrope' is not supported, only default, linear, dynamic, llama3, yarn;"
            " use another model, or set `rope_type` in `rope_scaling` to default for",
        ),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"RoPE scaling \['yarn'\] is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "scaling linear needs `factor`; add it"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "scaling yarn needs `original_max_position_embeddings`",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}},
            "`alpha` of RoPE is not supported; use another model",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "`full_attention` of RoPE is not supported",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": YARN},
            "has `rope_parameters` and `rope_scaling`; keep only one",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 128},
            "is 128 and, in `rope_scaling`, 256; keep only one",
        ),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "`low_freq_factor` 4: must be below"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "`factor` 0.5: must be from 1 to"),
        ({"rope_scaling": YARN | {"beta_fast": 0}}, "`beta_fast` 0: must be above 0"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "`truncate` 'no': must be true or false"),
        ({"rope_theta": 1.0}, "`rope_theta` 1.0: must be above 1"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` 0.5: is not supported for"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "`partial_rotary_factor` 0.5: is not supported for",
        ),
        (
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "head_dim 2, of which 2 rotate: the latter must be even, at least 4 and divide",
        ),
    ],
)
def test_settings_that_are_not_computed_are_refused(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        HFConfig.from_dict(kit.tiny_config(**changes))


def test_a_scaling_sets_the_longest_sequence() -> None:
    hf = HFConfig.from_dict(kit.tiny_config(rope_scaling=YARN))
    with pytest.raises(
        ValueError, match="to 100: RoPE scaling or the sliding window makes it 1024"
    ):
        hf.with_(max_positions=100)
    assert hf.with_(num_layers=1).rope == hf.rope
