"""Copy many parts of tensors to or from one flat buffer, in one launch for each pair of dtypes,
with a checksum.

A `ReshardPlan` is made once for given tensor shapes; each call of `pack` and `unpack` takes the
tensors and the buffer (bucket). C++ and CUDA code (`csrc/reshard`) is used if built; otherwise
torch copies piece by piece, with the same bytes and checksum. Casts round to nearest even, as in
torch, and turn every NaN into the positive quiet NaN.

    specs = [TensorSpec((2, 3), torch.float32)]
    plan = ReshardPlan(specs, [TensorPiece(tensor=0, offset=0, shape=(2, 3))], num_bytes=24)
    sent = plan.pack([tensor], bucket)
    assert plan.unpack(bucket, [other]) == sent == checksum(bucket)

The 64-bit checksum is a sum modulo 2^64: one value per 8-byte word, computed from the word and its
position, plus one value for the number of bytes. It does not depend on how the work is split. It
always detects a change within one word. As far as trials show, swapped, zeroed, repeated or missing
ranges stay undetected with a probability of about 2^-64. It does not protect against manipulation.

Own code instead of torch's copies: a weight update of 1 GiB with checksum takes 197 ms instead of
895 ms (`tools/results/reshard.json`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.ops import native

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_WORD = 8
_DIMS = 4
_TILE_BYTES = 32 << 10
_GAP = -1
_MAX_RUNS = 1 << 26
_FEW = 1024  # maximum number of byte ranges outside pieces, in addition to one per piece

# Type codes of csrc/reshard/plan.h.
_FLOATS = {torch.float64: 5, torch.float32: 6, torch.bfloat16: 7, torch.float16: 8}
_RAW = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
_FIELDS = 22


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and strides of a tensor that a `ReshardPlan` copies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    """Strides in elements; None means contiguous."""


@dataclass(frozen=True, slots=True)
class _Spec:
    """Checked `TensorSpec` with explicit strides."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    span: int
    """Bytes from the first element to the end of the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """Box of elements in a tensor, and its position in the bucket. Strides in the tensor count
    elements of the tensor's dtype; strides in the bucket count elements of the dtype there."""

    tensor: int
    """Index into the plan's tensors."""
    offset: int
    """Offset in the bucket, in bytes; a multiple of the size of an element in the bucket."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """Strides of the box in the bucket; None means contiguous."""
    dtype: torch.dtype | None = None
    """Dtype in the bucket; None means the tensor's dtype. Casts are possible between float64,
    float32, bfloat16 and float16."""
    start: int = 0
    """Index of the first element of the box, counted from the start of the tensor."""
    tensor_strides: tuple[int, ...] | None = None
    """Strides of the box in the tensor. None means the tensor's strides; box and tensor must then
    have equally many dimensions."""


@dataclass(frozen=True, slots=True)
class _Box:
    """Checked `TensorPiece` with explicit strides and dtypes."""

    number: int
    tensor: int
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    dtype: torch.dtype
    start: int
    tensor_strides: tuple[int, ...]
    tensor_dtype: torch.dtype


class ReshardPlan:
    """Plan that maps parts of tensors to ranges of a bucket of `num_bytes`. `pack` fills bytes
    outside all pieces with zeros. A plan holds no tensors. Only one thread at a time may use it."""

    def __init__(
        self, tensors: Sequence[TensorSpec], pieces: Sequence[TensorPiece], num_bytes: int
    ):
        """Check the pieces and make the plan.

        Raises ValueError, naming the argument, for a piece outside its tensor or the bucket,
        negative sizes or strides, unsupported casts, or more than four dimensions that cannot be
        joined."""
        if num_bytes < 0:
            raise ValueError(f"num_bytes {num_bytes}: must be 0 or more")
        self.num_bytes = num_bytes
        self._specs = [_full(i, spec) for i, spec in enumerate(tensors)]
        self._boxes = [
            box
            for i, piece in enumerate(pieces)
            if (box := _check(i, piece, self._specs, num_bytes)) is not None
        ]
        self._overlap: dict[str, str | None] = {}
        self._tables: dict[torch.device, _Table] = {}

    def pack(self, tensors: Sequence[Tensor], bucket: Tensor) -> int:
        """Fill the bucket, a contiguous uint8 tensor of `num_bytes`, and return its checksum. On a
        GPU the call waits for the current stream."""
        return self._move(tensors, bucket, pack=True)

    def unpack(self, bucket: Tensor, tensors: Sequence[Tensor]) -> int:
        """Fill the tensors from the bucket; return the checksum of the bytes read. If this differs
        from the checksum that `pack` returned, the tensors' contents are invalid."""
        return self._move(tensors, bucket, pack=False)

    def _move(self, tensors: Sequence[Tensor], bucket: Tensor, pack: bool) -> int:
        _check_bucket(bucket)
        if bucket.numel() != self.num_bytes:
            raise ValueError(f"bucket: has {bucket.numel()} bytes, the plan needs {self.num_bytes}")
        if len(tensors) != len(self._specs):
            raise ValueError(f"tensors: got {len(tensors)}, the plan needs {len(self._specs)}")
        addresses = [
            _check_tensor(i, tensor, spec, bucket)
            for i, (tensor, spec) in enumerate(zip(tensors, self._specs, strict=True))
        ]
        self._check_overlap(pack)
        device = bucket.device
        ops = native.torch_ops("reshard", device.type)
        if ops is None:
            return _reference(self._boxes, tensors, bucket, pack)
        table = self._table(ops, device)
        total = torch.empty(1, dtype=torch.int64, device=device)
        ops.reshard_copy(
            table.pieces,
            table.num_tiles,
            table.addresses(addresses),
            bucket,
            total,
            pack,
            table.hash_after,
            table.pairs,
            native.stream(device),
        )
        return _finish(int(total), self.num_bytes)

    def _table(self, ops: Any, device: torch.device) -> "_Table":
        if device not in self._tables:
            self._tables[device] = _Table(
                ops, self._boxes, len(self._specs), self.num_bytes, device
            )
        return self._tables[device]

    def _check_overlap(self, pack: bool) -> None:
        """Raise ValueError if pieces overlap in memory that the copy writes; reads may overlap."""
        side = "pack" if pack else "unpack"
        if side not in self._overlap:
            self._overlap[side] = _bucket_overlap(self._boxes) if pack else _overlap(self._boxes)
        if why := self._overlap[side]:
            raise ValueError(f"pieces: {why}")


