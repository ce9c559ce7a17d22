"""The bridge on stand-ins that have Megatron's parameter names and shapes but compute nothing.

Here: both sets of names, and what one rank reads. tests/ranks/test_bridge.py has the real models.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from rlcore.config.schema import TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.names import expected
from rlcore.hf.weights import save_folder
from rlcore.mcore import bridge
from rlcore.mcore.layout import layout_of

SIZES = {
    "vocab_size": 21,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
DENSE = HFConfig.from_dict(SIZES | {"architectures": ["Qwen2ForCausalLM"]})
MOE = HFConfig.from_dict(
    SIZES
    | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 6}
)


def stand_in(params: dict[str, tuple[int, ...]], numbers: tuple[int, ...] = (0, 1)) -> nn.Module:
    """A model whose only content is its parameters, wrapped as DDP wraps it."""
    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList(nn.Module() for _ in numbers)
    for layer, number in zip(model.decoder.layers, numbers, strict=True):
        layer.layer_number = number + 1
    for name, shape in params.items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(torch.full(shape, torch.nan)))
    wrapper = nn.Module()
    wrapper.module = model
    return wrapper


def te_names(hf: HFConfig, layer: int, experts: int) -> dict[str, tuple[int, ...]]:
    """A layer as Transformer Engine has it: norms inside projections, grouped experts."""
    prefix, hidden = f"decoder.layers.{layer}.", hf.hidden_size
    rows = (hf.num_heads + 2 * hf.num_kv_heads) * hf.head_dim
    shapes = {
        "self_attention.linear_qkv.layer_norm_weight": (hidden,),
        "self_attention.linear_qkv.weight": (rows, hidden),
        "self_attention.linear_proj.weight": (hidden, hf.num_heads * hf.head_dim),
    }
    if hf.qkv_bias:
        shapes["self_attention.linear_qkv.bias"] = (rows,)
    if hf.qk_norm:
        shapes["self_attention.q_layernorm.weight"] = (hf.head_dim,)
        shapes["self_attention.k_layernorm.weight"] = (hf.head_dim,)
    if not hf.num_experts:
        shapes["mlp.linear_fc1.layer_norm_weight"] = (hidden,)
        shapes["mlp.linear_fc1.weight"] = (2 * hf.intermediate_size, hidden)
        shapes["mlp.linear_fc2.weight"] = (hidden, hf.intermediate_size)
    else:
        inner = hf.moe_intermediate_size
        shapes["pre_mlp_layernorm.weight"] = (hidden,)
        shapes["mlp.router.weight"] = (hf.num_experts, hidden)
        for e in range(experts):
            shapes[f"mlp.experts.linear_fc1.weight{e}"] = (2 * inner, hidden)
            shapes[f"mlp.experts.linear_fc2.weight{e}"] = (hidden, inner)
    return {prefix + name: shape for name, shape in shapes.items()}


def whole_model(hf: HFConfig) -> nn.Module:
    ends = {
        "embedding.word_embeddings.weight": (hf.vocab_size, hf.hidden_size),
        "decoder.final_layernorm.weight": (hf.hidden_size,),
        "output_layer.weight": (hf.vocab_size, hf.hidden_size),
    }
    return stand_in(ends | te_names(hf, 0, hf.num_experts) | te_names(hf, 1, hf.num_experts))


def saved(hf: HFConfig, folder: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {n: torch.randn(s, generator=generator) for n, s in expected(hf).items()}
    save_folder(made.items(), hf, None, folder)
    return made


@pytest.mark.parametrize("hf", [DENSE, MOE], ids=["dense", "experts"])
def test_transformer_engines_names_load_and_export(tmp_path: Path, hf: HFConfig) -> None:
    made, model, layout = saved(hf, tmp_path), whole_model(hf), layout_of(TrainConfig(), 1, 0)
    bridge.load_hf([model], hf, tmp_path, layout)
    found = dict(bridge.export_hf([model], hf, layout))
    assert list(found) == list(made) == list(expected(hf))
    assert all(torch.equal(found[name], made[name]) for name in made)


def test_queries_lie_before_the_key_and_value_of_their_group(tmp_path: Path) -> None:
    made, model = saved(DENSE, tmp_path), whole_model(DENSE)
    bridge.load_hf([model], DENSE, tmp_path, layout_of(TrainConfig(), 1, 0))
    fused = model.module.decoder.layers[1].self_attention.linear_qkv.bias
    q, k, v = (made[f"model.layers.1.self_attn.{x}_proj.bias"] for x in "qkv")
    assert torch.equal(fused, torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]]))


def test_a_rank_takes_its_stage_its_experts_and_its_rows(tmp_path: Path) -> None:
    made = saved(MOE, tmp_path)
    # Rank 3 of 4: last stage, so layer 1, the second half of the experts and of the vocabulary.
    layout = layout_of(TrainConfig(tp=2, pp=2, ep=2), 4, 3)
    params = te_names(MOE, 0, 2) | {
        "decoder.layers.0.self_attention.linear_qkv.weight": (16, 8),
        "decoder.layers.0.self_attention.linear_proj.weight": (8, 8),
        "decoder.final_layernorm.weight": (8,),
        "output_layer.weight": (11, 8),
    }
    model = stand_in(params, numbers=(1,))
    bridge.load_hf([model], MOE, tmp_path, layout)
    layer = model.module.decoder.layers[0]
    down = made["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert torch.equal(layer.mlp.experts.linear_fc2.weight1, down)
    proj = made["model.layers.1.self_attn.o_proj.weight"]
    assert torch.equal(layer.self_attention.linear_proj.weight, proj[:, 8:])
    head = model.module.output_layer.weight
    assert torch.equal(head[:10], made["lm_head.weight"][11:])
    assert torch.equal(head[10:], torch.zeros(1, 8)), "padding of the vocabulary"


def test_a_tied_copy_of_the_head_is_filled_with_the_embedding(tmp_path: Path) -> None:
    hf = DENSE.with_(tie_word_embeddings=True)
    made, model = saved(hf, tmp_path), whole_model(hf)
    layout = layout_of(TrainConfig(), 1, 0)
    bridge.load_hf([model], hf, tmp_path, layout)
    assert torch.equal(model.module.output_layer.weight, made["model.embed_tokens.weight"])
    assert "lm_head.weight" not in dict(bridge.export_hf([model], hf, layout))


def test_a_parameter_that_the_bridge_does_not_know_is_not_passed_over(tmp_path: Path) -> None:
    saved(DENSE, tmp_path)
    model = whole_model(DENSE)
    model.module.register_parameter("adapter", nn.Parameter(torch.zeros(1)))
    with pytest.raises(AssertionError, match="does not map the parameters .'adapter'"):
        bridge.load_hf([model], DENSE, tmp_path, layout_of(TrainConfig(), 1, 0))


def test_random_weights_depend_on_seed_and_name_and_have_the_configs_spread() -> None:
    layout = layout_of(TrainConfig(), 1, 0)

    def random(seed: int) -> dict[str, torch.Tensor]:
        model = whole_model(DENSE)
        bridge.init_random([model], DENSE, layout, seed)
        return {n: t.clone() for n, t in bridge.export_hf([model], DENSE, layout)}

    one, again, other = random(1), random(1), random(2)
    matrices = [name for name in one if one[name].dim() == 2]
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in matrices)
    up, gate = (one[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("up", "gate"))
    assert not torch.equal(up, gate)
    spread = torch.cat([one[name].flatten() for name in matrices]).std()
    assert spread == pytest.approx(DENSE.initializer_range, rel=0.1)
    assert torch.equal(one["model.norm.weight"], torch.ones(8))
    assert torch.equal(one["model.layers.0.self_attn.k_proj.bias"], torch.zeros(8))
