"""Read buckets, and share buckets between processes of one machine. A bucket holds named weights in
one flat buffer, for weight updates; `sync/pack.py` makes buckets.

Tensors start at multiples of `ALIGN` bytes, so that a receiver on any device can view each tensor
in place.

Own code instead of `multiprocessing.shared_memory`: a memfd is freed when its process exits.
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
    """Return the bytes of a bucket, uint8 [num_bytes], as a view of `buffer`, or of a copy if
    `buffer` is read-only. Raise ValueError if the buffer is shorter than the bucket."""
    if isinstance(buffer, Tensor):
        if len(buffer) < bucket.num_bytes:
            raise ValueError(
                f"bucket of {bucket.num_bytes} bytes: the buffer has only {len(buffer)} bytes"
            )
        return buffer[: bucket.num_bytes]
    view = memoryview(buffer)
    if view.nbytes < bucket.num_bytes:
        raise ValueError(
            f"bucket of {bucket.num_bytes} bytes: the buffer has only {view.nbytes} bytes"
        )
    if bucket.num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if view.readonly:
        view = memoryview(bytearray(view[: bucket.num_bytes]))
    return torch.frombuffer(view, dtype=torch.uint8, count=bucket.num_bytes)


def unpack(
    bucket: Bucket, buffer: Tensor | bytes | memoryview | mmap.mmap
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each tensor of a bucket, as views of the result of `as_tensor`.
    Raise ValueError if the buffer is too short or a tensor exceeds the bucket."""
    flat = buffer if isinstance(buffer, Tensor) else as_tensor(bucket, buffer)
    for meta in bucket.tensors:
        dtype = getattr(torch, meta.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"tensor {meta.name}: dtype {meta.dtype!r} is not a torch dtype")
        count = 1
        for size in meta.shape:
            count *= size
        end = meta.offset + count * dtype.itemsize
        if meta.offset < 0 or end > bucket.num_bytes or end > len(flat):
            raise ValueError(f"tensor {meta.name}: must end within its bucket")
        if count == 0:
            yield meta.name, torch.empty(meta.shape, dtype=dtype)
            continue
        yield meta.name, flat[meta.offset : end].view(dtype).view(meta.shape)


@contextmanager
def shared(buffer: bytes | memoryview) -> Iterator[str]:
    """Share `buffer` with processes of this machine during the block. Yield a path for the other
    processes to open: the payload of a bucket with transport `shm`. The memory is in no file
    system, so it is freed when this process exits and not limited by the size of /dev/shm."""
    handle = os.memfd_create("rlcore-bucket", os.MFD_CLOEXEC)
    try:
        with os.fdopen(handle, "wb", closefd=False) as file:
            file.write(buffer)
        yield f"/proc/{os.getpid()}/fd/{handle}"
    finally:
        os.close(handle)


def open_payload(bucket: Bucket, payload: bytes | memoryview) -> Tensor | memoryview | mmap.mmap:
    """Return the memory behind a payload: the payload itself, the shared-memory file at its path,
    or the GPU memory of its CUDA handle. Writes to a mapped file stay in this process. GPU memory
    belongs to the sender: release the tensor before the call that delivered the payload returns."""
    if bucket.transport == "bytes":
        return memoryview(payload)
    if bucket.transport == "cuda_ipc":
        return open_cuda(bytes(payload))
    path = bytes(payload).decode()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < bucket.num_bytes:
            raise ValueError(f"bucket of {bucket.num_bytes} bytes: {path} has only {size} bytes")
        if size == 0:
            return memoryview(bytearray())
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class SharedRoom:
    """Reusable buffer that processes of this machine map by path, so that a bucket packed into the
    buffer is not copied again. The buffer is in no file system. Reuse saves time: allocating pages
    at first use takes several times as long as the copy."""

    def __init__(self) -> None:
        self._handle = os.memfd_create("rlcore-room", os.MFD_CLOEXEC)
        self._closer = weakref.finalize(self, os.close, self._handle)
        self._tensor = torch.empty(0, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """Path of the buffer: the payload of a bucket with transport `shm`."""
        return f"/proc/{os.getpid()}/fd/{self._handle}"

    def take(self, num_bytes: int) -> Tensor:
        """Return the buffer as uint8 [num_bytes]; its earlier contents become invalid."""
        if len(self._tensor) < num_bytes:
            os.ftruncate(self._handle, num_bytes)
            self._tensor = torch.frombuffer(mmap.mmap(self._handle, num_bytes), dtype=torch.uint8)
        return self._tensor[:num_bytes]

    def close(self) -> None:
        """Free the memory once no process maps it; deleting this object does the same."""
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._closer()

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return len(self._tensor)


class _CudaHandle(msgspec.Struct, frozen=True, array_like=True):
    """Data with which torch opens GPU memory in another process. The GPU is named by its UUID,
    because device numbers differ between processes that see different devices."""

    gpu: str
    handle: bytes
    num_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    must_wait: bool


def cuda_handle(buffer: Tensor) -> bytes:
    """Return the payload of a bucket with transport `cuda_ipc`. `buffer` needs a separate storage,
    made for this bucket, because torch counts readers per storage and keeps the storage until all
    readers have released it."""
    storage = buffer.untyped_storage()
    if buffer.storage_offset() or storage.nbytes() != buffer.nbytes:
        raise ValueError("a bucket shared by its CUDA handle must have its own storage")
    device, handle, size, offset, counter, at, event, wait = storage._share_cuda_()
    made = _CudaHandle(_uuid(device), handle, size, offset, counter, at, event, wait)
    return msgspec.msgpack.encode(made)


def drop_cuda(payload: bytes) -> None:
    """Count a payload of `cuda_handle` as read. Call it if no process will open the payload; torch
    would keep its memory for ever."""
    made = msgspec.msgpack.decode(payload, type=_CudaHandle)
    torch.UntypedStorage._release_ipc_counter_cuda(made.counter, made.counter_offset)


def open_cuda(payload: bytes) -> Tensor:
    """Open the GPU memory of another process as uint8. Raise ValueError if this process does not
    see that GPU."""
    try:
        made = msgspec.msgpack.decode(payload, type=_CudaHandle)
    except msgspec.MsgspecError as error:
        raise ValueError(f"payload of transport cuda_ipc: {error}") from error
    seen = [_uuid(i) for i in range(torch.cuda.device_count())]
    if made.gpu not in seen:
        raise ValueError(
            f"bucket in the memory of GPU {made.gpu}, but this process sees "
            f"{', '.join(seen) or 'none'}"
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