def checksum(bucket: Tensor) -> int:
    """Return the checksum of a contiguous uint8 tensor; see the module docstring."""
    _check_bucket(bucket)
    ops = native.torch_ops("reshard", bucket.device.type)
    if ops is None:
        return checksum_reference(bucket)
    total = torch.empty(1, dtype=torch.int64, device=bucket.device)
    ops.reshard_sum(bucket, total, native.stream(bucket.device))
    return _finish(int(total), bucket.numel())


def checksum_reference(bucket: Tensor) -> int:
    """Compute `checksum` in torch."""
    whole, rest = divmod(bucket.numel(), _WORD)
    total = 0
    if whole:
        head = bucket[: whole * _WORD]
        if head.storage_offset() % _WORD:
            head = head.clone()
        words = head.view(torch.int64)
        part = 1 << 20  # words per pass; limits temporary memory
        for first in range(0, whole, part):
            total += _sum_of(words[first : first + part], first)
    if rest:
        last = torch.zeros(_WORD, dtype=torch.uint8, device=bucket.device)
        last[:rest] = bucket[whole * _WORD :]
        total += _sum_of(last.view(torch.int64), whole)
    return _finish(total, bucket.numel())


def _sum_of(words: Tensor, first: int) -> int:
    """Return the sum of the checksum values of words, as int64; `first`: first word's position."""
    end = first + 1 + len(words)
    keys = torch.arange(first + 1, end, device=words.device) * _signed(_GOLDEN)
    y = words ^ keys
    y = y ^ _shifted(y, 29)
    y = y * (_shifted(keys, 32) | 1)
    return int((y ^ _shifted(y, 32)).sum())


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift int64 values to the right, filling with zeros as for unsigned integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _finish(total: int, num_bytes: int) -> int:
    """Add the checksum value of the number of bytes, computed as for a word at position -1."""
    y = num_bytes ^ num_bytes >> 29
    return (total + (y ^ y >> 32)) & _MASK


