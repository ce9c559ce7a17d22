"""The GPU and its toolkit, before anything of rlcore runs on them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu import side

pytestmark = pytest.mark.gpu


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_is_that_of_float64(dtype: torch.dtype) -> None:
    a, b = randn(300, 500).to(dtype), randn(500, 70, seed=1).to(dtype)
    found = a.to(side.DEVICE) @ b.to(side.DEVICE)
    assert side.apart(found, a.double() @ b.double()) < (5e-3 if dtype is torch.bfloat16 else 1e-5)


@side.needs_gpu
def test_copies_by_a_stream_of_their_own_arrive_whole() -> None:
    sent = randn(1 << 20).pin_memory()
    back = torch.empty_like(sent).pin_memory()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        back.copy_(sent.to(side.DEVICE, non_blocking=True) * 2, non_blocking=True)
    stream.synchronize()
    assert torch.equal(back, sent * 2)


def test_ranks_reduce_over_nccl(tmp_path: Path) -> None:
    backend = "nccl" if side.DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        value = torch.arange(5.0, device=side.DEVICE)
        dist.all_reduce(value)
        assert value.tolist() == [0, 1, 2, 3, 4]
    finally:
        dist.destroy_process_group()


@side.needs_gpu
def test_the_compiler_has_the_cuda_version_of_torch() -> None:
    """Kernels of another major version do not run with the driver that torch runs with."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or torch.version.cuda is None:
        pytest.skip("nvcc is not on PATH" if nvcc is None else "torch has no CUDA version")
    done = subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, text=True, check=True)
    found = re.search(r"release (\d+)", done.stdout)
    assert found and found[1] == torch.version.cuda.partition(".")[0], done.stdout
