"""Name functions of torch that differ between the supported versions, 2.11 to 2.13, and say where
Triton can be used."""

import importlib.util
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 deprecates the names all_gather_into_tensor and reduce_scatter_tensor.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def takes_kernels(x: Tensor) -> bool:
    """Return whether rlcore/mcore/kernels.py can be imported here and takes x."""
    return x.is_cuda and x.dtype is not torch.float64 and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