# ---- the reference


def _reference(boxes: Sequence[_Box], tensors: Sequence[Tensor], bucket: Tensor, pack: bool) -> int:
    """Pack or unpack in torch, piece by piece; return the checksum."""
    if bucket.storage_offset() % 16:  # torch's view(dtype) needs an aligned offset
        aligned = bucket.clone()
        said = _reference(boxes, tensors, aligned, pack)
        if pack:
            bucket.copy_(aligned)
        return said
    if pack:
        bucket.zero_()
    for box in boxes:
        there = _bucket_view(box, bucket)
        tensor = tensors[box.tensor].detach()
        here = tensor.as_strided(box.shape, box.tensor_strides, tensor.storage_offset() + box.start)
        to, source = (there, here) if pack else (here, there)
        if to.dtype == source.dtype:
            _as_bytes(to).copy_(_as_bytes(source))
        else:
            cast = source.to(torch.float32).to(to.dtype)
            to.copy_(cast.masked_fill_(cast.isnan(), math.nan))
    return checksum_reference(bucket)


def _bucket_view(box: _Box, bucket: Tensor) -> Tensor:
    span = _span(box.shape, box.strides) * box.dtype.itemsize
    flat = bucket[box.offset : box.offset + span]
    return flat.view(box.dtype).as_strided(
        box.shape, box.strides, flat.storage_offset() // box.dtype.itemsize
    )


def _as_bytes(x: Tensor) -> Tensor:
    """View the tensor as integers of the same size, because copies of floats may change NaNs."""
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(same[x.dtype.itemsize]) if x.dtype.itemsize in same else x


# ---- checks


def _full(number: int, spec: TensorSpec) -> _Spec:
    """Check a `TensorSpec` and fill in its strides."""
    if any(n < 0 for n in spec.shape):
        raise ValueError(f"tensors[{number}].shape {spec.shape}: sizes must be 0 or more")
    strides = _contiguous(spec.shape) if spec.strides is None else tuple(spec.strides)
    if len(strides) != len(spec.shape) or any(n < 0 for n in strides):
        raise ValueError(
            f"tensors[{number}].strides {strides}: must have {len(spec.shape)} entries, 0 or more"
        )
    span = _span(spec.shape, strides) * spec.dtype.itemsize
    return _Spec(tuple(spec.shape), spec.dtype, strides, span)


def _check(number: int, piece: TensorPiece, specs: Sequence[_Spec], num_bytes: int) -> _Box | None:
    """Check a `TensorPiece` and return its box; return None if the piece has no elements."""
    name = f"pieces[{number}]"
    if not 0 <= piece.tensor < len(specs):
        raise ValueError(f"{name}.tensor {piece.tensor}: the plan has only {len(specs)} tensors")
    spec = specs[piece.tensor]
    shape = tuple(piece.shape)
    if any(n < 0 for n in shape):
        raise ValueError(f"{name}.shape {shape}: sizes must be 0 or more")
    dtype = piece.dtype or spec.dtype
    if dtype != spec.dtype and not (dtype in _FLOATS and spec.dtype in _FLOATS):
        raise ValueError(
            f"{name}.dtype {dtype}: tensor {piece.tensor} is {spec.dtype}; casts must be between "
            "float64, float32, bfloat16 and float16"
        )
    if dtype.itemsize not in _RAW:
        raise ValueError(f"{name}.dtype {dtype}: elements must have 1, 2, 4, 8 or 16 bytes")
    strides = _contiguous(shape) if piece.strides is None else tuple(piece.strides)
    theirs = spec.strides if piece.tensor_strides is None else tuple(piece.tensor_strides)
    for field, value in (("strides", strides), ("tensor_strides", theirs)):
        if len(value) != len(shape) or any(n < 0 for n in value):
            raise ValueError(f"{name}.{field} {value}: must have {len(shape)} entries, 0 or more")
    if piece.offset < 0 or piece.offset % dtype.itemsize:
        raise ValueError(
            f"{name}.offset {piece.offset}: must be a multiple of {dtype.itemsize}, 0 or more"
        )
    if piece.start < 0:
        raise ValueError(f"{name}.start {piece.start}: must be 0 or more")
    if 0 in shape:
        return None
    end = piece.offset + _span(shape, strides) * dtype.itemsize
    if end > num_bytes:
        raise ValueError(f"{name}: ends at byte {end}, but the bucket has {num_bytes}")
    last, size = piece.start + _span(shape, theirs), _span(spec.shape, spec.strides)
    if last > size:
        raise ValueError(
            f"{name}: ends at element {last} of tensor {piece.tensor}, which has only {size}"
        )
    box = _Box(
        number, piece.tensor, shape, piece.offset, strides, dtype, piece.start, theirs, spec.dtype
    )
    dims = len(_joined(box))
    if dims > _DIMS:
        raise ValueError(
            f"{name}: {dims} dimensions cannot be merged, must be at most {_DIMS}; split it"
        )
    return box


