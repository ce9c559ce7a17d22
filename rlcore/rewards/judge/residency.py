"""Memory of a judge, in bytes."""

from dataclasses import dataclass

import torch

from rlcore.hf.config import HFConfig
from rlcore.hf.residency import SLOTS, most_resident, num_resident, sizes_of, work_bytes
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.utils.host_room import room_bytes

STEADY = 8
"""Number of batches that must have room for a layer before the layer becomes resident again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Memory of one judge besides its CUDA context, in bytes."""

    stay: int
    """Maximum device bytes of embedding, final norm, head, resident layers and slots."""
    work: int
    """Estimated device bytes of the largest batch."""
    host: int
    """Pinned host bytes of the streamed layers. If memory on the device becomes short, evicted
    layers add to them."""
    num_resident: int


def footprint(cfg: JudgeRewardConfig, hf: HFConfig) -> Footprint:
    """Compute the memory that a judge of the architecture `hf` takes with these settings."""
    dtype = getattr(torch, cfg.dtype)
    sizes = sizes_of(hf, dtype)
    stay = most_resident(sizes.num_layers, cfg.resident_ratio)
    new = cfg.max_new_tokens if cfg.method == "generate" else 0
    longest = min(cfg.max_tokens, hf.max_positions)
    rows = max(1, min(cfg.batch_rows, cfg.batch_tokens // longest))
    work = work_bytes(hf, dtype, rows, longest, new)
    if cfg.device_memory_gb:
        room = cfg.device_memory_gb * 1e9 - sizes.outer
        stay = num_resident(sizes, cfg.resident_ratio, room - work)
    streamed = sizes.num_layers - stay
    slots = min(SLOTS, streamed) * sizes.layer
    return Footprint(
        stay=sizes.outer + stay * sizes.layer + slots,
        work=work,
        host=room_bytes(streamed * sizes.layer),
        num_resident=stay,
    )


def host_growth(cfg: JudgeRewardConfig, hf: HFConfig, device_type: str, num_resident: int) -> int:
    """Return how many bytes of host memory a healthy judge may add after its start, when
    `num_resident` layers are resident: on CUDA for copies of layers that are evicted, on the CPU
    for the other layers, slots, and its largest batch."""
    sizes = sizes_of(hf, getattr(torch, cfg.dtype))
    if device_type == "cuda":
        return room_bytes(num_resident * sizes.layer)
    others = sizes.num_layers + SLOTS - num_resident
    return others * sizes.layer + footprint(cfg, hf).work
