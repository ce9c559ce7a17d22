"""Copies to and from a bucket on a GPU: the bytes and the checksum of the CPU."""

import pytest
import torch
from torch import Tensor

from rlcore.ops import native
from rlcore.ops.reshard import ReshardPlan, TensorPiece, TensorSpec, checksum
from rlcore.sync.pack import pack
from rlcore.utils.buckets import as_tensor, unpack
from tests.gpu import side

pytestmark = pytest.mark.gpu
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def bits(x: Tensor) -> Tensor:
    """The bytes of the elements in row-major order, so that a NaN equals itself."""
    # A copy: contiguous() returns a column of shape [n, 1] with its strides, which view() refuses.
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def on_both(plan: ReshardPlan, tensors: list[Tensor]) -> None:
    """Pack and unpack here and there."""
    there = torch.full((plan.num_bytes,), 1, dtype=torch.uint8)
    here = torch.full((plan.num_bytes,), 2, dtype=torch.uint8, device=side.DEVICE)
    moved = [t.to(side.DEVICE) for t in tensors]
    said = plan.pack(tensors, there)
    assert plan.pack(moved, here) == said == checksum(here)
    assert torch.equal(here.cpu(), there)
    back = [torch.zeros_like(t) for t in moved]
    wanted = [torch.zeros_like(t) for t in tensors]
    assert plan.unpack(here, back) == plan.unpack(there, wanted) == said
    for a, b in zip(back, wanted, strict=True):
        assert torch.equal(bits(a.cpu()), bits(b))


@side.needs_kernels
def test_the_kernel_is_what_runs() -> None:
    assert native.torch_ops("reshard", side.DEVICE.type) is not None


@pytest.mark.parametrize("to", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (1000, 515), (256, 4096)])
def test_casts_of_any_shape(shape: tuple[int, ...], source: torch.dtype, to: torch.dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(source)
    tensor.view(-1)[0] = torch.nan
    plan = ReshardPlan(
        [TensorSpec(shape, source)],
        [TensorPiece(tensor=0, offset=0, shape=shape, dtype=to)],
        tensor.numel() * to.itemsize + 5,
    )
    on_both(plan, [tensor])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.complex128])
@pytest.mark.parametrize("width", [3, 8, 100])
def test_shards_of_columns_and_odd_offsets(dtype: torch.dtype, width: int) -> None:
    shards = [(torch.arange(50 * width).view(50, width) % 251 + i).to(dtype) for i in range(3)]
    pieces = [
        TensorPiece(
            tensor=i,
            offset=(5 + i * width) * dtype.itemsize,
            shape=(50, width),
            strides=(3 * width, 1),
            tensor_strides=(width, 1),
        )
        for i in range(3)
    ]
    spec = TensorSpec((50, width), dtype)
    on_both(ReshardPlan([spec] * 3, pieces, (150 * width + 9) * dtype.itemsize), shards)


def test_transposed_tensors() -> None:
    tensors = [torch.randn(n, 300).to(torch.bfloat16) for n in (1, 64, 333)]
    specs = [TensorSpec((300, len(t)), t.dtype, (1, 300)) for t in tensors]
    pieces, end = [], 0
    for i, spec in enumerate(specs):
        pieces.append(TensorPiece(tensor=i, offset=end, shape=spec.shape))
        end += tensors[i].nbytes + 8
    on_both(ReshardPlan(specs, pieces, end), [t.T for t in tensors])


def test_weights_of_a_gpu_arrive_on_the_cpu() -> None:
    tensors = {f"w{i}": torch.randn(i * 7 + 1, 33, device=side.DEVICE) for i in range(20)}
    back: dict[str, Tensor] = {}
    for bucket, buffer in pack(tensors.items(), 4096):
        assert checksum(as_tensor(bucket, buffer)) == bucket.checksum
        back.update(unpack(bucket, buffer))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(tensors[name].cpu(), back[name]) for name in back)
