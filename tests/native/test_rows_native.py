"""Native RMSNorm, RoPE and SwiGLU: the program of csrc/tests, modules beside float64, checks."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.mcore import compat
from rlcore.mcore.activation import SwiGLU
from rlcore.mcore.norm import rms_norm
from rlcore.mcore.rope import rotate
from rlcore.ops import native, rows
from tests import kit
from tests.native import host


@pytest.mark.parametrize("flags", [f"{host.SANITIZED} {host.STRICT}", "-O3"], ids=["checked", "O3"])
def test_every_instruction_set_equals_loops_in_double(tmp_path: Path, flags: str) -> None:
    said = host.run(host.build(tmp_path, ["rows/rows_host.cpp", "tests/rows_test.cpp"], flags))
    assert "run: baseline" in said.splitlines()


@pytest.fixture
def ops() -> Any:
    found = native.torch_ops("norm, RoPE, SwiGLU")
    if found is None:
        pytest.skip("no native build")
    return found


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    return rotate(x, angles.cos().unsqueeze(1), angles.sin().unsqueeze(1))


def strided() -> Tensor:
    """Two heads of every three, [700, 2, 36]."""
    return some(700, 3, 36)[:, :2]


CASES: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "norm": (lambda x, w: rms_norm(x, w, 1e-6), [some(650, 40), some(40)]),
    "norm of three": (lambda x, w: rms_norm(x, w, 1e-6), [some(70, 1, 128), some(128)]),
    "norm of heads": (lambda x, w: rms_norm(x, w, 1e-6), [strided(), some(36)]),
    "turn": (turned, [strided(), some(700, 18)]),
    "swiglu": (lambda x: SwiGLU()(x), [some(333, 2 * 20)]),
    "swiglu of three": (lambda x: SwiGLU()(x), [some(30, 1, 2 * 64)]),
}


def results(run: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """The result, and its gradients by the first input and, of a norm, by the weight."""
    held = [x.detach().requires_grad_(i == 0 or x.dim() == 1) for i, x in enumerate(given)]
    out = run(*held)
    (out * some(*out.shape).to(out.dtype)).sum().backward()
    return [out.detach(), *(x.grad for x in held if x.requires_grad)]


@pytest.mark.parametrize("case", CASES)
def test_modules_equal_those_in_float64(ops: Any, case: str) -> None:
    run, given = CASES[case]
    assert compat.kernels_of(given[0]) is rows and compat.kernels_of(given[0].double()) is None
    found = results(run, given)
    exact = results(run, [x.double() for x in given])
    assert len(found) == (3 if "norm" in case else 2)
    for mine, want in zip(found, exact, strict=True):
        assert mine.shape == want.shape
        assert (mine - want).abs().max() < 3e-6 * want.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_threads_change_no_bit(ops: Any, case: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    one = results(*CASES[case])
    torch.set_num_threads(3)
    try:
        assert all(map(torch.equal, one, results(*CASES[case])))
    finally:
        torch.set_num_threads(before)


def test_bad_tensors_are_named(ops: Any) -> None:
    x, weight = some(4, 1, 6), some(6)
    for call, message in (
        (lambda: rows.rms_norm(x.double(), weight, 1e-6), "x: must be float32"),
        (lambda: rows.rms_norm(x, some(5), 1e-6), "weight: 5 elements; 6 are needed"),
        (lambda: rows.rms_norm_back(some(4, 5), x, weight, some(4)), "grad: 20 elements; 24"),
        (lambda: rows.turn(x, some(4, 1, 2), some(4, 1, 3), False), "cos: 8 elements; 12"),
        (lambda: rows.turn(some(4, 1, 5), some(4), some(4), False), "x: 5 columns; must be even"),
        (lambda: rows.swiglu(some(4, 5)), r"x: must be \[rows, 2 size\]"),
        (lambda: rows.swiglu_back(some(4, 2), some(4, 6)), "grad: 8 elements; 12 are needed"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.fixture
def tool(ops: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """tools/bench_layers.py with short sequences."""
    path = kit.ROOT / "tools" / "bench_layers.py"
    spec = importlib.util.spec_from_file_location("bench_layers", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    monkeypatch.setattr(found, "LENGTHS", {"short": [3, 5]})
    return found


def test_the_bench_measures_every_arm(tool: Any, tmp_path: Path) -> None:
    tool.main(["--rounds", "2", "--json", str(tmp_path / "out.json")])
    made = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(made) == 3 + 3
    assert all(row["ms"].keys() == {"torch", "native"} for row in made)
    assert all(t > 0 for row in made for arm in row["ms"].values() for t in arm.values())


def test_arms_of_the_bench_compute_the_same(tool: Any) -> None:
    for given, arms in (tool.attention_cases(0) | tool.row_cases(0)).values():
        want, found = (call(*given) for call in (arms["torch"], arms["native"]))
        assert (want - found).abs().max() < 1e-5
