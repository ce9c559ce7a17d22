"""The Python side of the pretend device: what `torch._C` of a CUDA build of torch has.

torch's own `torch.cuda` runs on top of them. `site/sitecustomize.py` calls `load` before torch is
imported, `add_functions` once `torch._C` is there, and `complete` after torch.
"""

import ctypes
import importlib.util
import os
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.pretend import library

CONTEXT_BYTES = 500_000_000
"""What the driver and its kernels take of a device."""

_native: Any = None
_started_in = 0
"""Process that initialised CUDA; 0: none. A fork of it must not use CUDA."""


def stats() -> dict[str, int]:
    """Return bytes that are allocated, reserved and pinned, now and at most; launches, host syncs
    and bytes copied each way so far; and copies under way."""
    return dict(_native.stats())


def reset_peak() -> None:
    """Begin the peaks of `stats` anew."""
    _native.reset_peak()


def load() -> None:
    """Register the device, before torch asks for one."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library()))


def add_functions(core: ModuleType) -> None:
    """Add to `torch._C` what a CUDA build has."""
    global _native
    spec = importlib.util.spec_from_file_location("device", library())
    assert spec is not None and spec.loader is not None
    _native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_native)
    made = _streams(core) | _functions()
    for name, value in made.items():
        setattr(core, name, value)


def complete() -> None:
    """Add what needs the whole of torch: storages, NCCL and flash attention."""
    import torch

    assert _native.is_used_by_torch(), "torch asked for CUDA before the pretend device was there"
    torch.UntypedStorage.resize_ = _resize(torch.UntypedStorage.resize_)
    torch.UntypedStorage._share_cuda_ = _share
    torch.UntypedStorage._new_shared_cuda = _open_shared
    torch.UntypedStorage._release_ipc_counter_cuda = staticmethod(_release)
    _add_nccl()
    _add_attention()
    _add_norm()


# ---- torch._C


def _streams(core: ModuleType) -> dict[str, Any]:
    """Return the bases of `torch.cuda.Stream` and `Event`: torch's own for any accelerator."""
    stream, event, device = (getattr(core, name) for name in ("Stream", "Event", "device"))

    class _CudaStreamBase(stream):  # type: ignore[misc,valid-type]
        def __new__(cls, priority: int = 0, **place: Any) -> Any:
            if "stream_id" in place:
                return super().__new__(cls, **place)
            return super().__new__(cls, device("cuda", _native.get_device()), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class _CudaEventBase(event):  # type: ignore[misc,valid-type]
        def __new__(cls, *, interprocess: bool = False, external: bool = False, **kind: Any) -> Any:
            if interprocess or external:
                raise NotImplementedError("pretend CUDA: no interprocess or external events")
            return super().__new__(cls, device("cuda"), **kind)

        def record(self, stream: Any) -> None:
            self.at = time.perf_counter()
            super().record(stream)

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at) * 1e3

        @property
        def cuda_event(self) -> int:
            return self.event_id

    return {
        "_CudaStreamBase": _CudaStreamBase,
        "_CudaEventBase": _CudaEventBase,
        "_CUDAGraph": _NoGraph,
        "_graph_pool_handle": _NoGraph,
    }


class _NoGraph:
    def __new__(cls, *_: Any) -> Any:
        raise NotImplementedError("pretend CUDA: no CUDA graphs")


def _functions() -> dict[str, Any]:
    total = _native.device_bytes()
    cudart = SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaMemGetInfo=lambda _: (total - CONTEXT_BYTES - stats()["reserved"], total),
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
    )
    nvtx = SimpleNamespace(rangePushA=lambda _: 0, rangePop=lambda: 0, markA=lambda _: None)

    def stream(device: int, number: int) -> tuple[int, int, int]:
        return number, _native.get_device() if device < 0 else device, 1

    return {
        "_has_cuda": True,
        "_cudart": cudart,
        "_nvtx": nvtx,
        "_cuda_init": _start,
        "_cuda_isInBadFork": lambda: _started_in not in (0, os.getpid()),
        "_cuda_getDeviceCount": _native.device_count,
        "_cuda_getDevice": _native.get_device,
        "_cuda_setDevice": _native.set_device,
        "_cuda_exchangeDevice": _exchange,
        "_cuda_maybeExchangeDevice": _exchange,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_synchronize": _native.synchronize,
        "_cuda_ipc_collect": _native.collect_shared,
        "_cuda_emptyCache": _native.empty_cache,
        "_cuda_memoryStats": lambda _: _memory_stats(),
        "_cuda_resetPeakMemoryStats": lambda _: reset_peak(),
        "_cuda_getCurrentStream": lambda device: stream(device, _native.get_stream()),
        "_cuda_getDefaultStream": lambda device: stream(device, 0),
        "_cuda_setStream": lambda stream_id, device_index, device_type: _native.set_stream(
            stream_id
        ),
        "_cuda_getCurrentRawStream": lambda _: _native.get_stream(),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_sleep": lambda _: None,
    }