def _check_bucket(bucket: Tensor) -> None:
    if bucket.dtype != torch.uint8 or bucket.dim() != 1 or not bucket.is_contiguous():
        raise ValueError(
            f"bucket: {bucket.dtype}, shape {list(bucket.shape)}, strides {bucket.stride()}; must "
            "be a contiguous uint8 tensor of one dimension"
        )
    _check_storage("bucket", bucket, bucket.numel())
    if bucket.device.type == "cuda" and bucket.data_ptr() % 16:
        raise ValueError("bucket: on a GPU its address must be a multiple of 16")


def _check_storage(name: str, tensor: Tensor, span: int) -> int:
    """Return the address of a tensor's memory. Raise ValueError if its storage has fewer than
    `span` bytes, for example after `untyped_storage().resize_`."""
    start = tensor.data_ptr()
    if not span:
        return start
    has = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
    if has < span or not start:
        raise ValueError(
            f"{name}: its storage has {max(has, 0) if start else 0} bytes from its first element "
            f"on, {span} are needed; was the storage resized?"
        )
    return start


def _check_tensor(number: int, tensor: Tensor, spec: _Spec, bucket: Tensor) -> int:
    """Return the address of a tensor's memory. Raise ValueError if its dtype, shape, strides or
    device differ from the plan's, it is a lazy view, its storage is too small, or its memory
    overlaps the bucket's."""
    if (
        tensor.dtype != spec.dtype
        or tensor.shape != spec.shape
        or tensor.device != bucket.device
        or (tensor.stride() != spec.strides and not _same_places(tensor, spec))
    ):
        raise ValueError(_mismatch(number, tensor, spec, bucket.device))
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"tensors[{number}]: is a lazy view (is_conj {tensor.is_conj()}, is_neg "
            f"{tensor.is_neg()}); pass resolve_conj().resolve_neg() of it"
        )
    start, first = _check_storage(f"tensors[{number}]", tensor, spec.span), bucket.data_ptr()
    if spec.span and start < first + bucket.nbytes and first < start + spec.span:
        raise ValueError(
            f"tensors[{number}]: its memory overlaps the bucket's; one of them must be a copy"
        )
    return start


def one_piece(tensor: Tensor) -> bool:
    """Return whether one piece can copy the whole tensor to contiguous memory. At most four
    dimensions may remain after adjacent dimensions are joined."""
    if tensor.dim() <= _DIMS:
        return True
    shape, item = tuple(tensor.shape), tensor.dtype
    there = _contiguous(shape)
    return len(_joined(_Box(0, 0, shape, 0, there, item, 0, tensor.stride(), item))) <= _DIMS


def _same_places(tensor: Tensor, spec: _Spec) -> bool:
    """Return whether tensor and spec have equal strides, ignoring dimensions of size 1."""
    pairs = zip(tensor.shape, tensor.stride(), spec.strides, strict=True)
    return tensor.numel() == 0 or all(a == b for n, a, b in pairs if n > 1)


def _mismatch(number: int, tensor: Tensor, spec: _Spec, device: torch.device) -> str:
    found = f"{tensor.dtype} {list(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
    want = f"{spec.dtype} {list(spec.shape)}, strides {spec.strides}, on {device}"
    return f"tensors[{number}]: {found}; the plan and the bucket want {want}"


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory a strided box spans, from its first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


# ---- overlap


