"""Buckets, the form in which weights travel: named tensors in one flat buffer. Here is how they are
read and how processes of one machine share them; `sync/pack.py` makes them.

Tensors start at multiples of `ALIGN` bytes, so that a receiver on any device can view them in
place.

Own code instead of `multiprocessing.shared_memory`: a memfd goes with its process.
"""

import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from rlcore.records import Bucket

ALIGN = 16


def as_tensor(bucket: Bucket, buffer: Tensor | bytes | memoryview | mmap.mmap) -> Tensor:
    """The bytes of a bucket, uint8 [num_bytes], that share memory with `buffer` (with a copy of it
    where it is read-only). ValueError when the buffer is shorter than the bucket says."""
    if isinstance(buffer, Tensor):
        if len(buffer) < bucket.num_bytes:
            raise ValueError(f"bucket of {bucket.num_bytes} bytes: only {len(buffer)} came")
        return buffer[: bucket.num_bytes]
    view = memoryview(buffer)
    if view.nbytes < bucket.num_bytes:
        raise ValueError(f"bucket of {bucket.num_bytes} bytes: only {view.nbytes} came")
    if bucket.num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if view.readonly:
        view = memoryview(bytearray(view[: bucket.num_bytes]))
    return torch.frombuffer(view, dtype=torch.uint8, count=bucket.num_bytes)


def unpack(
    bucket: Bucket, buffer: Tensor | bytes | memoryview | mmap.mmap
) -> Iterator[tuple[str, Tensor]]:
    """Tensors that share memory with `buffer` as `as_tensor` does. ValueError when the buffer is
    shorter than the bucket says or a tensor lies outside."""
    flat = buffer if isinstance(buffer, Tensor) else as_tensor(bucket, buffer)
    for meta in bucket.tensors:
        dtype = getattr(torch, meta.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"tensor {meta.name}: dtype {meta.dtype!r} is not torch's")
        count = 1
        for size in meta.shape:
            count *= size
        end = meta.offset + count * dtype.itemsize
        if meta.offset < 0 or end > bucket.num_bytes or end > len(flat):
            raise ValueError(f"tensor {meta.name}: lies outside its bucket")
        if count == 0:
            yield meta.name, torch.empty(meta.shape, dtype=dtype)
            continue
        yield meta.name, flat[meta.offset : end].view(dtype).view(meta.shape)


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


def open_payload(bucket: Bucket, payload: bytes | memoryview) -> Tensor | memoryview | mmap.mmap:
    """What a payload holds: the bytes themselves, the mapped shared-memory file that it names, or
    the memory of a GPU of which it is the handle. The map is private: writing to it does not reach
    the file. A GPU's memory is the sender's own: let go of it before the call that brought the
    payload returns."""
    if bucket.transport == "bytes":
        return memoryview(payload)
    if bucket.transport == "cuda_ipc":
        return open_cuda(bytes(payload))
    path = bytes(payload).decode()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < bucket.num_bytes:
            raise ValueError(f"bucket of {bucket.num_bytes} bytes: {path} has only {size}")
        if size == 0:
            return memoryview(bytearray())
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class SharedRoom:
    """Memory that processes of this machine map by its path, for one bucket after another: what is
    packed into it is not copied again. As `shared`, it has no name in a file system. Its pages are
    the system's to make at their first use, which costs several times the copy: keep a room."""

    def __init__(self) -> None:
        self._handle = os.memfd_create("rlcore-room", os.MFD_CLOEXEC)
        self._closer = weakref.finalize(self, os.close, self._handle)
        self._tensor = torch.empty(0, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """The payload of a bucket with transport `shm`."""
        return f"/proc/{os.getpid()}/fd/{self._handle}"

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]; what was there before is void."""
        if len(self._tensor) < num_bytes:
            os.ftruncate(self._handle, num_bytes)
            self._tensor = torch.frombuffer(mmap.mmap(self._handle, num_bytes), dtype=torch.uint8)
        return self._tensor[:num_bytes]

    def close(self) -> None:
        """Give the memory back, once nobody maps it; so does the end of the object."""
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._closer()

    @property
    def num_bytes(self) -> int:
        """Held."""
        return len(self._tensor)


class _CudaHandle(msgspec.Struct, frozen=True, array_like=True):
    """What torch tells about memory of a GPU that another process opens, and which GPU it is:
    device numbers differ where processes see different devices."""

    gpu: str
    handle: bytes
    num_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    must_wait: bool


def cuda_handle(buffer: Tensor) -> bytes:
    """The payload of a bucket with transport `cuda_ipc`. `buffer` has storage of its own, made for
    this bucket: torch counts its readers until it is freed, and keeps it until they are gone."""
    storage = buffer.untyped_storage()
    if buffer.storage_offset() or storage.nbytes() != buffer.nbytes:
        raise ValueError("a bucket that is shared by its handle needs a storage of its own")
    device, handle, size, offset, counter, at, event, wait = storage._share_cuda_()
    made = _CudaHandle(_uuid(device), handle, size, offset, counter, at, event, wait)
    return msgspec.msgpack.encode(made)


def open_cuda(payload: bytes) -> Tensor:
    """uint8, the memory of another process. ValueError where this process does not see its GPU."""
    try:
        made = msgspec.msgpack.decode(payload, type=_CudaHandle)
    except msgspec.MsgspecError as error:
        raise ValueError(f"payload of transport cuda_ipc: {error}") from error
    seen = [_uuid(i) for i in range(torch.cuda.device_count())]
    if made.gpu not in seen:
        raise ValueError(
            f"bucket in the memory of GPU {made.gpu}: this process sees {', '.join(seen) or 'none'}"
        )
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(
        seen.index(made.gpu),
        made.handle,
        made.num_bytes,
        made.offset,
        made.counter,
        made.counter_offset,
        made.event,
        made.must_wait,
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