def _start() -> None:
    """Initialise CUDA in this process, as torch's `_cuda_init`."""
    global _started_in
    import torch

    if not _native.device_count():
        raise RuntimeError("No CUDA GPUs are available")
    _started_in = os.getpid()
    properties = SimpleNamespace(
        name="Pretend H100",
        major=9,
        minor=0,
        total_memory=_native.device_bytes(),
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 * 2**20,
        warp_size=32,
        is_integrated=0,
    )

    def properties_of(device: int) -> SimpleNamespace:
        return SimpleNamespace(**vars(properties), uuid=f"pretend-{device}")

    torch.cuda._get_device_properties = properties_of
    torch.cuda.default_generators = tuple(
        map(_native.default_generator, range(_native.device_count()))
    )


def _exchange(device: int) -> int:
    before = _native.get_device()
    if device >= 0:
        _native.set_device(device)
    return int(before)


def _memory_stats() -> dict[str, Any]:
    found = stats()

    def figures(now: str, peak: str) -> dict[str, Any]:
        return {"all": {"current": found[now], "peak": found[peak]}}

    return {
        "allocated_bytes": figures("allocated", "peak"),
        "reserved_bytes": figures("reserved", "reserved_peak"),
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


# ---- storages


def _resize(plain: Any) -> Any:
    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return plain(self, size)
        _native.resize_storage(_bytes(self), size)
        return self

    return resize_


def _bytes(storage: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _share(self: Any) -> tuple[Any, ...]:
    """Return what torch's `_share_cuda_` returns; the handle is the path of a file in memory."""
    path, index = _native.share(_bytes(self)), self.device.index
    counter = f"{_uuid(index)} {path}".encode()
    return index, path.encode(), self.nbytes(), _OFFSET, counter, 0, b"event", True


def _open_shared(
    device: int, handle: bytes, size: int, offset: int, counter: bytes, *_: Any
) -> Any:
    if offset != _OFFSET or counter != f"{_uuid(device)} {handle.decode()}".encode():
        raise RuntimeError("CUDA error: invalid resource handle: of another place or device")
    before = _exchange(device)
    try:
        return _native.open_shared(handle.decode(), size).untyped_storage()
    finally:
        _native.set_device(before)


def _release(counter: bytes, at: int) -> None:
    assert at == 0, at
    _native.open_shared(counter.decode().split(" ")[1], 0)  # and closed at once: one reader less


_OFFSET = 512
"""Bytes at which a shared storage begins in its allocation, as a handle says it."""


def _uuid(device: int) -> Any:
    import torch

    return torch.cuda.get_device_properties(device).uuid


# ---- NCCL


class _Options:
    """The options of NCCL that torch and Megatron set."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()
        self._timeout = timedelta(minutes=10)


def _add_nccl() -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    _native.add_nccl(_native)
    _native.ProcessGroupNCCL.Options = _Options
    for module in (dist, distributed_c10d):
        module.ProcessGroupNCCL = _native.ProcessGroupNCCL  # type: ignore[misc]
    distributed_c10d._NCCL_AVAILABLE = True


# ---- flash attention of packed sequences, by torch's kernel for the CPU


def _add_attention() -> None:
    import torch

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def parts(q: Any, k: Any, cu_q: Any, cu_k: Any, causal: bool, right: int | None) -> Any:
        """Yield the rows of each sequence in q and k, and its mask, aligned to the last key."""
        for t in (q, k, cu_q, cu_k):
            assert t.is_cuda, "flash attention: a CPU tensor"
        assert q.dtype in (torch.float16, torch.bfloat16) and cu_q.dtype is torch.int32
        bounds = [cu.cpu().tolist() for cu in (cu_q, cu_k)]
        for a, b, c, d in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
            if b > a:
                seen = torch.ones(b - a, d - c, dtype=torch.bool)
                mask = seen.tril(d - c - (b - a)) if causal or right == 0 else seen
                bias = torch.zeros(b - a, d - c).masked_fill(~mask, float("-inf"))
                yield slice(a, b), slice(c, d), bias.to(q.dtype)

    def heads(t: Any, rows: slice, groups: int = 1) -> Any:
        """[rows, heads, dim] of the device to [1, heads * groups, rows, dim] of the CPU."""
        return t[rows].cpu().transpose(0, 1)[None].repeat_interleave(groups, 1)

    def attend(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any, dropout: float,
        causal: bool, *_: Any, scale: float | None = None, window_size_right: int | None = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        out, lse = torch.empty_like(q), torch.empty(q.size(1), q.size(0), device=q.device)
        groups = q.size(1) // k.size(1)
        nothing = torch.empty(0, dtype=torch.int64, device=q.device)
        if not _native.is_hollow(q):
            for rows, keys, mask in parts(q, k, cu_q, cu_k, causal, window_size_right):
                there = heads(q, rows), heads(k, keys, groups), heads(v, keys, groups)
                o, s = forward(*there, attn_mask=mask, scale=scale)
                out[rows], lse[:, rows] = o[0].transpose(0, 1).to(q.device), s[0].to(q.device)
        return out, lse, nothing, nothing, nothing

    def differentiate(
        grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_q: Any, cu_k: Any, max_q: Any,
        max_k: Any, dropout: float, causal: bool, *_: Any, scale: float | None = None,
        window_size_right: int | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        found = [torch.empty_like(t) for t in (q, k, v)]
        groups = q.size(1) // k.size(1)
        if _native.is_hollow(q):
            return tuple(found)
        for t in found:
            t.zero_()
        for rows, keys, mask in parts(q, k, cu_q, cu_k, causal, window_size_right):
            there = heads(q, rows), heads(k, keys, groups), heads(v, keys, groups)
            mine = heads(grad, rows), *there, heads(out, rows), lse[:, rows].cpu()[None]
            made = backward(*mine, 0.0, False, attn_mask=mask, scale=scale)
            for total, part, place in zip(found, made, (rows, keys, keys), strict=True):
                part = part[0].unflatten(0, (total.size(1), -1)).float().sum(1)
                total[place] = part.transpose(0, 1).to(q.device, q.dtype)
        return tuple(found)

    global _attention
    _attention = torch.library.Library("aten", "IMPL")
    _attention.impl("_flash_attention_forward", attend, "CUDA")
    _attention.impl("_flash_attention_backward", differentiate, "CUDA")


_attention: Any = None


def _add_norm() -> None:
    """Add the fused RMSNorm of CUDA, which keeps its input and one factor per row; without it torch
    would take the CPU's, which keeps float32 copies."""
    import torch

    def norm(x: Any, shape: Any, weight: Any, eps: float | None) -> Any:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rate = (wide.square().mean(-1, keepdim=True) + (eps or 1e-6)).rsqrt()
        out = (wide * rate).to(x.dtype)
        return (out if weight is None else out * weight), rate

    def differentiate(grad: Any, x: Any, shape: Any, rate: Any, weight: Any, wanted: Any) -> Any:
        if _native.is_hollow(x):
            return torch.empty_like(x), torch.empty_like(weight)
        wide = rate.dtype
        unit = x.to(wide) * rate
        inner = grad.to(wide) * weight.to(wide)
        dx = rate * (inner - unit * (inner * unit).mean(-1, keepdim=True))
        dweight = (grad.to(wide) * unit).flatten(0, -2).sum(0)
        return dx.to(x.dtype), dweight.to(weight.dtype)

    global _norm
    _norm = torch.library.Library("aten", "IMPL")
    _norm.impl("_fused_rms_norm", norm, "CUDA")
    _norm.impl("_fused_rms_norm_backward", differentiate, "CUDA")


_norm: Any = None
