"""Build the channel for weight updates from learner to engine."""

import os

import torch

from rlcore.cli.world import World
from rlcore.config import rules
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.protocols import WeightChannel
from rlcore.sync.base_weights import BaseWeights
from rlcore.sync.channel import make_channel
from rlcore.sync.colocated import Transport
from rlcore.sync.peers import Peers
from rlcore.utils import cuda_allocator
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import announce


def make_weight_channel(
    cfg: Config, hf: HFConfig, world: World, *, in_child: bool, to_shelf: bool
) -> WeightChannel:
    """Return the channel that sends the learner's weights to this rank's engine or host cache."""
    transport: Transport = "shm" if in_child else "bytes"
    if to_shelf:
        transport = "bytes"
    elif uses_cuda_ipc(cfg, world.device):
        transport = "cuda_ipc"
    size = cfg.sync.ranks_per_site or world.ranks_per_node
    way = rules.route(cfg)
    if cfg.sync.route == "auto" and way != "gather":
        announce("weights", f"{way}, since train ranks and rollout ranks differ")
    return make_channel(
        way,
        transport=transport,
        tp=cfg.rollout.tp,
        ranks_per_node=world.ranks_per_node,
        max_bytes=cfg.sync.bucket_mb * 2**20,
        sites=[range(i, min(i + size, world.size)) for i in range(0, world.size, size)],
        peers=make_peers(cfg, world),
        device=world.device,
        base=_base(cfg, hf, world),
    )


def _base(cfg: Config, hf: HFConfig, world: World) -> BaseWeights | None:
    """Return the weights to which exchanged adapters are added; None if all are exchanged."""
    if not cfg.lora.rank or cfg.lora.weight_update == "merged":
        return None
    dtype = getattr(torch, cfg.model.dtype)
    return BaseWeights(cfg.model.path, hf, cfg.lora, dtype=dtype, device=world.device)


def uses_cuda_ipc(cfg: Config, device: torch.device) -> bool:
    """Return whether engines read the weights from the learner's GPU memory, unless jobs share the
    nodes."""
    return cfg.rollout.engine == "sglang" and device.type == "cuda"


def check_allocator(cfg: Config, device: torch.device) -> None:
    """Raise ConfigError if an engine could not open the learner's GPU memory.

    Expandable segments share memory as file descriptors (torch 2.13). Another process may take
    these only with the right to trace this process, which containers deny.
    """
    name = cuda_allocator.expandable(os.environ)
    if name and uses_cuda_ipc(cfg, device):
        raise ConfigError(
            f"{name} {os.environ[name]}: SGLang reads the learner's weights from its GPU memory, "
            "which other processes cannot open with expandable_segments:True; remove this setting"
        )


def make_peers(cfg: Config, world: World) -> Peers:
    """Return the `Peers` that connect all ranks, also ranks of different default process groups."""
    if world.everyone is None:
        return Peers(timeout_s=cfg.cluster.timeout_s)
    return Peers(world.rank, world.size, world.store, timeout_s=cfg.cluster.timeout_s)
