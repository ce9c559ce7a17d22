"""The bridge between Megatron and Hugging Face, in one gang of four ranks for every layout."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.hf.config import HFConfig

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
CASES = ("qwen2", "qwen3", "llama", "qwen3_moe")
DENSE = ("dp4", "tp2", "pp2", "tp2 pp2", "pp2 vpp2")
EXPERTS = ("dp4", "ep2", "ep4", "tp2 ep2", "pp2 ep2")
LAYOUTS = [(c, x) for c in CASES for x in (EXPERTS if c == "qwen3_moe" else DENSE)]
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8, 9, 7], [9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8]]


def transformers_model(case: str) -> torch.nn.Module:
    """A tiny model with every weight random: zero biases and unit norms would hide a swap."""
    import transformers as t

    sizes = dict(
        vocab_size=53,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    scaled = dict(
        rope_theta=500.0,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    )
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    config = {
        "qwen2": lambda: t.Qwen2Config(**sizes),
        "qwen3": lambda: t.Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True),
        "llama": lambda: t.LlamaConfig(**sizes, rope_parameters=scaled),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(**sizes, head_dim=16, **experts, norm_topk_prob=True),
    }[case]()
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape) * 0.2 + (param.dim() == 1))
    return model.eval()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the gang has run: models, transformers' logits, what each rank found."""
    folder = tmp_path_factory.mktemp("bridge")
    (folder / "tokens.json").write_text(json.dumps(TOKENS))
    for case in CASES:
        model = transformers_model(case)
        model.save_pretrained(folder / case)
        with torch.no_grad():
            logits = [model(torch.tensor([row])).logits[0] for row in TOKENS]
        np.save(folder / f"{case}.npy", torch.cat(logits).numpy())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    script = str(Path(__file__).with_name("bridge_ranks.py"))
    gang = [
        subprocess.Popen([sys.executable, script, str(folder)], env=env | {"RANK": str(rank)})
        for rank in range(4)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in gang] == [0] * 4
    finally:
        for rank in gang:
            rank.kill()
    return folder


def found(ran: Path, key: str) -> list:
    """What every rank found for one check."""
    return [json.loads((ran / f"rank{rank}.json").read_text())[key] for rank in range(4)]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(ran: Path, case: str) -> None:
    ours, theirs = np.load(ran / f"{case}_rank0.npy"), np.load(ran / f"{case}.npy")
    assert ours.shape == theirs.shape == (sum(map(len, TOKENS)), 53)
    assert np.abs(theirs).max() > 1
    assert np.abs(ours - theirs).max() <= 1e-5


@pytest.mark.parametrize(("case", "layout"), LAYOUTS)
def test_export_equals_the_loaded_file_bitwise_on_every_rank(
    ran: Path, case: str, layout: str
) -> None:
    assert found(ran, f"{case} {layout} order") == [True] * 4
    assert found(ran, f"{case} {layout}") == [True] * 4


@pytest.mark.parametrize("case", CASES)
def test_random_weights_are_the_same_under_every_layout(ran: Path, case: str) -> None:
    digests = {d for c, x in LAYOUTS if c == case for d in found(ran, f"{case} {x} random")}
    assert len(digests) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_weights_are_rounded_to_the_models_dtype_once(ran: Path, dtype: str) -> None:
    assert found(ran, f"qwen3 {dtype}") == [True] * 4


def test_bundles_of_one_tensor_export_the_same(ran: Path) -> None:
    assert found(ran, "qwen3 one by one") == [True] * 4


def test_a_folder_saved_from_four_ranks_is_complete(ran: Path) -> None:
    assert found(ran, "qwen3 saved") == [True] * 4
    assert HFConfig.from_folder(ran / "out").dtype == "float64"
    assert not (ran / "out.part").exists()
