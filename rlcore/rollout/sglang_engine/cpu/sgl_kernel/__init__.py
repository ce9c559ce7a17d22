"""Stand-in for sgl_kernel, whose CPU build is not published.

`torch.ops.sgl_kernel` stays empty on purpose: SGLang then detects no AMX and takes the plain torch
version of every layer. The two functions below are needed for drafts. Every other name can be
imported, but raises NotImplementedError if called, because a text model on a CPU never calls it.
"""

import ctypes
from typing import Any

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    rows: Any, table: Any, starts: Any, ends: Any, places: Any, width: int
) -> None:
    """Set table[rows[i], starts[i] : ends[i]] for every i to the next elements of `places` [T]."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[done : done + end - start].to(table.dtype)
        done += end - start


def copy_all_layer_kv_cache_cpu(buffers: Any, row_bytes: Any, targets: Any, sources: Any) -> None:
    """Copy cache rows `sources` to `targets` in every buffer (keys or values of a layer, given by
    address), reading all rows before writing. SGLang calls this once at its start, as a test."""
    pairs = list(zip(targets.tolist(), sources.tolist(), strict=True))
    for address, size in zip(buffers.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(address + source * size, size) for _, source in pairs]
        for (target, _), row in zip(pairs, rows, strict=True):
            ctypes.memmove(address + target * size, row, size)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}: has no CPU version here")

    return missing
