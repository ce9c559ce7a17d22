"""Build a rank's memory plan, and the `Device` that decides which parts its GPU holds."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rlcore.cli.builders.rewards import beside, judges_of
from rlcore.cli.builders.teachers import folders, with_teachers
from rlcore.cli.world import World
from rlcore.config import rules
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.mcore.layout import layout_of
from rlcore.sync.host_cache import HostWeightCache
from rlcore.trainer import memory
from rlcore.trainer.device import Device, OffloadDevice, Parts
from rlcore.trainer.shared_device import SharedDevice
from rlcore.utils import log
from rlcore.utils.errors import ConfigError

if TYPE_CHECKING:  # this import needs Redis, which is only required for shared nodes (--mux.url)
    from rlcore.mux.ranks import RanksGate


def memory_plan(
    cfg: Config, hf: HFConfig, world: World, *, trains: bool = True, samples: bool = True
) -> tuple[memory.MemoryPlan, int]:
    """Return this rank's memory plan, and the memory of its GPU in bytes (0 without a GPU). If
    `trains` is false, no rank has a learner, as in `rlcore eval`; if `samples` is false, no rank
    has an engine, as in `rlcore sft`."""
    cuda = world.device.type == "cuda"
    gpu_bytes = torch.cuda.get_device_properties(world.device).total_memory if cuda else 0
    samples = samples and world.samples
    others = beside(judges_of(cfg)) if cuda and samples else memory.NOBODY
    if cuda and trains:
        taught = {f: HFConfig.from_folder(f, "--teacher.models") for f in folders(cfg)}
        others = with_teachers(others, cfg, taught)
    if not (world.trains and trains):
        plan = memory.make_sampler(cfg, hf, world.rank, gpu_bytes=gpu_bytes, beside=others)
        return plan, gpu_bytes
    layout = layout_of(cfg.train, world.train_ranks, world.rank)
    plan = memory.make(
        cfg, hf, layout, gpu_bytes=gpu_bytes, cuda=cuda, beside=others, has_engine=samples
    )
    return plan, gpu_bytes


def make_residency(
    cfg: Config, hf: HFConfig, world: World, *, trains: bool = True, samples: bool = True
) -> memory.Residency:
    """Return the object that checks this rank's memory against its plan.

    Raises:
        ConfigError: the memory plan is impossible, or the settings do not fit the number of ranks.
    """
    if problems := rules.of_world(cfg, world.size, world.ranks_per_node):
        raise ConfigError("\n".join(problems))
    plan, gpu_bytes = memory_plan(cfg, hf, world, trains=trains, samples=samples)
    if plan.problems:
        raise ConfigError("\n".join(plan.problems))
    if said := memory.too_large(plan, gpu_bytes):
        log.log.warning("%s", said)
    return memory.Residency(plan, world.device)


def make_device(
    cfg: Config,
    parts: Parts,
    world: World,
    gate: "RanksGate | None",
    on_close: Callable[[Callable[[], None]], object],
) -> Device:
    """Return the `Device` that decides whether this rank's GPU holds engine, learner or both."""
    if gate is not None:
        host_cache = HostWeightCache(cfg.rollout.tp) if world.samples else None
        if host_cache is not None:
            on_close(host_cache.close)
        return SharedDevice(parts, gate, host_cache, colocated=not world.rollout_ranks)
    return OffloadDevice(parts) if cfg.train.offload else Device(parts)
