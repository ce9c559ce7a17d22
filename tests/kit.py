"""What the tests share: gangs of ranks, comparisons, tiny model folders."""

import importlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from torch import Tensor

from tests.forks import Fork

ROOT = Path(__file__).resolve().parents[1]

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
ARCHS: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "head_dim": 8},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": {
            "rope_theta": 500.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}
ARCHS["qwen3_moe_mixed"] = ARCHS["qwen3_moe"] | {"mlp_only_layers": [1], "num_experts_per_tok": 3}
"""One layer with a dense MLP."""
ARCHS["glm4_moe"] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.5},
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}

ARCHS["deepseek_v3"] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "head_dim": 4,  # as transformers writes: the part that RoPE rotates
    "rms_norm_eps": 1e-5,  # not that of the latents' norms
    "rope_parameters": {
        "rope_theta": 500.0,
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
ARCHS["deepseek_v3_dense"] = ARCHS["deepseek_v3"] | {
    "first_k_dense_replace": 4,
    "q_lora_rank": None,
    "rope_interleave": False,
    "v_head_dim": 10,
}


def tiny_config(arch: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """A config.json of a model that computes in milliseconds."""
    return SIZES | ARCHS[arch] | changes


def tiny_hf_folder(folder: Path, arch: str = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """Write config.json and random safetensors in float32. Every weight is random: zero biases and
    unit norms would hide a swap."""
    from rlcore.hf.config import HFConfig
    from rlcore.hf.names import expected
    from rlcore.hf.weights import save_folder

    hf = HFConfig.from_dict(tiny_config(arch, **changes))
    save_folder(_weights(expected(hf), seed), hf, None, folder)
    return folder


def random_weights(folder: Path, seed: int = 0) -> None:
    """Write random safetensors in float32 into a folder with a config.json."""
    from safetensors.torch import save_file

    from rlcore.hf.config import HFConfig
    from rlcore.hf.names import expected

    shapes = expected(HFConfig.from_folder(folder))
    save_file(dict(_weights(shapes, seed)), folder / "model.safetensors")


def _weights(shapes: Mapping[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator) * 0.2
        yield name, value + 1 if name.endswith("norm.weight") else value


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients of transformers by the names on disk; in memory, experts are stacked."""
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        prefix, stacked, kind = name.partition(".experts.")
        if not stacked:
            found[name] = param.grad
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for e, grad in enumerate(param.grad):
            for part, half in zip(parts, grad.chunk(len(parts)), strict=True):
                found[f"{prefix}.experts.{e}.{part}.weight"] = half
    return found


# ---- comparisons


def assert_close_named(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], *, rtol: float = 1e-5, atol: float = 1e-5
) -> None:
    """Same names, and every value close; the message names the worst."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    worst = []
    for name, a in ours.items():
        a, b = torch.as_tensor(a).double(), torch.as_tensor(theirs[name]).double()
        assert a.shape == b.shape, (name, a.shape, b.shape)
        over = (a - b).abs() - atol - rtol * b.abs()
        if a.numel() and not over.max() <= 0:
            worst.append(f"{name}: {float((a - b).abs().max()):.3g} apart")
    assert not worst, "; ".join(worst[:8])


def assert_bitwise(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Same names, dtypes and bits."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    wrong = []
    for name, a in ours.items():
        a, b = torch.as_tensor(a), torch.as_tensor(theirs[name])
        if a.dtype != b.dtype or not torch.equal(a, b):
            wrong.append(name)
    assert not wrong, f"not bitwise equal: {', '.join(wrong[:8])}"


# ---- gangs of ranks


def python_path() -> str:
    """PYTHONPATH of a child: this checkout, then what is there already."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def cases(named: dict[str, Any], *long: str) -> dict[str, Any]:
    """Cases of a gang of ranks: those of the names `long` in the long tier alone."""
    unknown = set(long) - named.keys()
    assert not unknown, unknown
    every = "RLCORE_LONG" in os.environ
    return {name: case for name, case in named.items() if every or name not in long}


def run_ranks(
    n: int, target: str, args: Mapping[str, Any] | None = None, *, timeout_s: float = 120.0
) -> list[Any]:
    """Run `module:function(rank, **args)` on n processes that share a gloo world, on the CPU.

    Args:
        target: such as `tests.ranks.learner_ranks:parity`; the module must import without a world.
        args: JSON.

    Returns:
        What the function returned on each rank: tensors, numbers, strings, lists, dicts.
    """
    with TemporaryDirectory(prefix="ranks") as name:
        folder = Path(name)
        (folder / "args.json").write_text(json.dumps(dict(args or {})))
        env = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
        env |= {"WORLD_SIZE": str(n), "CUDA_VISIBLE_DEVICES": ""}  # one GPU makes no NCCL world
        env["RANKS_FOLDER"] = name
        gang = []
        for rank in range(n):
            of_rank = env | {"RANK": str(rank)}
            gang.append(Fork(_rank, (target, name), of_rank, folder / f"log{rank}"))
        try:
            failed = _wait(gang, timeout_s)
        finally:
            for process in gang:
                process.kill()
                process.wait()
        if failed:
            rank, why = failed
            log = (folder / f"log{rank}").read_text(errors="replace")[-6000:]
            raise AssertionError(f"rank {rank} of {target} {why}:\n{log}")
        return [torch.load(folder / f"result{r}", weights_only=True) for r in range(n)]


def _wait(gang: Sequence[Fork], timeout_s: float) -> tuple[int, str] | None:
    """The first rank that failed, and how; None when all went well."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        codes = [process.poll() for process in gang]
        for rank, code in enumerate(codes):
            if code:
                return rank, f"ended with code {code}"
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.05)
    silent = next(r for r, process in enumerate(gang) if process.poll() is None)
    return silent, f"was not done after {timeout_s:.0f} s"


def _rank(target: str, name: str) -> None:
    import torch.distributed as dist

    from rlcore.utils import collective

    folder, rank, world = Path(name), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    collective.share_gloo_device()
    store = dist.FileStore(str(folder / "store"), world)
    has_cuda = torch.cuda.is_available()  # never with `run_ranks`; with tests/pretend
    if has_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank) if has_cuda else None,
    )
    module, _, function = target.partition(":")
    args = json.loads((folder / "args.json").read_text())
    result = getattr(importlib.import_module(module), function)(rank, **args)
    torch.save(result, folder / f"result{rank}")
    dist.barrier()
    dist.destroy_process_group()


def listening(pid: int) -> set[str]:
    """Addresses that a process and its children listen on."""
    return {address for address, _, _ in listeners(pid)}


def ports(pid: int) -> dict[int, bool]:
    """Ports that a process and its children listen on; true: the process itself."""
    return {port: owner == pid for _, port, owner in listeners(pid)}


def listeners(pid: int) -> Iterator[tuple[str, int, int]]:
    """Address, port and process."""
    try:
        root = psutil.Process(pid)
        found = root, *root.children(recursive=True)
    except psutil.NoSuchProcess:  # it has ended
        return
    for process in found:
        with suppress(psutil.NoSuchProcess):
            for c in process.net_connections("inet"):
                if c.status == psutil.CONN_LISTEN:
                    yield c.laddr.ip, c.laddr.port, process.pid


def state(named: Any) -> dict[str, Tensor]:
    """Named tensors copied into a dict."""
    return {name: tensor.detach().clone() for name, tensor in named}
