"""Number of layers of a streamed model that stay on the device, computed from byte sizes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlcore.hf.config import HFConfig
from rlcore.hf.model import layer_numel
from rlcore.hf.names import EMBED, HEAD, NORM, expected

SLOTS = 2
"""Number of buffers for streamed layers: one is in use while the next is filled."""
MARGIN = 0.02
"""Share of free memory that stays unused, because allocators round up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Sizes of a model on a device, in bytes."""

    num_layers: int
    layer: int
    """Bytes of one layer."""
    outer: int
    """Bytes of embedding, final norm and head, which always stay on the device."""


def sizes_of(hf: HFConfig, dtype: torch.dtype) -> ModelSizes:
    """Compute the sizes of the model `hf` in `dtype`."""
    shapes = expected(hf)
    outer = sum(math.prod(shapes[name]) for name in (EMBED, NORM, HEAD) if name in shapes)
    return ModelSizes(
        num_layers=hf.num_layers,
        layer=layer_numel(hf, dtype) * dtype.itemsize,
        outer=outer * dtype.itemsize,
    )


def most_resident(num_layers: int, ratio: float) -> int:
    """Return the largest number of resident layers: ceil(ratio * num_layers), as in RollPacker."""
    return min(num_layers, math.ceil(ratio * num_layers - 1e-9))


def num_resident(sizes: ModelSizes, ratio: float, free_bytes: float) -> int:
    """Return how many layers stay on the device if `free_bytes` are free for resident layers and
    slots (the buffers of streamed layers).

    If all layers stay, no slots are needed; otherwise `SLOTS` slots are. If even the slots do not
    fit, return 0, because a streamed model cannot run without them.
    """
    fit = int(free_bytes * (1 - MARGIN) // sizes.layer)
    most = most_resident(sizes.num_layers, ratio)
    if most == sizes.num_layers <= fit:
        return most
    return max(0, min(most, fit - SLOTS))


def work_bytes(
    hf: HFConfig, dtype: torch.dtype, rows: int, longest: int, new_tokens: int = 0
) -> int:
    """Estimate the bytes that a batch of `rows` x `longest` padded tokens takes besides weights.
    If `new_tokens` is above 0, keys and values of all layers are kept, else of only one layer."""
    tokens = rows * longest
    inner = hf.experts_per_token * hf.moe_intermediate_size or hf.intermediate_size
    heads = (hf.num_heads + 2 * hf.num_kv_heads) * hf.head_dim
    # activations: hidden states (in, out, norm), q k v before and after RoPE, gate, up and product
    per_token = 4 * hf.hidden_size + 3 * heads + 3 * inner
    kept = math.prod(hf.cache_shape) * (hf.num_layers if new_tokens else 1)
    cache = rows * (longest + new_tokens + 16) * kept
    return dtype.itemsize * (tokens * per_token + cache) + 2 * 4 * rows * hf.vocab_size


def spread(num_layers: int) -> list[int]:
    """Return the layers in the order of their eviction. However many layers are evicted, they are
    spread evenly over the model.

    In RollPacker, the first layers stay and all others stream, so a copy overlaps with the
    computation of one layer. Here the copy also overlaps with the resident layers between two
    streamed layers.
    """
    bits = max(1, (num_layers - 1).bit_length())
    return sorted(range(num_layers), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))


def free_on(device: torch.device, available: Callable[[], int]) -> int:
    """Return the bytes that this process could allocate on the device now. On the CPU, this is
    the free host memory that `available` returns."""
    if device.type != "cuda":
        return available()
    ours = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + ours
