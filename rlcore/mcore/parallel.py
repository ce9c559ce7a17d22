"""Let Megatron create the train ranks' process groups and check them against a `ParallelLayout`.

Megatron keeps one set of groups per process. The learners of one process (actor and critic) share
the set: the first learner creates the groups, and the last learner to close releases them.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rlcore.config.schema import ClusterConfig, TrainConfig
from rlcore.mcore.layout import ParallelLayout, layout_of
from rlcore.utils import collective


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Process groups of the train ranks that rlcore adds to Megatron's."""

    lockstep: dist.ProcessGroup | None
    """Group of ranks that must run equally many micro-batches; None if experts are not sharded."""


@dataclass(kw_only=True, slots=True)
class _Shared:
    layout: ParallelLayout
    groups: Groups
    timeout_s: float
    own_world: bool
    """Whether `initialise` created the default process group."""
    neighbours: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    """Groups of adjacent ranks, by size."""
    users: int = 1

    def join(self) -> None:
        """Count one more learner that uses the groups."""
        self.users += 1

    def leave(self) -> bool:
        """Count one learner less; return whether no learner uses the groups any more."""
        self.users -= 1
        return not self.users


_shared: _Shared | None = None
_left: list[dist.ProcessGroup] = []
"""Process groups that Megatron has released but that are not destroyed yet."""


def initialise(
    train: TrainConfig,
    *,
    where: torch.device | None = None,
    seed: int = 0,
    timeout_s: float = ClusterConfig.timeout_s,
) -> tuple[ParallelLayout, Groups]:
    """Create Megatron's process groups over the default group, or join the groups of this process.

    The default group must consist of the train ranks. If no group exists, a group of one rank is
    created. Every call needs a matching call of `destroy`. Collective.

    Args:
        seed: seed of Megatron's random states; only the first call sets them.

    Raises:
        ValueError: the groups of this process have another layout.
    """
    global _shared
    if _shared is not None:
        _check_same(layout_of(train, dist.get_world_size(), dist.get_rank()), _shared.layout)
        _shared.join()
        return _shared.layout, _shared.groups
    with ExitStack() as undo:
        own_world = not dist.is_initialized()
        # Skip destroyed groups, because other ranks of this world may never have had them.
        alive = dist.distributed_c10d._world.pg_map
        if old := [group for group in dict.fromkeys(_left) if group in alive]:
            dist.barrier()  # after the barrier, no rank is inside a collective of these groups
            for group in old:
                dist.destroy_process_group(group)
        _left.clear()
        if own_world:
            collective.share_gloo_device()
            cpu = (where or device()).type == "cpu"
            backend = "gloo" if cpu else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            undo.callback(dist.destroy_process_group)
        layout = layout_of(train, dist.get_world_size(), dist.get_rank())
        undo.callback(parallel_state.destroy_model_parallel)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=train.tp,
            pipeline_model_parallel_size=train.pp,
            virtual_pipeline_model_parallel_size=train.vpp if train.vpp > 1 else None,
            context_parallel_size=train.cp,
            expert_model_parallel_size=train.ep,
            expert_tensor_parallel_size=train.etp,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        )
        groups = Groups(lockstep=_lockstep_group(train, layout, timeout_s))
        model_parallel_cuda_manual_seed(seed + 1)
        _check(layout)
        undo.pop_all()
    _shared = _Shared(layout=layout, groups=groups, timeout_s=timeout_s, own_world=own_world)
    return layout, groups


def neighbours(size: int) -> dist.ProcessGroup:
    """Return the group of `size` adjacent ranks with this rank. If `size` divides the
    tensor-parallel size, they are ranks of one tensor-parallel group. Collective."""
    assert _shared is not None, "call initialise first"
    if size not in _shared.neighbours:
        timeout = timedelta(seconds=_shared.timeout_s)
        _shared.neighbours[size], _ = dist.new_subgroups(size, timeout=timeout)
    return _shared.neighbours[size]


def _check_same(wanted: ParallelLayout, found: ParallelLayout) -> None:
    for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "pp_layers"):
        ours, theirs = getattr(wanted, name), getattr(found, name)
        if ours != theirs:
            raise ValueError(
                f"--train.{name} {ours}: another learner of this process has {theirs}, and both "
                "share their process groups; use one layout for both, or close that learner"
            )


def _lockstep_group(
    train: TrainConfig, layout: ParallelLayout, timeout_s: float
) -> dist.ProcessGroup | None:
    if layout.expert_ranks == 1:
        return None
    mine = None
    done: set[tuple[int, ...]] = set()
    for rank in range(layout.world_size):
        ranks = layout_of(train, layout.world_size, rank).lockstep_ranks
        if ranks in done:
            continue
        done.add(ranks)
        # `new_group` is collective over the world: all ranks make all groups, in the same order.
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
        if layout.rank in ranks:
            mine = group
    return mine


def _check(layout: ParallelLayout) -> None:
    state = parallel_state
    real = (
        state.get_tensor_model_parallel_rank(),
        state.get_pipeline_model_parallel_rank(),
        state.get_context_parallel_rank(),
        state.get_expert_model_parallel_rank(),
        state.get_expert_tensor_parallel_rank(),
        state.get_data_parallel_rank(),
        state.get_data_parallel_world_size(),
    )
    ours = (
        layout.tp_rank,
        layout.pp_rank,
        layout.cp_rank,
        layout.ep_rank,
        layout.etp_rank,
        layout.dp_rank,
        layout.dp,
    )
    assert real == ours, f"rank {layout.rank}: Megatron has {real}, the layout {ours}"


def destroy() -> None:
    """Leave the process groups. After the last learner, Megatron releases the groups, so that
    another layout can follow. If `initialise` created the default group, destroy all groups."""
    global _shared
    if _shared is None:
        return
    if not _shared.leave():
        return
    # Let the next `initialise` destroy the groups: a rank may still be in its last collective.
    made = [*(parallel_state._global_process_group_list or ()), _shared.groups.lockstep]
    made += _shared.neighbours.values()
    _left.extend(g for g in made if isinstance(g, dist.ProcessGroup) and g is not dist.group.WORLD)
    parallel_state.destroy_model_parallel()
    if _shared.own_world:
        dist.destroy_process_group()
        _left.clear()
    _shared = None


def device() -> torch.device:
    """Return the device on which this process trains: its CUDA device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
