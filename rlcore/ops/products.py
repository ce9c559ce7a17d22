"""Let float32 matrix products on AMD processors run in native code.

torch's products call MKL, which does not use AVX-512 on AMD processors: csrc/product is twice as
fast (`tools/bench_products.py`, figures in csrc/README.md). oneDNN, which is part of torch, is as
fast, but compiles a kernel for each new number of rows, which takes longer than a small product.
torch has no setting to leave MKL, so the kernel of `aten::mm` is replaced.
"""

import functools
import warnings
from pathlib import Path

import torch
from torch import Tensor

from rlcore.ops import native

LEAST = 1 << 16
"""Multiplications below which a product stays with torch: a call from Python takes too long."""


@functools.cache
def replace_products() -> bool:
    """Replace the kernel of `aten::mm` on the CPU in this process, if that is faster. Return
    whether it was replaced."""
    if not is_slow() or native.torch_ops("matrix products") is None:
        return False
    library = torch.library.Library("aten", "IMPL")
    _registered.append(library)  # the kernel is in place as long as the library exists
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl("mm", multiply, "CPU")
    return True


_registered: list[torch.library.Library] = []


def is_slow() -> bool:
    """Return whether MKL does not use all of this processor: an AMD processor with AVX-512."""
    if not torch.backends.mkl.is_available():
        return False
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in processor and torch.backends.cpu.get_cpu_capability() == "AVX512"


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for matrices [n, k] and [k, m]."""
    (n, k), (depth, m) = a.shape, b.shape
    if a.dtype is b.dtype is torch.float32 and k == depth and n * k * m >= LEAST:
        out = a.new_zeros(n, m)
        torch.ops.rlcore_native.add_product(a, b.contiguous(), out)
        return out
    out = a.new_empty(n, m)
    return torch.ops.aten.mm.out(a, b, out=out)
