"""Let float32 matrix products on AMD processors run in native code.

torch's products call MKL, which does not use AVX-512 on AMD processors: csrc/product is twice as
fast (`tools/bench_products.py`, figures in csrc/README.md). oneDNN, which is part of torch, is as
fast, but compiles a kernel for each new number of rows, which takes longer than a small product.
torch has no setting to leave MKL, so the kernel of `aten::mm` is replaced.

A native product's row does not depend on the number of rows, while MKL has other kernels for few.
With `batch_invariant`, products of all sizes run in native code, on every processor.
"""

import functools
import warnings
from pathlib import Path

import torch
from torch import Tensor

from rlcore.ops import native

LEAST = 1 << 16
"""Multiplications below which a product stays with torch: a call from Python takes too long."""


def replace_products(*, batch_invariant: bool = False) -> bool:
    """Replace the kernel of `aten::mm` on the CPU in this process, if that is faster or products
    must be batch-invariant. Return whether it was replaced."""
    if not (batch_invariant or is_slow()) or native.torch_ops("matrix products") is None:
        return False
    if True in _registered or batch_invariant in _registered:
        return True
    least = 1 if batch_invariant else LEAST
    library = torch.library.Library("aten", "IMPL")
    _registered[batch_invariant] = library
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl("mm", functools.partial(multiply, least=least), "CPU")
    return True


_registered: dict[bool, torch.library.Library] = {}
"""Registered kernels by `batch_invariant`; a kernel is in place as long as its library exists."""


def is_slow() -> bool:
    """Return whether MKL does not use all of this processor: an AMD processor with AVX-512."""
    if not torch.backends.mkl.is_available():
        return False
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in processor and torch.backends.cpu.get_cpu_capability() == "AVX512"


def multiply(a: Tensor, b: Tensor, least: int = LEAST) -> Tensor:
    """Return a @ b for matrices [n, k] and [k, m], in native code from `least` multiplications
    on."""
    (n, k), (depth, m) = a.shape, b.shape
    if a.dtype is b.dtype is torch.float32 and k == depth and n * k * m >= least:
        out = a.new_zeros(n, m)
        torch.ops.rlcore_native.add_product(a, b.contiguous(), out)
        return out
    out = a.new_empty(n, m)
    return torch.ops.aten.mm.out(a, b, out=out)
