"""Compute a rank's position in the parallel layout, without process groups and without Megatron.

Rank order is Megatron's default, from fastest to slowest index: tensor, context, data, pipeline
parallel. For experts, a pipeline stage has an order of its own: expert tensor, expert, expert data
parallel. So the ranks that share experts are adjacent, and may span data-parallel ranks.
"""

import bisect
import itertools
from dataclasses import dataclass

from rlcore.config.schema import TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Parallel layout of the train ranks: all sizes, and this rank's index in each (`*_rank`)."""

    world_size: int
    rank: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    dp: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    ep_rank: int
    etp_rank: int
    dp_rank: int
    pp_layers: tuple[int, ...] = ()
    """Number of layers in each model chunk, in the order of the model; empty: equal numbers."""

    @property
    def edp(self) -> int:
        """Return the number of ranks of a pipeline stage that hold the same parts of experts."""
        return self.world_size // (self.expert_ranks * self.pp)

    @property
    def edp_rank(self) -> int:
        """Return the index of this rank among the ranks that hold the same parts of experts."""
        return self.rank % (self.world_size // self.pp) // self.expert_ranks

    @property
    def expert_ranks(self) -> int:
        """Return the number of ranks over which the experts of a layer are sharded."""
        return self.ep * self.etp

    @property
    def has_own_expert_groups(self) -> bool:
        """Return whether gradients of experts are summed over other ranks than other gradients."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """Return the global ranks that get the same `Batch` as this rank, in ascending order: its
        model-parallel group (TP x CP x PP)."""
        return tuple(
            self._global(tp_rank, cp_rank, self.dp_rank, pp_rank)
            for pp_rank in range(self.pp)
            for cp_rank in range(self.cp)
            for tp_rank in range(self.tp)
        )

    @property
    def lockstep_ranks(self) -> tuple[int, ...]:
        """Return the global ranks that must run as many micro-batches as this rank: the smallest
        union of whole model-parallel and whole expert-parallel groups that contains this rank."""
        stage = self.world_size // self.pp
        block, group = self.tp * self.cp, self.expert_ranks
        low, high = self.dp_rank * block, (self.dp_rank + 1) * block
        while low % group or high % group or low % block or high % block:
            low -= low % group
            high += -high % group
            low -= low % block
            high += -high % block
        return tuple(p * stage + r for p in range(self.pp) for r in range(low, high))

    @property
    def is_leader(self) -> bool:
        """Return whether this rank is the first of its model-parallel group (`replica_ranks`)."""
        return self.tp_rank == self.pp_rank == self.cp_rank == 0

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    def _global(self, tp_rank: int, cp_rank: int, dp_rank: int, pp_rank: int) -> int:
        return tp_rank + self.tp * (cp_rank + self.cp * (dp_rank + self.dp * pp_rank))

    def chunks(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of layers in each model chunk, in the order of the model. Stage s has
        the chunks s, s + pp, and so on."""
        count = self.pp * self.vpp
        return self.pp_layers or (num_layers // count,) * count

    def layers(self, num_layers: int, vpp_rank: int = 0) -> range:
        """Return the global indices of the layers in this rank's model chunk `vpp_rank`."""
        chunks, chunk = self.chunks(num_layers), vpp_rank * self.pp + self.pp_rank
        first = sum(chunks[:chunk])
        return range(first, first + chunks[chunk])

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the global indices of all layers on this rank, over all its model chunks."""
        every = range(self.vpp)
        return tuple(layer for chunk in every for layer in self.layers(num_layers, chunk))

    def stage_of(self, layer: int, num_layers: int) -> int:
        """Return the pipeline stage of a layer."""
        ends = list(itertools.accumulate(self.chunks(num_layers)))
        return bisect.bisect_right(ends, layer) % self.pp

    def experts(self, num_experts: int) -> range:
        """Return the global indices of the experts on this rank."""
        count = num_experts // self.ep
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)


def layout_of(train: TrainConfig, world_size: int, rank: int) -> ParallelLayout:
    """Return the layout of `rank` in `world_size` train ranks. Sizes in `train` must be at least 1.

    Raises:
        ConfigError: the sizes do not fit the world.
    """
    model = train.tp * train.pp * train.cp
    if world_size % model:
        raise ConfigError(
            f"--train.tp {train.tp} --train.pp {train.pp} --train.cp {train.cp}: their product "
            f"{model} must divide the {world_size} train ranks; start a multiple of {model} ranks "
            "or lower one of them"
        )
    stage = world_size // train.pp
    if stage % (train.ep * train.etp):
        raise ConfigError(
            f"--train.ep {train.ep} --train.etp {train.etp}: their product "
            f"{train.ep * train.etp} must divide the {stage} ranks of a pipeline stage; take a "
            f"divisor of {stage}"
        )
    if train.vpp > 1 and train.pp == 1:
        raise ConfigError(
            f"--train.vpp {train.vpp}: interleaving needs pipeline stages; set --train.pp above 1 "
            "or --train.vpp 1"
        )
    if train.pp_layers and len(train.pp_layers) != train.pp * train.vpp:
        raise ConfigError(
            f"--train.pp_layers {_words(train.pp_layers)}: must have one number for each model "
            f"chunk, {train.pp * train.vpp} (--train.pp {train.pp} x --train.vpp {train.vpp}), not "
            f"{len(train.pp_layers)}; change it or leave it unset"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank}: must be in 0..{world_size - 1}; check RANK and WORLD_SIZE")
    rest, tp_rank = divmod(rank, train.tp)
    rest, cp_rank = divmod(rest, train.cp)
    dp = world_size // model
    pp_rank, dp_rank = divmod(rest, dp)
    return ParallelLayout(
        world_size=world_size,
        rank=rank,
        tp=train.tp,
        pp=train.pp,
        vpp=train.vpp,
        cp=train.cp,
        ep=train.ep,
        etp=train.etp,
        dp=dp,
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        cp_rank=cp_rank,
        ep_rank=rank % stage // train.etp % train.ep,
        etp_rank=rank % stage % train.etp,
        dp_rank=dp_rank,
        pp_layers=train.pp_layers,
    )


def model_parallel_groups(train: TrainConfig, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the global ranks of every model-parallel group, ordered by data-parallel rank."""
    layouts = [layout_of(train, world_size, rank) for rank in range(world_size)]
    leaders = sorted((x for x in layouts if x.is_leader), key=lambda x: x.dp_rank)
    return tuple(x.replica_ranks for x in leaders)


def check_model(hf: HFConfig, train: TrainConfig) -> None:
    """Check that the model's sizes fit the parallel sizes in `train`.

    Raises:
        ConfigError: a size does not fit; the text names the key, its value and what to do.
    """
    if hf.num_heads % train.tp:
        raise ConfigError(
            f"--train.tp {train.tp}: must divide the model's {hf.num_heads} attention heads; "
            f"take a divisor of {hf.num_heads}"
        )
    if hf.num_kv_heads % train.tp and train.tp % hf.num_kv_heads:
        raise ConfigError(
            f"--train.tp {train.tp}: must be a divisor or a multiple of the model's "
            f"{hf.num_kv_heads} key-value heads; use --train.pp or --train.cp for the rest"
        )
    if 2 * hf.num_kv_heads * hf.head_dim % train.tp:
        raise ConfigError(
            f"--train.tp {train.tp}: must divide the {2 * hf.num_kv_heads * hf.head_dim} rows of "
            "the model's key and value projections; lower it"
        )
    if False in hf.forms and hf.intermediate_size % train.tp:
        raise ConfigError(
            f"--train.tp {train.tp}: must divide the model's MLP width {hf.intermediate_size}; "
            f"take a divisor of {hf.intermediate_size}"
        )
    if hf.shared_intermediate_size % train.tp:
        raise ConfigError(
            f"--train.tp {train.tp}: must divide the width {hf.shared_intermediate_size} of the "
            f"model's shared experts; take a divisor of {hf.shared_intermediate_size}"
        )
    stages = train.pp * train.vpp
    if train.pp_layers and sum(train.pp_layers) != hf.num_layers:
        raise ConfigError(
            f"--train.pp_layers {_words(train.pp_layers)}: the sum {sum(train.pp_layers)} must be "
            f"the model's {hf.num_layers} layers; change a number"
        )
    if not train.pp_layers and hf.num_layers % stages:
        raise ConfigError(
            f"--train.pp {train.pp} --train.vpp {train.vpp}: their product {stages} must divide "
            f"the model's {hf.num_layers} layers; lower one of them, or set --train.pp_layers to "
            f"{stages} numbers of layers"
        )
    for key, size in (("ep", train.ep), ("etp", train.etp)):
        if size > 1 and not hf.num_experts:
            raise ConfigError(
                f"--train.{key} {size}: the model has no experts to distribute; use --train.{key} 1"
            )
    if hf.num_experts and hf.num_experts % train.ep:
        raise ConfigError(
            f"--train.ep {train.ep}: must divide the model's {hf.num_experts} experts; "
            f"take a divisor of {hf.num_experts}"
        )
    if hf.num_experts and hf.moe_intermediate_size % train.etp:
        raise ConfigError(
            f"--train.etp {train.etp}: must divide the width {hf.moe_intermediate_size} of the "
            f"model's experts; take a divisor of {hf.moe_intermediate_size}"
        )
    if hf.num_experts and train.tp > 1 and not train.sp:
        raise ConfigError(
            f"--train.sp False: a model with experts under --train.tp {train.tp} needs sequence "
            "parallelism; leave --train.sp on"
        )


def _words(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))
