"""The native copies: the bytes and the checksums of the torch reference, whatever the threads; the
host's code and the kernel's body clean under sanitizers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.ops import native, reshard
from rlcore.ops.reshard import ReshardPlan, TensorPiece, TensorSpec, checksum, checksum_reference
from tests.native import host

ROOT = Path(__file__).resolve().parents[2]
BUILT = native._library() == ""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.uint8, torch.int16, torch.int64, torch.complex128, torch.float8_e4m3fn)

needs_build = pytest.mark.skipif(not BUILT, reason="no native build (no compiler at set-up)")
pytestmark = pytest.mark.native


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[TensorSpec], list[TensorPiece], int]:
    """Tensors of any order of dimensions, with holes; each is one piece or two, cut across, and the
    bucket has its dimensions in another order still."""
    specs, pieces, end = [], [], 0
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(FLOATS + OTHERS))
        other = draw(st.sampled_from(FLOATS)) if dtype in FLOATS else dtype
        shape = tuple(draw(st.lists(st.integers(0, 9) | st.sampled_from([64, 130]), max_size=3)))
        strides = permuted(draw, shape, draw(st.integers(0, 3)))
        specs.append(TensorSpec(shape, dtype, strides))
        align = max(other.itemsize, draw(st.sampled_from([1, 8, 16])))
        start = -(-end // align) * align + align * draw(st.integers(0, 2))
        there = permuted(draw, shape, draw(st.sampled_from([0, 0, 1])))
        cut = draw(st.integers(0, shape[0])) if shape else 0
        for first, size in ((0, cut), (cut, shape[0] - cut)) if shape else ((0, None),):
            pieces.append(
                TensorPiece(
                    tensor=number,
                    offset=start + first * (there[0] if shape else 0) * other.itemsize,
                    shape=shape if size is None else (size, *shape[1:]),
                    strides=there,
                    dtype=other,
                    start=first * (strides[0] if shape else 0),
                    tensor_strides=strides,
                )
            )
        end = start + span(shape, there) * other.itemsize
    order = draw(st.permutations(range(len(pieces))))
    return specs, [pieces[i] for i in order], end + draw(st.integers(0, 20))


def permuted(draw: st.DrawFn, shape: tuple[int, ...], hole: int) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = step
        step = step * max(shape[dim], 1) + hole
    return tuple(strides)


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def filled(spec: TensorSpec, seed: int) -> Tensor:
    """Random bits, NaNs and infinities among them; holes are zeros."""
    made = torch.zeros(span(spec.shape, spec.strides) * spec.dtype.itemsize, dtype=torch.uint8)
    made.random_(generator=torch.Generator().manual_seed(seed))
    return made.view(spec.dtype).as_strided(spec.shape, spec.strides)


def storage(x: Tensor) -> Tensor:
    """All bytes, holes included."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


@needs_build
@settings(max_examples=300)
@given(layouts(), st.integers(0, 2**30), st.sampled_from([0, 1, 8]))
def test_native_and_reference_give_the_same_bytes_and_checksums(
    layout: tuple[list[TensorSpec], list[TensorPiece], int], seed: int, shift: int
) -> None:
    specs, pieces, num_bytes = layout
    plan = ReshardPlan(specs, pieces, num_bytes)
    tensors = [filled(spec, seed + i) for i, spec in enumerate(specs)]
    ours = torch.full((num_bytes + shift,), 7, dtype=torch.uint8)[shift:]
    theirs = torch.full((num_bytes,), 9, dtype=torch.uint8)
    said = plan.pack(tensors, ours)
    assert said == reshard._reference(plan._boxes, tensors, theirs, True)
    assert torch.equal(ours, theirs)
    assert said == checksum(ours) == checksum_reference(ours)
    back = [filled(spec, seed + 9 + i) for i, spec in enumerate(specs)]
    wanted = [filled(spec, seed + 9 + i) for i, spec in enumerate(specs)]
    assert plan.unpack(ours, back) == said
    assert reshard._reference(plan._boxes, wanted, theirs, False) == said
    for a, b in zip(back, wanted, strict=True):
        assert torch.equal(storage(a), storage(b))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_build
