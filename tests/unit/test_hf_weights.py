"""Safetensors folders: sharded and stacked files, saving, and how each of them can be broken."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlcore.hf.config import HFConfig
from rlcore.hf.names import expected
from rlcore.hf.tokenizer import make_char_tokenizer
from rlcore.hf.weights import WeightReader, read_folder, save_folder
from rlcore.utils.errors import ConfigError

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "tie_word_embeddings": False,
}


def tensors(hf: HFConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator) for n, s in expected(hf).items()}


def save(hf: HFConfig, folder: Path, **kw: int) -> dict[str, torch.Tensor]:
    made = tensors(hf)
    save_folder(made.items(), hf, None, folder, **kw)
    return made


def assert_same(found: Iterator[tuple[str, torch.Tensor]], made: dict[str, torch.Tensor]) -> None:
    found = dict(found)
    assert list(found) == list(made)
    for name in made:
        assert torch.equal(found[name], made[name]), name


@pytest.mark.parametrize("raw", [QWEN3, MOE])
def test_shards_read_back_bitwise_and_load_with_transformers(tmp_path: Path, raw: dict) -> None:
    import transformers

    hf = HFConfig.from_dict(raw)
    tokenizer = make_char_tokenizer(tmp_path / "tokenizer", "0123456789+=;>")
    made = tensors(hf)
    save_folder(made.items(), hf, tmp_path / "tokenizer", tmp_path / "m", max_shard_bytes=4000)
    files = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    again = HFConfig.from_folder(tmp_path / "m")
    assert again.dtype == "float32"
    assert_same(read_folder(tmp_path / "m", again), made)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    ids = tokenizer.encode("1+2=3")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "m")("1+2=3").input_ids == ids
    # transformers writes the same tensors again, so it took every one of ours to the right place.
    model.save_pretrained(tmp_path / "theirs")
    assert_same(read_folder(tmp_path / "theirs", again), made)
    assert model(torch.tensor([ids])).logits.isfinite().all()


def test_a_slice_is_the_slice_of_the_whole(tmp_path: Path) -> None:
    made = save(HFConfig.from_dict(QWEN3), tmp_path / "m")
    reader, name = WeightReader(tmp_path / "m"), "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(reader.get(name, (slice(3, 9),)), made[name][3:9])
    assert torch.equal(reader.get(name, (slice(None), slice(4, 8))), made[name][:, 4:8])
    assert reader.names() == sorted(made)
    assert name in reader and "lm_head.weight" not in reader


def test_stacked_experts_are_read_as_single_ones(tmp_path: Path) -> None:
    hf = HFConfig.from_dict(MOE)
    made = save(hf, tmp_path / "m")
    stacked = {n: t for n, t in made.items() if ".experts." not in n}
    for layer in range(hf.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."

        def stack(kind: str, prefix: str = prefix) -> torch.Tensor:
            return torch.stack([made[f"{prefix}{e}.{kind}_proj.weight"] for e in range(4)])

        stacked[prefix + "gate_up_proj"] = torch.cat([stack("gate"), stack("up")], 1)
        stacked[prefix + "down_proj"] = stack("down")
    save_file(stacked, tmp_path / "m" / "model.safetensors")
    assert_same(read_folder(tmp_path / "m", hf), made)
    reader = WeightReader(tmp_path / "m")
    assert reader.names() == sorted(made)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    assert torch.equal(reader.get(name, (slice(1, 4), slice(2, 5))), made[name][1:4, 2:5])


def test_a_missing_or_broken_shard_is_named(tmp_path: Path) -> None:
    hf = HFConfig.from_dict(QWEN3)
    save(hf, tmp_path, max_shard_bytes=4000)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=f"{shard.name}: not a whole safetensors file"):
        list(read_folder(tmp_path, hf))
    shard.unlink()
    with pytest.raises(ValueError, match=f"shard {shard.name} of .* is missing"):
        WeightReader(tmp_path)


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    hf = HFConfig.from_dict(QWEN3)
    save(hf, tmp_path)
    with pytest.raises(ValueError, match=r"tensor model\.layers\.2\.input_layernorm\.weight is"):
        list(read_folder(tmp_path, hf.with_(num_layers=3)))
    with pytest.raises(ValueError, match=r"has shape \[20, 16\], config.json needs \[21, 16"):
        list(read_folder(tmp_path, hf.with_(vocab_size=21)))


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither model.safetensors nor .*--model.random_init"):
        WeightReader(tmp_path)


def test_an_incomplete_or_wrong_save_leaves_the_old_folder(tmp_path: Path) -> None:
    hf = HFConfig.from_dict(QWEN3)
    made = save(hf, tmp_path / "m")
    broken = dict(list(made.items())[:-1])
    with pytest.raises(ValueError, match=r"tensor model\.norm\.weight is missing; give all"):
        save_folder(broken.items(), hf, None, tmp_path / "m")
    with pytest.raises(ValueError, match=r"needs \[16\]"):
        wrong = broken | {"model.norm.weight": torch.ones(3)}
        save_folder(wrong.items(), hf, None, tmp_path / "m")
    assert_same(read_folder(tmp_path / "m", hf), made)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_only_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    hf = HFConfig.from_dict(QWEN3)
    save(hf, tmp_path / "m", max_shard_bytes=4000)
    (tmp_path / "m.old").mkdir()
    (tmp_path / "m.old/backup").touch()
    save(hf, tmp_path / "m")
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    (tmp_path / "m/vocab.json").mkdir()
    for folder, name in ((tmp_path / "m", "vocab.json"), (tmp_path, "m")):
        with pytest.raises(ConfigError, match=f"{folder}: has {name}, which is not of an earlier"):
            save(hf, folder)
    with pytest.raises(ConfigError, match="is a file and would be deleted"):
        save(hf, tmp_path / "m.old/backup")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        *("backup", "config.json", "m", "m.old", "model.safetensors", "vocab.json")
    ]


def test_the_exported_config_names_no_python_files(tmp_path: Path) -> None:
    from transformers import AutoConfig

    hf = HFConfig.from_dict(QWEN3 | {"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}})
    save(hf, tmp_path / "m")
    found = AutoConfig.from_pretrained(tmp_path / "m", trust_remote_code=True)
    assert (type(found).__name__, found.hidden_size) == ("Qwen3Config", 16)


def test_a_full_disk_is_one_sentence_and_the_old_folder_stays(tmp_path: Path) -> None:
    hf = HFConfig.from_dict(QWEN3)
    made = save(hf, tmp_path / "m")
    rest = iter(made.items())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=r"m: could not be written \(.*; free some space"):
            save_folder(rest, hf, None, tmp_path / "m", max_shard_bytes=8000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert next(rest, None) is None, "a collective export must be exhausted"
    assert_same(read_folder(tmp_path / "m", hf), made)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_views_of_one_storage_are_saved_apart(tmp_path: Path) -> None:
    hf = HFConfig.from_dict(QWEN3)
    made = tensors(hf)
    fused = torch.cat([made["model.layers.0.mlp.gate_proj.weight"]] * 2)
    made["model.layers.0.mlp.gate_proj.weight"], made["model.layers.0.mlp.up_proj.weight"] = (
        fused.chunk(2)
    )
    made["model.layers.0.self_attn.o_proj.weight"] = torch.randn(16, 16).T
    save_folder(made.items(), hf, None, tmp_path / "m")
    assert_same(read_folder(tmp_path / "m", hf), made)


def test_ranks_without_a_path_only_exhaust_the_tensors(tmp_path: Path) -> None:
    hf = HFConfig.from_dict(QWEN3)
    rest = iter(tensors(hf).items())
    save_folder(rest, hf, None, None)
    assert next(rest, None) is None and list(tmp_path.iterdir()) == []


def test_the_index_counts_the_bytes(tmp_path: Path) -> None:
    made = save(HFConfig.from_dict(QWEN3), tmp_path / "m", max_shard_bytes=4000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in made.values())
    assert set(index["weight_map"]) == set(made)
