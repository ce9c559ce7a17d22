"""Copies to and from a bucket, and the checksum: numbers by hand, a slow checksum in plain Python,
what is refused. Every test runs with the native build, where there is one, and without."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.ops import native
from rlcore.ops.reshard import ReshardPlan, TensorPiece, TensorSpec, checksum, checksum_reference

F32, BF16 = torch.float32, torch.bfloat16
MASK = 2**64 - 1


@pytest.fixture(params=["native", "torch"], autouse=True)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "native" and native._library():
        pytest.skip("no native build")
    monkeypatch.setenv("RLCORE_NATIVE", "1" if request.param == "native" else "0")
    native.torch_ops.cache_clear()
    yield request.param
    native.torch_ops.cache_clear()


def bucket_of(num_bytes: int, fill: int = 255) -> torch.Tensor:
    return torch.full((num_bytes,), fill, dtype=torch.uint8)


def flat(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else bucket_of(0)


def slow_checksum(data: bytes) -> int:
    def value(word: int, position: int) -> int:
        key = (position + 1) * 0x9E3779B97F4A7C15 & MASK
        y = word ^ key
        y ^= y >> 29
        y = y * (key >> 32 | 1) & MASK
        return y ^ y >> 32

    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    return (sum(value(w, i) for i, w in enumerate(words)) + value(len(data), -1)) & MASK


# ---- copies


def test_tensors_lie_where_the_pieces_say_and_the_rest_is_zero() -> None:
    specs = [TensorSpec((2, 2), F32), TensorSpec((3,), torch.uint8)]
    pieces = [
        TensorPiece(tensor=0, offset=8, shape=(2, 2)),
        TensorPiece(tensor=1, offset=26, shape=(3,)),
    ]
    bucket = bucket_of(32)
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([7, 8, 9], dtype=torch.uint8)
    ReshardPlan(specs, pieces, 32).pack([a, b], bucket)
    assert bucket[8:24].view(F32).tolist() == [1, 2, 3, 4]
    assert bucket[:8].tolist() == [0] * 8
    assert bucket[24:].tolist() == [0, 0, 7, 8, 9, 0, 0, 0]


def test_shards_of_rows_and_columns_join_and_part_again() -> None:
    full = torch.arange(48.0).view(6, 8)
    shards = [full[:3, :4], full[:3, 4:], full[3:, :4], full[3:, 4:]]
    shards = [s.clone() for s in shards]
    pieces = [
        TensorPiece(
            tensor=i,
            offset=(i // 2 * 24 + i % 2 * 4) * 4,
            shape=(3, 4),
            strides=(8, 1),
            tensor_strides=(4, 1),
        )
        for i in range(4)
    ]
    plan = ReshardPlan([TensorSpec((3, 4), F32)] * 4, pieces, 192)
    bucket = bucket_of(192)
    said = plan.pack(shards, bucket)
    assert torch.equal(bucket.view(F32).view(6, 8), full)
    back = [torch.zeros(3, 4) for _ in range(4)]
    assert plan.unpack(bucket, back) == said
    assert all(torch.equal(a, b) for a, b in zip(back, shards, strict=True))


def test_a_transposed_tensor_is_packed_in_the_order_of_its_dimensions() -> None:
    tensor = torch.arange(300.0 * 70).view(300, 70).T
    plan = ReshardPlan(
        [TensorSpec((70, 300), F32, (1, 70))],
        [TensorPiece(tensor=0, offset=0, shape=(70, 300))],
        70 * 300 * 4,
    )
    bucket = bucket_of(plan.num_bytes)
    plan.pack([tensor], bucket)
    assert torch.equal(bucket.view(F32).view(70, 300), tensor)


@pytest.mark.parametrize("to", [torch.float64, F32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("source", [torch.float64, F32, BF16, torch.float16], ids=str)
def test_casts_round_as_torch_does(source: torch.dtype, to: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5000, generator=generator, dtype=torch.float64)
    values = (values * 10.0 ** torch.randint(-9, 6, (5000,), generator=generator)).to(source)
    values[:4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    plan = ReshardPlan(
        [TensorSpec((5000,), source)],
        [TensorPiece(tensor=0, offset=0, shape=(5000,), dtype=to)],
        5000 * to.itemsize,
    )
    bucket = bucket_of(plan.num_bytes)
    plan.pack([values], bucket)
    wanted = values if source == to else values.float().to(to)
    assert torch.equal(bucket.view(to).signbit(), wanted.signbit())
    assert torch.equal(bucket.view(to), wanted)
    back = torch.zeros_like(values)
    plan.unpack(bucket, [back])
    assert torch.equal(back, wanted.float().to(source) if source != to else values)


def test_a_nan_stays_one_and_a_copy_without_cast_keeps_its_bits() -> None:
    bits = torch.tensor([0x7F800001, -1, 0x7FC00000], dtype=torch.int32).view(F32)
    spec = [TensorSpec((3,), F32)]
    same, cast = bucket_of(12), bucket_of(6)
    ReshardPlan(spec, [TensorPiece(tensor=0, offset=0, shape=(3,))], 12).pack([bits], same)
    ReshardPlan(spec, [TensorPiece(tensor=0, offset=0, shape=(3,), dtype=BF16)], 6).pack(
        [bits], cast
    )
    assert torch.equal(same.view(torch.int32), bits.view(torch.int32))
    assert cast.view(torch.int16).tolist() == [0x7FC0] * 3


def test_an_empty_plan_and_empty_tensors_are_fine() -> None:
    assert ReshardPlan([], [], 0).pack([], bucket_of(0)) == slow_checksum(b"")
    plan = ReshardPlan(
        [TensorSpec((0, 4), F32)], [TensorPiece(tensor=0, offset=0, shape=(0, 4))], 3
    )
    bucket = bucket_of(3)
    assert plan.pack([torch.zeros(0, 4)], bucket) == slow_checksum(bytes(3))
    assert bucket.tolist() == [0, 0, 0]


def test_a_plan_is_used_again_with_tensors_elsewhere() -> None:
    plan = ReshardPlan([TensorSpec((9,), F32)], [TensorPiece(tensor=0, offset=0, shape=(9,))], 36)
    for seed in range(3):
        tensor = torch.randn(9, generator=torch.Generator().manual_seed(seed))
        bucket = bucket_of(36)
        plan.pack([tensor], bucket)
        assert torch.equal(bucket.view(F32), tensor)


def test_one_tensor_may_be_packed_twice_but_not_filled_twice() -> None:
    pieces = [TensorPiece(tensor=0, offset=o, shape=(4,)) for o in (0, 16)]
    plan = ReshardPlan([TensorSpec((4,), F32)], pieces, 32)
    bucket = bucket_of(32)
    plan.pack([torch.arange(4.0)], bucket)
    assert bucket.view(F32).tolist() == [0, 1, 2, 3] * 2
    with pytest.raises(ValueError, match="pieces: 0 and 1 both write to byte 0 of tensor 0"):
        plan.unpack(bucket, [torch.zeros(4)])


def test_one_part_of_a_bucket_may_fill_two_tensors_but_not_be_packed_from_two() -> None:
    pieces = [TensorPiece(tensor=i, offset=0, shape=(4,)) for i in (0, 1)]
    plan = ReshardPlan([TensorSpec((4,), F32)] * 2, pieces, 16)
    a, b = torch.zeros(4), torch.zeros(4)
    assert plan.unpack(bucket_of(16, 0x40), [a, b]) == slow_checksum(b"\x40" * 16)
    assert torch.equal(a, b) and a[0] == b[0] == 3.0039215087890625
    with pytest.raises(ValueError, match="pieces: 0 and 1 both write to byte 0 of the bucket"):
        plan.pack([a, b], bucket_of(16))


# ---- the checksum


@given(st.binary(max_size=200))
def test_the_checksum_is_what_its_definition_says(data: bytes) -> None:
    assert checksum(flat(data)) == checksum_reference(flat(data)) == slow_checksum(data)


def test_a_checksum_of_a_large_buffer_is_the_sum_of_its_parts() -> None:
    data = torch.empty((9 << 20) + 3, dtype=torch.uint8)
    data.random_(generator=torch.Generator().manual_seed(0))
    assert checksum(data) == checksum_reference(data)


@given(st.binary(min_size=1, max_size=100), st.data())
def test_every_change_of_one_byte_shows(data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data) - 1))
    changed = bytearray(data)
    changed[at] ^= draw.draw(st.integers(1, 255))
    assert checksum(flat(bytes(changed))) != checksum(flat(data))


def test_swapped_zeroed_repeated_and_missing_parts_show() -> None:
    bucket = torch.randn(512, generator=torch.Generator().manual_seed(1)).view(torch.uint8)
    seen = {checksum(bucket)}

    def see(changed: torch.Tensor) -> None:
        said = checksum(changed.contiguous())
        assert said not in seen
        seen.add(said)

    for size in (8, 64, 1000):
        swapped = bucket.clone()
        swapped[:size], swapped[1024 : 1024 + size] = bucket[1024 : 1024 + size], bucket[:size]
        zeroed, repeated = bucket.clone(), bucket.clone()
        zeroed[640 : 640 + size] = 0
        repeated[640 : 640 + size] = bucket[:size]
        for changed in (swapped, zeroed, repeated, bucket[:-size], bucket[size:]):
            see(changed)
    see(bucket.flip(0))
    negated = (-bucket.view(F32)).view(torch.uint8)
    see(negated)


def test_zeros_of_another_length_have_another_checksum() -> None:
    assert len({checksum(bucket_of(n, 0)) for n in range(100)}) == 100


# ---- what is refused

SPEC = TensorSpec((4, 4), F32)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tensor": 1}, r"pieces\[0\].tensor 1: the plan has only 1 tensors"),
        ({"shape": (-1, 4)}, r"pieces\[0\].shape \(-1, 4\): sizes must be 0 or more"),
        ({"strides": (4,)}, r"pieces\[0\].strides \(4,\): must have 2 entries"),
        ({"strides": (-4, 1)}, r"pieces\[0\].strides \(-4, 1\).* 0 or more"),
        ({"tensor_strides": (4, 1, 1)}, r"pieces\[0\].tensor_strides"),
        ({"offset": 2}, r"pieces\[0\].offset 2: must be a multiple of 4"),
        ({"offset": -4}, r"pieces\[0\].offset -4"),
        ({"offset": 4}, r"pieces\[0\]: ends at byte 68, but the bucket has 64"),
        ({"start": 1}, r"pieces\[0\]: ends at element 17 of tensor 0, which has only 16"),
        ({"start": -1}, r"pieces\[0\].start -1"),
        ({"dtype": torch.int32}, r"pieces\[0\].dtype torch.int32: tensor 0 is torch.float32"),
        (
            {"shape": (2,) * 5, "strides": (16, 8, 4, 2, 1), "tensor_strides": (1, 2, 4, 8, 0)},
            r"pieces\[0\]: ends at byte 128|pieces\[0\]: 5 dimensions",
        ),
    ],
)
def test_a_piece_that_makes_no_sense_is_refused_by_name(change: Any, message: str) -> None:
    fields: dict[str, Any] = {"tensor": 0, "offset": 0, "shape": (4, 4)}
    with pytest.raises(ValueError, match=message):
        ReshardPlan([SPEC], [TensorPiece(**(fields | change))], 64)


def test_too_many_dimensions_are_refused() -> None:
    strides = (1, 2, 4, 8, 16)
    spec = TensorSpec((2,) * 5, F32, strides)
    with pytest.raises(ValueError, match="5 dimensions cannot be merged, must be at most 4"):
        ReshardPlan([spec], [TensorPiece(tensor=0, offset=0, shape=(2,) * 5)], 128)


def test_specs_and_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="num_bytes -1"):
        ReshardPlan([], [], -1)
    with pytest.raises(ValueError, match=r"tensors\[0\].shape \(-2,\)"):
        ReshardPlan([TensorSpec((-2,), F32)], [], 0)
    with pytest.raises(ValueError, match=r"tensors\[0\].strides \(1,\)"):
        ReshardPlan([TensorSpec((2, 2), F32, (1,))], [], 0)


@pytest.mark.parametrize(
    "tensor, message",
    [
        (torch.zeros(4, 5), r"tensors\[0\]: torch.float32 \[4, 5\]"),
        (torch.zeros(4, 4).T, r"tensors\[0\]: .*strides \(1, 4\)"),
        (torch.zeros(4, 4).double(), r"tensors\[0\]: torch.float64"),
        (torch.zeros(4, 4, device="meta"), r"tensors\[0\]: .*on meta"),
    ],
)
def test_a_tensor_that_does_not_match_the_plan_is_refused(tensor: Any, message: str) -> None:
    plan = ReshardPlan([SPEC], [TensorPiece(tensor=0, offset=0, shape=(4, 4))], 64)
    for move in (
        lambda: plan.pack([tensor], bucket_of(64)),
        lambda: plan.unpack(bucket_of(64), [tensor]),
    ):
        with pytest.raises(ValueError, match=message):
            move()


@pytest.mark.parametrize(
    "bucket, message",
    [
        (torch.zeros(128, dtype=torch.uint8)[::2], "bucket: .*contiguous"),
        (torch.zeros(16), "bucket: torch.float32"),
        (torch.zeros(8, 8, dtype=torch.uint8), "bucket: .*one dimension"),
        (torch.zeros(63, dtype=torch.uint8), "bucket: has 63 bytes, the plan needs 64"),
    ],
)
def test_a_bucket_that_does_not_fit_is_refused(bucket: Any, message: str) -> None:
    plan = ReshardPlan([SPEC], [TensorPiece(tensor=0, offset=0, shape=(4, 4))], 64)
    with pytest.raises(ValueError, match=message):
        plan.pack([torch.zeros(4, 4)], bucket)


@pytest.mark.parametrize("left", [0, 40])
def test_a_tensor_or_bucket_whose_storage_was_cut_is_refused(left: int) -> None:
    plan = ReshardPlan([SPEC], [TensorPiece(tensor=0, offset=0, shape=(4, 4))], 64)
    tensor, bucket = torch.zeros(4, 4), bucket_of(64)
    tensor.untyped_storage().resize_(left)
    bucket.untyped_storage().resize_(left)
    for other, name in ((bucket_of(64), r"tensors\[0\]"), (bucket, "bucket")):
        for move in (
            lambda b=other: plan.pack([tensor], b),
            lambda b=other: plan.unpack(b, [tensor]),
        ):
            with pytest.raises(ValueError, match=f"{name}: its storage has {left} bytes"):
                move()
    with pytest.raises(ValueError, match="bucket: its storage"):
        checksum(bucket)


def test_lazy_views_are_refused_since_their_memory_is_not_what_they_show() -> None:
    number = torch.zeros(4, dtype=torch.complex64)
    for tensor in (number.conj(), number.conj().imag):
        spec = TensorSpec((4,), tensor.dtype, tensor.stride())
        plan = ReshardPlan(
            [spec], [TensorPiece(tensor=0, offset=0, shape=(4,))], 4 * tensor.itemsize
        )
        bucket = bucket_of(plan.num_bytes)
        with pytest.raises(ValueError, match=r"tensors\[0\]: is a lazy view"):
            plan.pack([tensor], bucket)
        with pytest.raises(ValueError, match=r"tensors\[0\]: is a lazy view"):
            plan.unpack(bucket, [tensor])


def test_a_tensor_inside_the_bucket_is_refused_and_one_beside_it_in_its_storage_is_not() -> None:
    plan = ReshardPlan([SPEC], [TensorPiece(tensor=0, offset=0, shape=(4, 4))], 64)
    arena = bucket_of(192, 0)
    for start in (4, 64, 124):
        tensor = arena[start : start + 64].view(F32).view(4, 4)
        with pytest.raises(ValueError, match=r"tensors\[0\]: its memory overlaps the bucket's"):
            plan.pack([tensor], arena[64:128])
    for start in (0, 128):
        tensor = arena[start : start + 64].view(F32).view(4, 4).fill_(start)
        plan.pack([tensor], arena[64:128])
        assert torch.equal(arena[64:128].view(F32).view(4, 4), tensor)


def test_too_few_tensors_are_refused() -> None:
    plan = ReshardPlan([SPEC], [TensorPiece(tensor=0, offset=0, shape=(4, 4))], 64)
    with pytest.raises(ValueError, match="tensors: got 0, the plan needs 1"):
        plan.pack([], bucket_of(64))


def test_interleaved_rows_do_not_overlap_and_a_shifted_one_does() -> None:
    def plan(shift: int) -> ReshardPlan:
        pieces = [
            TensorPiece(
                tensor=0,
                offset=8 * i + shift * i,
                shape=(4, 2),
                strides=(4, 1),
                tensor_strides=(2, 1),
            )
            for i in (0, 1)
        ]
        return ReshardPlan([TensorSpec((4, 2), F32)], pieces, 80)

    plan(0).pack([torch.zeros(4, 2)], bucket_of(80))
    with pytest.raises(ValueError, match="pieces: 0 and 1 both write to byte 16 of the bucket"):
        plan(4).pack([torch.zeros(4, 2)], bucket_of(80))


def test_what_runs_is_announced_once(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(native, "announce", lambda what, choice: said.append(f"{what}: {choice}"))
    checksum(bucket_of(9))
    checksum(bucket_of(9))
    where = {"native": "native on cpu", "torch": "torch on cpu (RLCORE_NATIVE=0)"}[build]
    assert said == [f"reshard: {where}"]
