"""What the ranks of test_bridge.py do: load and export tiny models under many layouts."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlcore.config.schema import ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.names import expected
from rlcore.hf.rope import inverse_frequencies
from rlcore.hf.weights import read_folder, save_folder

DENSE = {
    "dp4": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
}
UNEQUAL = {
    "tp4 of two key-value heads": {"tp": 4},
    "pp2 of 3 and 1 layers": {"pp": 2, "pp_layers": (3, 1)},
}
EXPERTS = {
    "dp4": {},
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "tp2 ep2": {"tp": 2, "ep": 2},
    "pp2 ep2": {"pp": 2, "ep": 2},
    "tp4 ep2": {"tp": 4, "ep": 2},
    "tp2 of whole experts": {"tp": 2},
    "etp2": {"etp": 2},
    "tp2 ep2 etp2": {"tp": 2, "ep": 2, "etp": 2},
    "pp2 tp2 etp2": {"pp": 2, "tp": 2, "etp": 2},
}
LAYOUTS = {
    "qwen2": DENSE | UNEQUAL,
    "qwen3": DENSE | UNEQUAL,
    "llama": DENSE,
    "mistral": {"dp4": {}},
    "qwen3_moe": EXPERTS,
    "glm4_moe": EXPERTS | {"tp2 ep2 pp2": {"tp": 2, "ep": 2, "pp": 2}},
    "qwen3_moe_mixed": EXPERTS | {"pp2 of 3 and 1 layers": {"pp": 2, "pp_layers": (3, 1)}},
}
LAYOUTS |= {
    "deepseek_v3": {"dp4": {}, "tp2 ep2 pp2": {"tp": 2, "ep": 2, "pp": 2}},
    "deepseek_v3_dense": {"dp4": {}, "tp4 without sequence parallel": {"tp": 4, "sp": False}},
}
CASES = tuple(LAYOUTS)
HEADS = ("dp4", "tp4 of two key-value heads")
"""Layouts whose queries, keys and values are returned."""


def digest(tensors: Iterator[tuple[str, torch.Tensor]], dtype: str = "") -> str:
    """Of names, shapes, dtypes and bytes, in order; `dtype` rounds to it first."""
    found = hashlib.blake2b()
    for name, tensor in tensors:
        tensor = (tensor.to(getattr(torch, dtype)) if dtype else tensor).contiguous()
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.view(torch.uint8).numpy())
    return found.hexdigest()


def bridge(rank: int, folder: str) -> dict[str, Any]:
    """All checks of one rank, one entry each."""
    from rlcore.mcore import shim

    shim.prepare()
    from rlcore.mcore import bridge, build, parallel

    root = Path(folder)
    found: dict[str, Any] = {}

    def built(hf: HFConfig, dtype: str = "float32", **layout: Any) -> tuple:
        parallel.destroy()
        train = TrainConfig(**layout, distributed_optimizer=False)
        made, _ = parallel.initialise(train)
        model = ModelConfig(path=str(hf.path), dtype=dtype)
        return build.build(hf, model, train, made, parallel.device()), hf, made

    for case, layouts in LAYOUTS.items():
        hf = HFConfig.from_folder(root / case)
        found[case] = digest(read_folder(root / case, hf))
        for name, layout in layouts.items():
            models = built(hf, **layout)
            bridge.load_hf(models[0], hf, root / case, models[2])
            names = [n for n, _ in bridge.export_hf(*models)]
            found[f"{case} {name} in order"] = names == list(expected(hf))
            found[f"{case} {name}"] = digest(bridge.export_hf(*models))
            if name == "dp4":
                found[f"{case} logits"] = forward(models[0][0], hf, root / "tokens.json")
            if name in HEADS and layouts.keys() >= set(HEADS):
                found[f"{case} {name} heads"] = heads(models[0][0], rank)
            bridge.init_random(*models, seed=7)
            found[f"{case} {name} random"] = digest(bridge.export_hf(*models))

    hf = HFConfig.from_folder(root / "qwen3")
    for dtype in ("bfloat16", "float64"):
        models = built(hf, dtype, tp=2, pp=2)
        bridge.load_hf(models[0], hf, root / "qwen3", models[2])
        found[f"file in {dtype}"] = digest(read_folder(root / "qwen3", hf), dtype)
        found[f"exported {dtype}"] = digest(bridge.export_hf(*models))
    bridge.BUNDLE_BYTES = 1
    found["one by one"] = digest(bridge.export_hf(*models))
    saved = root / "saved"
    save_folder(bridge.export_hf(*models), hf, None, None if rank else saved)
    dist.barrier()
    found["saved"] = digest(read_folder(saved, HFConfig.from_folder(saved)))
    parallel.destroy()
    return found


def heads(model: torch.nn.Module, rank: int) -> list[torch.Tensor]:
    """Queries, key and value of the last layer for the same 8 rows, and their whole storages."""
    attention = model.decoder.layers[-1].self_attention
    rows = torch.randn(8, 1, 32, generator=torch.Generator().manual_seed(5))
    if attention.config.sequence_parallel:
        rows = rows.chunk(4)[rank]
    with torch.no_grad():
        found = attention.get_query_key_value_tensors(rows)
    return [tensor.new_empty(0).set_(tensor.untyped_storage()) for tensor in found] + [*found]


def forward(model: torch.nn.Module, hf: HFConfig, file: Path) -> torch.Tensor:
    """Logits [T, vocab] of the rows of tokens in `file`, one packed sequence after the other."""
    from rlcore.mcore import attention, rope

    rows = json.loads(file.read_text())
    lengths = [len(row) for row in rows]
    plan = attention.plan(lengths)
    _, positions = attention.local_positions(lengths, 1, 0)
    inverse = inverse_frequencies(hf.rope_dim, hf.rope)
    cos, sin = rope.tables(inverse, positions, torch.float32, hf.rope.attention_factor)
    packed = attention.Packed(qkv_format="thd", plan=plan, cos=cos, sin=sin)
    tokens = torch.tensor([sum(rows, [])])
    with torch.no_grad():
        out = model(tokens, positions[None], None, packed_seq_params=packed)
    return out.view(-1, out.shape[-1])[:, : hf.vocab_size].clone()
