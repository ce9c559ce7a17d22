"""Named tensors packed into flat buffers and back: the form in which weights travel.

Tensors start at multiples of 16 bytes, so that a receiver on any device can view them in place.
"""

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rlcore.protocols import Engine
from rlcore.records import Bucket, TensorMeta

_ALIGN = 16


def pack(
    tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> Iterator[tuple[Bucket, memoryview]]:
    """Buckets of at most `max_bytes` (a larger tensor gets a bucket of its own), in order. At most
    one bucket and one tensor are in memory at a time; a view stays valid as long as it is held."""
    if max_bytes < 1:
        raise ValueError(f"max_bytes {max_bytes}: a bucket holds at least one byte")
    metas: list[TensorMeta] = []
    flats: list[Tensor] = []
    end = 0
    for name, tensor in tensors:
        start = -end % _ALIGN + end
        num_bytes = tensor.numel() * tensor.element_size()
        if metas and start + num_bytes > max_bytes:
            yield _fill(metas, flats, end)
            metas, flats, start = [], [], 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        metas.append(TensorMeta(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=start))
        flats.append(tensor.detach().reshape(-1))
        end = start + num_bytes
    if metas:
        yield _fill(metas, flats, end)


def _fill(metas: list[TensorMeta], flats: list[Tensor], end: int) -> tuple[Bucket, memoryview]:
    buffer = torch.zeros(end, dtype=torch.uint8)
    for meta, flat in zip(metas, flats, strict=True):
        if flat.numel():
            part = buffer[meta.offset : meta.offset + flat.numel() * flat.element_size()]
            part.view(flat.dtype).copy_(flat)
    return Bucket(tensors=tuple(metas), num_bytes=end), memoryview(buffer.numpy())


def unpack(bucket: Bucket, buffer: bytes | memoryview | mmap.mmap) -> Iterator[tuple[str, Tensor]]:
    """Tensors that share memory with `buffer` (with a copy of it where it is read-only). ValueError
    when the buffer is shorter than the bucket says or a tensor lies outside."""
    view = memoryview(buffer)
    if view.nbytes < bucket.num_bytes:
        raise ValueError(f"bucket of {bucket.num_bytes} bytes: only {view.nbytes} came")
    if view.readonly:
        view = memoryview(bytearray(view))
    for meta in bucket.tensors:
        dtype = getattr(torch, meta.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"tensor {meta.name}: dtype {meta.dtype!r} is not torch's")
        count = 1
        for size in meta.shape:
            count *= size
        if meta.offset < 0 or meta.offset + count * dtype.itemsize > bucket.num_bytes:
            raise ValueError(f"tensor {meta.name}: lies outside its bucket")
        if count == 0:
            yield meta.name, torch.empty(meta.shape, dtype=dtype)
            continue
        flat = torch.frombuffer(view, dtype=dtype, count=count, offset=meta.offset)
        yield meta.name, flat.view(meta.shape)


@contextmanager
def shared(buffer: bytes | memoryview) -> Iterator[str]:
    """A payload in memory that processes of this machine open by the path, the payload of a bucket
    with transport `shm`. It is there for the length of the block. It has no name in a file system:
    it goes with this process, however that ends, and the size of /dev/shm is no limit."""
    handle = os.memfd_create("rlcore-bucket", os.MFD_CLOEXEC)
    try:
        with os.fdopen(handle, "wb", closefd=False) as file:
            file.write(buffer)
        yield f"/proc/{os.getpid()}/fd/{handle}"
    finally:
        os.close(handle)


def open_payload(bucket: Bucket, payload: bytes) -> memoryview | mmap.mmap:
    """What a payload holds: the bytes themselves, or the mapped shared-memory file that it names.
    The map is private: writing to it does not reach the file."""
    if bucket.transport == "bytes":
        return memoryview(payload)
    path = payload.decode()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < bucket.num_bytes:
            raise ValueError(f"bucket of {bucket.num_bytes} bytes: {path} has only {size}")
        if size == 0:
            return memoryview(bytearray())
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def push(
    engine: Engine,
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
    max_bytes: int = 256 * 2**20,
) -> int:
    """Give an engine of tensor-parallel size 1 all its weights; returns the bytes that it took."""
    total = 0
    engine.begin_load(version)
    for bucket, buffer in pack(tensors, max_bytes):
        engine.load_bucket(bucket, [buffer])
        total += bucket.num_bytes
    engine.end_load()
    return total