def test_the_number_of_threads_changes_nothing(threads: None) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(700, n, generator=generator) for n in (1, 333, 1024)]
    tensors.append(torch.randn(512, 600, generator=generator).T)
    specs = [TensorSpec(tuple(t.shape), t.dtype, t.stride()) for t in tensors]
    pieces, end = [], 0
    for i, spec in enumerate(specs):
        pieces.append(TensorPiece(tensor=i, offset=end, shape=spec.shape, dtype=torch.bfloat16))
        end += tensors[i].numel() * 2
    seen = set()
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        bucket = torch.empty(end, dtype=torch.uint8)
        said = ReshardPlan(specs, pieces, end).pack(tensors, bucket)
        seen.add((said, checksum(bucket), bucket.numpy().tobytes()))
    assert len(seen) == 1


@needs_build
def test_shards_of_columns_are_summed_on_the_way() -> None:
    """Rows that are whole words need no second pass over the bucket."""
    shards = [torch.arange(32.0).view(4, 8) + 100 * i for i in range(3)]
    pieces = [
        TensorPiece(tensor=i, offset=i * 32, shape=(4, 8), strides=(24, 1), tensor_strides=(8, 1))
        for i in range(3)
    ]
    plan = ReshardPlan([TensorSpec((4, 8), torch.float32)] * 3, pieces, 4 * 24 * 4)
    bucket = torch.empty(4 * 24 * 4, dtype=torch.uint8)
    plan.pack(shards, bucket)
    assert torch.equal(bucket.view(torch.float32).view(4, 24), torch.cat(shards, 1))
    assert not plan._tables[bucket.device].hash_after


@needs_build
@pytest.mark.parametrize(
    "field, value, message",
    [
        (12, 2**40, "piece 0: ends outside of the bucket of 64 bytes"),
        (12, -8, "piece 0: bucket_offset -8"),
        (0, 2**30, "piece 0: ends outside|num_tiles 1: piece 0 has more"),
        (14, 1, "piece 0: tensor 1 of 1"),
        (15, 99, "piece 0: no copy between dtypes 99"),
        (17, 0, "piece 0: tiles of 0 x 16"),
        (20, 8, "piece 0: ends outside"),
        (21, 3, "piece 0: first_tile 3"),
    ],
)
def test_a_table_that_leads_out_of_the_bucket_is_refused(
    field: int, value: int, message: str
) -> None:
    tensor, bucket = torch.zeros(16), torch.zeros(64, dtype=torch.uint8)
    plan = ReshardPlan(
        [TensorSpec((16,), tensor.dtype)], [TensorPiece(tensor=0, offset=0, shape=(16,))], 64
    )
    plan.pack([tensor], bucket)
    table = plan._tables[bucket.device]
    addresses, total = table.addresses([tensor.data_ptr()]), torch.zeros(1, dtype=torch.int64)
    pieces = table.pieces.clone()
    pieces[0, field] = value
    ops = native.torch_ops("reshard", "cpu")
    with pytest.raises((ValueError, RuntimeError), match=message):
        ops.reshard_copy(pieces, 1, addresses, bucket, total, True, False, table.pairs, 0)
    with pytest.raises((ValueError, RuntimeError), match=message):
        ops.reshard_check(pieces, 1, 1, 64)


@needs_build
def test_other_arguments_that_do_not_fit_the_table_are_refused() -> None:
    tensor, bucket = torch.zeros(16), torch.zeros(64, dtype=torch.uint8)
    plan = ReshardPlan(
        [TensorSpec((16,), tensor.dtype)], [TensorPiece(tensor=0, offset=0, shape=(16,))], 64
    )
    plan.pack([tensor], bucket)
    table = plan._tables[bucket.device]
    pieces, pairs = table.pieces, table.pairs
    null, total = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    ops = native.torch_ops("reshard", "cpu")
    with pytest.raises((ValueError, RuntimeError), match="num_tiles 7: the pieces have 1"):
        ops.reshard_copy(pieces, 7, null, bucket, total, True, False, pairs, 0)
    with pytest.raises((ValueError, RuntimeError), match="tensors: number 0 is at 0"):
        ops.reshard_copy(pieces, 1, null, bucket, total, True, False, pairs, 0)
    with pytest.raises((ValueError, RuntimeError), match=f"pairs 1: the pieces have {pairs}"):
        ops.reshard_copy(pieces, 1, null + 16, bucket, total, True, False, 1, 0)
    with pytest.raises((ValueError, RuntimeError), match="ends outside of the bucket of 63"):
        ops.reshard_copy(pieces, 1, null, bucket[:63], total, True, False, pairs, 0)


@pytest.mark.slow
def test_host_code_and_kernel_body_pass_under_address_and_undefined_sanitizers(
    tmp_path: Path,
) -> None:
    host.run(host.build(tmp_path, ["reshard/copy_host.cpp", "tests/reshard_test.cpp"]))
