"""Process groups of the train ranks, made from a `Layout` by Megatron and checked against it."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rlcore.config.schema import TrainConfig
from rlcore.mcore.layout import Layout, layout_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Groups that Megatron does not keep itself."""

    lockstep: dist.ProcessGroup | None
    """Ranks that run the same number of micro-batches; None where they share their batch anyway."""


def initialise(
    train: TrainConfig, *, seed: int = 0, timeout_s: float = 600.0
) -> tuple[Layout, Groups]:
    """Megatron's process groups over the default group, which must be the train ranks' own.

    Collective. Groups of an earlier layout must be destroyed first (`destroy`).
    """
    layout = layout_of(train, dist.get_world_size(), dist.get_rank())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=train.tp,
        pipeline_model_parallel_size=train.pp,
        virtual_pipeline_model_parallel_size=train.vpp if train.vpp > 1 else None,
        context_parallel_size=train.cp,
        expert_model_parallel_size=train.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    groups = Groups(lockstep=_lockstep_group(train, layout, timeout_s))
    model_parallel_cuda_manual_seed(seed + 1)
    _check(layout)
    return layout, groups


def _lockstep_group(
    train: TrainConfig, layout: Layout, timeout_s: float
) -> dist.ProcessGroup | None:
    if layout.ep == 1:
        return None
    mine = None
    done: set[tuple[int, ...]] = set()
    for rank in range(layout.world_size):
        ranks = layout_of(train, layout.world_size, rank).lockstep_ranks
        if ranks in done:
            continue
        done.add(ranks)
        # Collective over the world: every rank makes every group, in the same order.
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
        if layout.rank in ranks:
            mine = group
    return mine


def _check(layout: Layout) -> None:
    state = parallel_state
    real = (
        state.get_tensor_model_parallel_rank(),
        state.get_pipeline_model_parallel_rank(),
        state.get_context_parallel_rank(),
        state.get_expert_model_parallel_rank(),
        state.get_data_parallel_rank(),
        state.get_data_parallel_world_size(),
    )
    ours = (
        layout.tp_rank,
        layout.pp_rank,
        layout.cp_rank,
        layout.ep_rank,
        layout.dp_rank,
        layout.dp,
    )
    assert real == ours, f"rank {layout.rank}: Megatron says {real}, the layout {ours}"


def destroy() -> None:
    """Drop Megatron's groups, so that another layout can be initialised."""
    parallel_state.destroy_model_parallel()


def device() -> torch.device:
    """Where this process trains: its CUDA device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
