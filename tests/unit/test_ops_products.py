"""Matrix products in native code: `rlcore/ops/products.py`."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlcore.ops import native, products
from tests import kit

SHAPES = [(100, 64, 64), (130, 40, 34), (1, 300, 500), (513, 128, 1), (64, 1100, 64)]


@pytest.fixture(autouse=True)
def _native() -> None:
    if native.torch_ops("matrix products") is None:
        pytest.skip("no native build")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transposed", ["neither", "a", "b", "both"])
def test_products_equal_those_in_double(shape: tuple[int, int, int], transposed: str) -> None:
    n, k, m = shape
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(n, k, generator=g), torch.randn(k, m, generator=g)
    if transposed in ("a", "both"):
        a = a.t().contiguous().t()
    if transposed in ("b", "both"):
        b = b.t().contiguous().t()
    want = a.double() @ b.double()
    assert (products.multiply(a, b) - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(2, 3), torch.ones(3, 2)),
        (torch.ones(0, 300), torch.ones(300, 400)),
        (torch.ones(300, 300).double(), torch.ones(300, 300).double()),
        (torch.ones(300, 300, dtype=torch.int64), torch.ones(300, 300, dtype=torch.int64)),
        (torch.ones(1, 1).expand(300, 300), torch.ones(1, 1).expand(300, 300)),
    ],
    ids=["small", "empty", "double", "integers", "expanded"],
)
def test_other_products_are_those_of_torch(a: torch.Tensor, b: torch.Tensor) -> None:
    found = products.multiply(a, b)
    assert found.dtype is a.dtype and torch.equal(found, a @ b)


def test_wrong_shapes_have_torchs_message() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        products.multiply(torch.ones(300, 400), torch.ones(500, 600))


@pytest.mark.parametrize(
    ("processor", "capability", "want"),
    [
        ("vendor_id : AuthenticAMD", "AVX512", True),
        ("vendor_id : AuthenticAMD", "AVX2", False),
        ("vendor_id : GenuineIntel", "AVX512", False),
    ],
)
def test_only_amd_with_avx512_is_slow(
    monkeypatch: pytest.MonkeyPatch, processor: str, capability: str, want: bool
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: processor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert products.is_slow() == want


PROGRAM = """
import torch
from rlcore.ops import products
products.is_slow = lambda: True
assert products.replace_products() and products.replace_products()
torch.manual_seed(0)
x, w = torch.randn(7, 30, 64, requires_grad=True), torch.randn(64, 128, requires_grad=True)
y = x @ w
y.square().sum().backward()
want = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
(want[0] @ want[1]).square().sum().backward()
for ours, theirs in zip((x.grad, w.grad), (want[0].grad, want[1].grad)):
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
a, b = torch.randn(200, 300), torch.randn(300, 64)
assert torch.equal(a @ b, products.multiply(a, b))
assert torch.equal((a @ b)[:17], a[:17] @ b)
with torch.inference_mode():
    assert torch.equal(a @ b, products.multiply(a, b))
"""


def test_the_process_multiplies_natively_after_the_switch() -> None:
    """A row's product does not depend on the other rows: so it is with the native code."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, cwd=kit.ROOT, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_bench_measures_every_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kit.ROOT / "tools" / "bench_products.py"
    spec = importlib.util.spec_from_file_location("bench_products", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "SHAPES", ((40, 40, 41), (3, 5, 7)))
    tool.main(["--rounds", "2", "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    arms = {"torch", "native", "onednn", "onednn, new rows"}
    assert [row["gflops"].keys() for row in rows] == [arms, arms]
    assert all(value > 0 for row in rows for value in row["gflops"].values())
