"""Native attention of packed sequences: the program of csrc/tests, the ops beside attention in
float64, their checks, and the learner's choice of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.mcore import attention as plans
from rlcore.mcore import flash
from rlcore.ops import attention, native
from tests.native import host

CPU = torch.device("cpu")


@pytest.mark.parametrize("flags", [f"{host.SANITIZED} {host.STRICT}", "-O3"], ids=["checked", "O3"])
def test_every_instruction_set_equals_loops_in_double(tmp_path: Path, flags: str) -> None:
    parts = ["attention/attention_host.cpp", "product/product_host.cpp"]
    said = host.run(host.build(tmp_path, [*parts, "tests/attention_test.cpp"], flags))
    assert "run: baseline" in said.splitlines()


@pytest.fixture
def ops() -> Any:
    found = native.torch_ops("attention")
    if found is None:
        pytest.skip("no native build")
    return found


def inputs(made: plans.AttentionPlan, keys: int, dim: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    g = torch.Generator().manual_seed(0)
    queries = int(made.cu_query[-1])
    shapes = (queries, 4, dim), (keys, 2, dim), (keys, 2, dim), (queries, 4, dim)
    return [torch.randn(shape, generator=g) for shape in shapes]


def results(made: plans.AttentionPlan, given: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in given[:3])
    out = plans.attend(q, k, v, made)
    out.backward(given[3])
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("dim", [32, 20])
@pytest.mark.parametrize(("lengths", "cp"), [([7, 1, 90, 33], 1), ([8, 4, 92], 2)], ids=str)
def test_attention_and_its_gradient_equal_those_in_float64(
    ops: Any, lengths: list[int], cp: int, dim: int
) -> None:
    for rank in range(cp):
        ours = plans.plan(lengths, cp=cp, cp_rank=rank, flash=attention.attend)
        padded = plans.plan(lengths, cp=cp, cp_rank=rank)
        assert ours.padded is None and padded.padded is not None
        given = inputs(padded, sum(lengths), dim)
        found = results(ours, given)
        for mine, exact in zip(found, results(padded, [x.double() for x in given]), strict=True):
            assert (mine - exact).abs().max() < 3e-6 * exact.abs().max()
        assert all(map(torch.equal, found, results(ours, given)))  # bits repeat


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_nan_is_seen_by_all_that_attend_to_it(ops: Any, name: str) -> None:
    made = plans.plan([30, 30], flash=attention.attend)
    given = inputs(made, 60, 32)
    given["qkv".index(name)][9] = torch.nan
    bad = results(made, given)[0].isnan().flatten(1).any(1)
    assert bad[9 : 10 if name == "q" else 30].all() and not bad[30:].any()


def test_threads_change_no_bit(ops: Any) -> None:
    made = plans.plan([30, 80, 5, 64], flash=attention.attend)
    given = inputs(made, 179, 32)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    one = results(made, given)
    torch.set_num_threads(3)
    try:
        assert all(map(torch.equal, one, results(made, given)))
    finally:
        torch.set_num_threads(before)


def test_float32_on_the_cpu_runs_in_native_code(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash.choose("auto", CPU, torch.float32, 20) is attention.attend
    assert flash.choose("auto", CPU, torch.float64, 20) is None
    monkeypatch.setattr(attention.native, "torch_ops", lambda op: None)
    assert flash.choose("auto", CPU, torch.float32, 20) is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.zeros(3, 4, 8).double(), "q: must be contiguous float32"),
        ("q", torch.zeros(3, 3, 8), "q, k: must be"),
        ("k", torch.zeros(3, 2, 4), "q, k: must be"),
        ("v", torch.zeros(2, 2, 8), "v: 32 elements; 48 are needed"),
        ("cu_q", torch.tensor([0, 1, 3]), "cu_query: must be contiguous int32"),
        ("cu_q", torch.tensor([0, 1, 2]).int(), "cu_query: from 0 to 2; must be from 0 to 3"),
        ("cu_q", torch.tensor([0, 3]).int(), "cu_key: another number of units"),
        ("cu_q", torch.tensor([0, 2, 3]).int(), "unit 0: 2 queries for 1 keys"),
    ],
)
def test_bad_tensors_are_named(ops: Any, name: str, value: torch.Tensor, message: str) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros(3, 4, 8),
        "k": torch.zeros(3, 2, 8),
        "v": torch.zeros(3, 2, 8),
        "cu_q": torch.tensor([0, 1, 3]).int(),
        "cu_k": torch.tensor([0, 1, 3]).int(),
        "max_q": 2,
        "max_k": 2,
        "scale": None,
    }
    attention.attend(*given.values())
    with pytest.raises(ValueError, match=message):
        attention.attend(*(given | {name: value}).values())
