"""Rank script of test_bridge.py: loads and exports tiny models under many layouts of four ranks.

argv: the folder that holds one Hugging Face folder per case. Rank r writes `rank<r>.json`, what it
found by check; rank 0 also the logits.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from rlcore.config.schema import ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.names import expected
from rlcore.hf.weights import read_folder, save_folder
from rlcore.mcore import shim

DENSE = {
    "dp4": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
}
EXPERTS = {
    "dp4": {},
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "tp2 ep2": {"tp": 2, "ep": 2},
    "pp2 ep2": {"pp": 2, "ep": 2},
}


def digest(tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> str:
    """Of names, shapes, dtypes and bytes, in order."""
    found = hashlib.blake2b()
    for name, tensor in tensors:
        tensor = tensor.to(dtype or tensor.dtype).contiguous()
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.view(torch.uint8).numpy())
    return found.hexdigest()


def main() -> None:
    shim.prepare()
    from rlcore.mcore import bridge, build, parallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    found: dict[str, object] = {}

    def built(hf: HFConfig, dtype: str = "float32", **layout: int) -> tuple:
        parallel.destroy()
        train = TrainConfig(**layout, distributed_optimizer=False)
        made, _ = parallel.initialise(train)
        model = ModelConfig(path=str(hf.path), dtype=dtype)
        return build.build(hf, model, train, made, parallel.device()), made

    for case in ("qwen2", "qwen3", "llama", "qwen3_moe"):
        hf = HFConfig.from_folder(folder / case)
        kept = digest(read_folder(folder / case, hf))
        for name, layout in (EXPERTS if hf.num_experts else DENSE).items():
            models, made = built(hf, **layout)
            bridge.load_hf(models, hf, folder / case, made)
            names = [n for n, _ in bridge.export_hf(models, hf, made)]
            found[f"{case} {name} order"] = names == list(expected(hf))
            found[f"{case} {name}"] = digest(bridge.export_hf(models, hf, made)) == kept
            if name == "dp4":
                logits = forward(models[0], hf, folder)
                np.save(folder / f"{case}_rank{made.rank}.npy", logits.numpy())
            bridge.init_random(models, hf, made, seed=7)
            found[f"{case} {name} random"] = digest(bridge.export_hf(models, hf, made))

    hf = HFConfig.from_folder(folder / "qwen3")
    for dtype in ("bfloat16", "float64"):
        models, made = built(hf, dtype, tp=2, pp=2)
        bridge.load_hf(models, hf, folder / "qwen3", made)
        kept = digest(read_folder(folder / "qwen3", hf), getattr(torch, dtype))
        found[f"qwen3 {dtype}"] = digest(bridge.export_hf(models, hf, made)) == kept
    bridge.BUNDLE_BYTES = 1
    found["qwen3 one by one"] = digest(bridge.export_hf(models, hf, made)) == kept
    out = folder / "out"
    save_folder(bridge.export_hf(models, hf, made), hf, None, out if made.rank == 0 else None)
    dist.barrier()
    found["qwen3 saved"] = digest(read_folder(out, HFConfig.from_folder(out))) == kept

    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def forward(model: torch.nn.Module, hf: HFConfig, folder: Path) -> torch.Tensor:
    """Logits [T, vocab] of the tokens in `tokens.json`, one packed sequence after the other."""
    from rlcore.mcore import attention, rope

    rows = json.loads((folder / "tokens.json").read_text())
    lengths = [len(row) for row in rows]
    plan = attention.plan(lengths)
    _, positions = attention.local_positions(lengths, 1, 0)
    inverse = rope.inverse_frequencies(hf.head_dim, hf.rope_theta, hf.rope_scaling)
    cos, sin = rope.tables(inverse, positions, torch.float32)
    packed = attention.Packed(qkv_format="thd", plan=plan, cos=cos, sin=sin)
    tokens = torch.tensor([sum(rows, [])])
    with torch.no_grad():
        out = model(tokens, positions[None], None, packed_seq_params=packed)
    return out.view(-1, out.shape[-1])[:, : hf.vocab_size]


if __name__ == "__main__":
    main()