def _runs(offset: int, shape: Sequence[int], strides: Sequence[int], item: int) -> Any:
    """Return start and end, in bytes, of each contiguous run of a box: [runs, 2] int64."""
    dims = sorted((step, n) for n, step in zip(shape, strides, strict=True) if n > 1)
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    count = math.prod(n for _, n in dims)
    if count > _MAX_RUNS:
        raise ValueError(f"pieces: one has {count} byte ranges; must be at most {_MAX_RUNS}")
    starts = np.array([offset], dtype=np.int64)
    for step, n in reversed(dims):
        starts = (starts[:, None] + np.arange(n, dtype=np.int64) * (step * item)).reshape(-1)
    return np.stack([starts, starts + length * item], 1)


def _bucket_runs(boxes: Sequence[_Box]) -> tuple[Any, Any]:
    """Return the contiguous runs of all pieces in the bucket, by start, and each run's piece."""
    runs = [_runs(b.offset, b.shape, b.strides, b.dtype.itemsize) for b in boxes]
    return _sorted(runs, [b.number for b in boxes])


def _sorted(runs: list[Any], numbers: list[int]) -> tuple[Any, Any]:
    if not runs:
        return np.zeros((0, 2), dtype=np.int64), np.zeros(0, dtype=np.int64)
    owner = np.repeat(np.array(numbers), [len(r) for r in runs])
    every = np.concatenate(runs)
    order = np.argsort(every[:, 0], kind="stable")
    return every[order], owner[order]


def _bucket_overlap(boxes: Sequence[_Box]) -> str:
    runs, owner = _bucket_runs(boxes)
    return _first_overlap(runs, owner, "the bucket")


def _overlap(boxes: Sequence[_Box]) -> str:
    """Describe pieces that write to the same bytes of a tensor; "" if there are none."""
    parts: dict[int, list[_Box]] = {}
    for box in boxes:
        parts.setdefault(box.tensor, []).append(box)
    for tensor, some in parts.items():
        runs = [
            _runs(b.start * b.tensor_dtype.itemsize, b.shape, b.tensor_strides, n)
            for b in some
            for n in [b.tensor_dtype.itemsize]
        ]
        why = _first_overlap(*_sorted(runs, [b.number for b in some]), f"tensor {tensor}")
        if why:
            return why
    return ""


def _first_overlap(runs: Any, owner: Any, where: str) -> str:
    bad = np.flatnonzero(runs[1:, 0] < runs[:-1, 1])
    if not len(bad):
        return ""
    a, b = sorted((int(owner[bad[0]]), int(owner[bad[0] + 1])))
    at = int(runs[bad[0] + 1, 0])
    if a == b:
        return f"{a} writes twice to byte {at} of {where}"
    return f"{a} and {b} both write to byte {at} of {where}"


# ---- the table of the native op


def _joined(box: _Box) -> list[tuple[int, int, int]]:
    """Return (size, bucket stride, tensor stride) of each dimension of a box, strides in bytes, by
    descending bucket stride. Dimensions that are adjacent in bucket and tensor are joined."""
    ours, theirs = box.dtype.itemsize, box.tensor_dtype.itemsize
    zipped = zip(box.shape, box.strides, box.tensor_strides, strict=True)
    dims = sorted(((n, a * ours, b * theirs) for n, a, b in zipped if n > 1), key=_by_stride)
    out: list[tuple[int, int, int]] = []
    for n, a, b in dims:
        if out and out[-1][1] == n * a and out[-1][2] == n * b:
            out[-1] = (out[-1][0] * n, a, b)
        else:
            out.append((n, a, b))
    return out


def _by_stride(dim: tuple[int, int, int]) -> tuple[int, int]:
    return -dim[1], -dim[2]


