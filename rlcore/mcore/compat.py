"""Name functions of torch that differ between the supported versions, 2.11 to 2.13, and say where
Triton and native code can be used."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.ops import rows

# torch 2.13 deprecates the names all_gather_into_tensor and reduce_scatter_tensor.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def takes_kernels(x: Tensor) -> bool:
    """Return whether rlcore/mcore/kernels.py can be imported here and takes x."""
    return x.is_cuda and x.dtype is not torch.float64 and _has_triton()


def kernels_of(x: Tensor) -> ModuleType | None:
    """Return the module whose `rms_norm`, `rms_norm_back` and `turn` take x: Triton's on a GPU,
    native code on the CPU in float32. None: torch has to do."""
    if takes_kernels(x):
        return importlib.import_module("rlcore.mcore.kernels")
    return rows if rows.takes(x) else None


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
