"""Native products and layers of a decode step: the program of csrc/tests, the ops' checks, and the
model with them against the model in torch."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rlcore.hf.cache import Cache
from rlcore.hf.config import HFConfig
from rlcore.hf.model import CausalLM, ForwardInputs
from rlcore.ops import native
from tests import kit
from tests.native import host

CPU = torch.device("cpu")


@pytest.mark.parametrize("flags", [f"{host.SANITIZED} {host.STRICT}", "-O3"], ids=["checked", "O3"])
def test_every_instruction_set_equals_loops_in_double(tmp_path: Path, flags: str) -> None:
    parts = ["decode/layer_host.cpp", "decode/sample_host.cpp", "product/product_host.cpp"]
    said = host.run(host.build(tmp_path, [*parts, "tests/decode_test.cpp"], flags))
    assert "run: baseline" in said.splitlines()


@pytest.fixture
def ops() -> Any:
    found = native.torch_ops("decode_layer")
    if found is None:
        pytest.skip("no native build")
    return found


def model_of(arch: str) -> CausalLM:
    hf = HFConfig.from_dict(kit.tiny_config(arch))
    model = CausalLM(hf, dtype=torch.float32, device=CPU, max_tokens=64)
    model.allocate()
    g = torch.Generator().manual_seed(0)
    for name, view in model.views.items():
        view.copy_(torch.randn(view.shape, generator=g) * 0.1 + ("norm" in name))
    return model


def decode(model: CausalLM, steps: int = 12, rows: int = 5) -> torch.Tensor:
    """Logits of every step, the last of which has three tokens in each row but the second."""
    hf, g = model.hf, torch.Generator().manual_seed(1)
    cache = Cache(
        hf.num_layers,
        hf.cache_shape,
        dtype=torch.float32,
        device=CPU,
        max_slots=8,
        max_columns=64,
        budget=8 * 64,
    )
    cache.reserve(rows, 40, 0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(0, 50, shape, generator=g)

    step = ForwardInputs(
        tokens=some(rows, 1),
        positions=torch.zeros(rows, 1, dtype=torch.int64),
        slot=0,
        spans=[(0, rows, 1)],
        causal=False,
    )
    found = []
    for _ in range(steps):
        found.append(model.logits(model.forward(step, cache)).flatten(0, 1))
        step.advance(some(rows, 1))
    place = torch.tensor([i for i in range(3 * rows) if i not in (4, 5)])
    step = ForwardInputs(
        tokens=some(rows, 3),
        positions=torch.arange(steps, steps + 3).expand(rows, 3),
        slot=0,
        spans=[(0, rows, steps + 3)],
        causal=False,
        place=place,
    )
    return torch.cat([*found, model.logits(model.forward(step, cache))])


@pytest.mark.parametrize("arch", ["qwen3", "qwen2", "llama"])
@torch.inference_mode()
def test_decode_steps_equal_those_in_torch(ops: Any, arch: str) -> None:
    model = model_of(arch)
    with mock.patch.object(
        CausalLM, "_run_native", side_effect=CausalLM._run_native, autospec=True
    ) as run:
        ours = decode(model)
    assert run.call_count == 13
    with mock.patch.object(CausalLM, "_native", return_value=None):
        want = decode(model)
    assert len(ours) == 12 * 5 + 13
    assert (ours - want).abs().max() < 5e-6 < want.abs().max() / 1e4


def test_what_has_no_native_code_runs_in_torch() -> None:
    for arch, options in (
        ("qwen3_moe", {}),
        ("qwen3", {"dtype": torch.float64}),
        ("qwen3", {"dtype": torch.bfloat16}),
        ("qwen3", {"quantize": "int8_w8a8"}),
    ):
        hf = HFConfig.from_dict(kit.tiny_config(arch))
        model = CausalLM(hf, **({"dtype": torch.float32, "device": CPU, "max_tokens": 8} | options))
        model.allocate()
        assert not model.decodes_natively


def tensors() -> dict[str, Any]:
    def some(*shape: int) -> torch.Tensor:
        return torch.ones(shape)

    return {
        "x": some(2, 8),
        "slots": torch.tensor([0, 1]),
        "positions": torch.tensor([0, 3]),
        "rope": some(4, 2, 2),
        "slab": some(2, 2, 1, 5, 4),
        "norm1": some(8),
        "qkv": some(8, 4 * 4),
        "qkv_bias": None,
        "qk_norm": some(3, 4),
        "out": some(8, 8),
        "norm2": some(8),
        "gate_up": some(8, 12),
        "down": some(6, 8),
        "eps": 1e-6,
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.ones(2, 8).double(), "x: must be contiguous float32"),
        ("x", torch.ones(16), "x: 1 dimensions"),
        ("slots", torch.tensor([0, 2]), "slots: 2 of token 1; the slab has 2"),
        ("slots", torch.tensor([0]), "slots: 1 elements; 2 are needed"),
        (
            "positions",
            torch.tensor([0, 4]),
            "positions: 4 of token 1; the slab has 5 columns, rope 4",
        ),
        ("positions", torch.tensor([-1, 0]), "positions: -1 of token 0"),
        ("slab", torch.ones(2, 2, 5, 4), "slab: must be"),
        ("slab", torch.ones(2, 2, 1, 4, 5).transpose(3, 4), "slab: must be contiguous"),
        ("qkv", torch.ones(8, 15), "qkv: must be"),
        ("qkv", torch.ones(8, 8), "qkv: 0 query heads"),
        ("qkv", torch.ones(16, 8).T, "qkv: must be contiguous"),
        ("qkv_bias", torch.ones(3), "qkv_bias: 3 elements; 16 are needed"),
        ("qk_norm", torch.ones(2, 4), "qk_norm: 8 elements; 12 are needed"),
        ("rope", torch.ones(4, 4), "rope: must be"),
        ("down", torch.ones(7, 8), "gate_up: 96 elements; 112 are needed"),
    ],
)
def test_wrong_tensors_are_refused(ops: Any, name: str, value: Any, message: str) -> None:
    ops.decode_layer(*tensors().values())
    with pytest.raises(ValueError, match=message):
        ops.decode_layer(*(tensors() | {name: value}).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_move_all_at_once(ops: Any, dtype: torch.dtype) -> None:
    slab = torch.randn(2, 6, 3, 7, 4).to(dtype)
    to, come = torch.tensor([0, 1, 4]), torch.tensor([1, 0, 5])
    want = slab.clone()
    want[:, to, :, :5] = slab[:, come, :, :5]
    ops.move_slots(slab, to, come, 5)
    assert torch.equal(slab, want) and not torch.equal(slab[:, 4], slab[:, 5])
    with pytest.raises(ValueError, match="slot 6: the slab has 6"):
        ops.move_slots(slab, torch.tensor([0]), torch.tensor([6]), 5)
    with pytest.raises(ValueError, match="length: 8; the slab has 7"):
        ops.move_slots(slab, torch.tensor([0]), torch.tensor([1]), 8)


def test_bad_logits_are_named(ops: Any) -> None:
    def run(**changes: Any) -> None:
        given = {
            "logits": torch.zeros(2, 3),
            "counters": torch.zeros(2, dtype=torch.int64),
            "scales": torch.ones(2),
            "greedy": None,
            "tokens": torch.zeros(2, dtype=torch.int64),
            "logps": torch.zeros(2).double(),
        }
        ops.sample_tokens(*(given | changes).values())

    run()
    for name, value in (
        ("logits", torch.zeros(2, 0)),
        ("logits", torch.zeros(2, 3).double()),
        ("counters", torch.zeros(1, dtype=torch.int64)),
        ("scales", torch.ones(2).double()),
        ("greedy", torch.zeros(2)),
        ("tokens", torch.zeros(2)),
        ("logps", torch.zeros(2)),
    ):
        with pytest.raises(ValueError, match=f"^{name}: must be|^{name}: 1 elements"):
            run(**{name: value})