class _Table:
    """Table of pieces for the native op, on a device, in the format of csrc/reshard/plan.h."""

    def __init__(
        self,
        ops: Any,
        boxes: Sequence[_Box],
        num_tensors: int,
        num_bytes: int,
        device: torch.device,
    ):
        gaps = _gaps(boxes, num_bytes)
        self.hash_after = gaps is None
        rows = [_row(box) for box in boxes]
        if gaps is not None:
            pads, holes = gaps
            for row, pad in zip(rows, pads, strict=True):
                row[19], row[20] = 1, pad
            rows += [_hole(start, end) for start, end in holes]
        rows.sort(key=lambda row: row[12])
        self.num_tiles = 0
        for row in rows:
            row[21] = self.num_tiles
            down, across = -(-row[2] // row[17]), -(-row[3] // row[18])
            self.num_tiles += row[0] * row[1] * down * across
        pieces = torch.tensor(rows, dtype=torch.int64).view(-1, _FIELDS)
        self.pairs = ops.reshard_check(pieces, self.num_tiles, num_tensors, num_bytes)
        self.pieces = pieces.to(device)
        self._device = device
        self._known: list[int] = []
        self._addresses = torch.zeros(0, dtype=torch.int64)

    def addresses(self, now: list[int]) -> Tensor:
        """Return the addresses as a tensor on the device. Upload them only if they changed."""
        if now != self._known or not now:
            self._addresses = torch.tensor(now, dtype=torch.int64, device=self._device)
            self._known = now
        return self._addresses


def _row(box: _Box) -> list[int]:
    dims = _joined(box)
    item, theirs = box.dtype.itemsize, box.tensor_dtype.itemsize
    columns = dims.pop() if dims else (1, item, theirs)
    turned = [dim for dim in dims if dim[2] == theirs and columns[2] != theirs]
    rows = turned[0] if turned else max(dims, default=(1, 0, 0))
    if dims:
        dims.remove(rows)
    if turned:
        side = 128 if max(item, theirs) <= 2 else 64
        down, across = min(rows[0], side), min(columns[0], side)
    else:
        across = min(columns[0], _TILE_BYTES // item)
        down = min(rows[0], max(1, _TILE_BYTES // item // across))
    order = [(1, 0, 0)] * (2 - len(dims)) + dims + [rows, columns]
    sizes, bucket, tensor = zip(*order, strict=True)
    same = _RAW[item] if box.dtype == box.tensor_dtype else None
    types = [_FLOATS.get(t, 0) if same is None else same for t in (box.dtype, box.tensor_dtype)]
    start = box.start * theirs
    return [
        *(*sizes, *bucket, *tensor, box.offset, start, box.tensor, *types, down, across, 0, 0, 0)
    ]


def _hole(start: int, end: int) -> list[int]:
    """Return the table row of a byte range outside all pieces, which `pack` fills with zeros."""
    sizes, strides = (1, 1, 1, end - start), (0, 0, 0, 1)
    return [*(*sizes, *strides, *strides, start, 0, _GAP, 0, 0, 1, _TILE_BYTES, 1, 0, 0)]


def _gaps(boxes: Sequence[_Box], num_bytes: int) -> tuple[list[int], Any] | None:
    """Return how many padding bytes follow each piece up to the next word, and all other byte
    ranges outside pieces, [gaps, 2]. Return None if the checksum needs a separate pass, for example
    because two pieces share a word."""
    runs, _ = _bucket_runs(boxes)
    if len(runs) and (runs[1:, 0] < runs[:-1, 1]).any():  # only unpack allows overlaps
        return None
    pads = []
    for box in boxes:
        dims = [(n, a) for n, a, _ in _joined(box)] or [(1, box.dtype.itemsize)]
        end = box.offset + _span(box.shape, box.strides) * box.dtype.itemsize
        one_run = len(dims) == 1 and dims[0][1] == box.dtype.itemsize
        if box.offset % _WORD or not (one_run or _word_rows(dims, box.dtype.itemsize)):
            return None
        pads.append(min(-end % _WORD, num_bytes - end))
    ends = np.minimum(-(-runs[:, 1] // _WORD) * _WORD, num_bytes)  # run ends rounded up to words
    holes = np.stack([np.append(0, ends), np.append(runs[:, 0], num_bytes)], 1)
    if (holes[:, 0] > holes[:, 1]).any():
        return None  # a piece starts in the word in which another piece ends
    holes = holes[holes[:, 0] < holes[:, 1]]
    return None if len(holes) > _FEW + len(boxes) else (pads, holes.tolist())


def _word_rows(dims: Sequence[tuple[int, int]], item: int) -> bool:
    """Return whether a box's rows are contiguous and start and end on 8-byte word boundaries."""
    *outer, (columns, step) = dims
    return step == item and columns * item % _WORD == 0 and all(a % _WORD == 0 for _, a in outer)
