"""Give this process the pretend CUDA device, if RLCORE_PRETEND_CUDA asks for it.

Python imports this file at its start. Nothing happens before torch is imported.
"""

import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_TRITON = "sglang.kernels.ops.memory.small_copy"
"""SGLang takes another path if this Triton kernel refuses."""

_NATIVE = "rlcore.ops.native"
"""With RLCORE_PRETEND_NATIVE its kernels of the CPU count as the device's, as with the plugin
tests.pretend.native, but in child processes, too."""

_ATTENTION = "sglang.srt.layers.attention.torch_native_backend"
"""With RLCORE_PRETEND_NATIVE it counts as a backend that takes no lengths from the host, as FA3."""

_SLOTS = "sglang.srt.mem_cache.allocator.token"
"""SGLang makes the list of free cache slots on another stream than it uses and frees it on. On a
GPU this is harmless, because nothing is allocated on the former later."""


class _Before(MetaPathFinder):
    """Import `tests.pretend.device` around torch: its libraries before, its Python side after."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in ("torch", "torch._C", _TRITON, _NATIVE, _ATTENTION, _SLOTS):
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is not None and found.loader is not None:
            found.loader = _Around(found.loader)
        return found


class _Around(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name == "torch":
            _device().load()
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__name__ == _TRITON:
            module.try_small_copy = lambda *_: False
        elif module.__name__ == _NATIVE:
            if os.environ.get("RLCORE_PRETEND_NATIVE"):
                module._without_kernels = lambda _: ""
        elif module.__name__ == _ATTENTION:
            if os.environ.get("RLCORE_PRETEND_NATIVE"):
                module.TorchNativeAttnBackend.needs_cpu_seq_lens = False
        elif module.__name__ == _SLOTS:
            _keep_slots(module.TokenToKVPoolAllocator)
        elif module.__name__ == "torch":
            _device().complete()
        else:
            _device().add_functions(module)


def _keep_slots(allocator: Any) -> None:
    """Make an allocator keep all its first lists of free slots."""
    clear, kept = allocator.clear, []

    def clear_and_keep(self: Any) -> None:
        clear(self)
        kept.append(self.free_pages)

    allocator.clear = clear_and_keep


def _device() -> Any:
    return importlib.import_module("tests.pretend.device")


if os.environ.get("RLCORE_PRETEND_CUDA"):
    sys.meta_path.insert(0, _Before())
