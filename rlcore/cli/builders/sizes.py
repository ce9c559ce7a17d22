"""Tensor-parallel sizes that the engines may have, and the objects that depend on them."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rlcore.cli.builders.devices import memory_plan, ranks_per_node
from rlcore.cli.builders.model import max_model_tokens
from rlcore.cli.world import World
from rlcore.config import rules
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.mcore.layout import layout_of, model_parallel_groups
from rlcore.rollout.controller import Controller
from rlcore.sched.histopipe import HistoPipe
from rlcore.sched.planner import FixedSizes, TPPlanner
from rlcore.sched.roles import Elastic, EngineSizePolicy, Stop
from rlcore.sched.router import LeastLoaded
from rlcore.sched.stream import LengthDistribution, StreamWindow, cells
from rlcore.trainer import memory
from rlcore.trainer.sizes import EngineSizes, Sized
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import announce


def engine_ranks(cfg: Config, rank: int) -> range:
    """Return the ranks of the engine of `rank`; requests are sent to the first of these ranks."""
    first = rank - rank % cfg.rollout.tp
    return range(first, first + cfg.rollout.tp)


def with_tp(cfg: Config, tp: int) -> Config:
    """Return `cfg` with engines of `tp` ranks. Over all engines, the sum of the KV caches and the
    sum of the request limits stay the same."""
    r = cfg.rollout
    changed = replace(
        r,
        tp=tp,
        max_running_requests=max(1, r.max_running_requests * tp // r.tp),
        kv_cache_tokens=r.kv_cache_tokens * tp // r.tp,
    )
    return replace(cfg, rollout=changed)


def make_elastic(
    cfg: Config, hf: HFConfig, world: World, lengths: LengthDistribution | None = None
) -> StreamWindow | None:
    """Return the policy by which ranks start to train before a round ends (--mode stream); None in
    other modes. `lengths` has the known response lengths.

    Raises:
        ConfigError: all ranks form one engine or one model-parallel group.
    """
    if cfg.select.mode != "stream":
        return None
    layouts = [layout_of(cfg.train, world.size, rank) for rank in range(world.size)]
    r = cfg.rollout
    return StreamWindow(
        cells(
            [engine_ranks(cfg, rank) for rank in range(0, world.size, r.tp)],
            model_parallel_groups(cfg.train, world.size),
            [layout.lockstep_ranks for layout in layouts],
        ),
        cache_tokens=r.kv_cache_tokens or r.max_running_requests * max_model_tokens(cfg, hf),
        max_running=r.max_running_requests,
        batch_tokens=cfg.train.tokens_per_micro_batch,
        earliest=cfg.stream.earliest,
        latest=cfg.stream.latest,
        check_every=cfg.stream.check_every,
        lengths=lengths,
    )


def make_sizes(cfg: Config, hf: HFConfig, world: World, tail: Elastic | None) -> EngineSizes:
    """Return the tensor-parallel size of the engines, and the objects that depend on this size.

    Args:
        tail: policy that releases nodes near the end of a rollout (--mux.tail_nodes), on rank 0.

    Raises:
        ConfigError: a configured size is not possible.
    """

    lengths = LengthDistribution()

    def sized(tp: int) -> Sized:
        here, elastic = with_tp(cfg, tp), tail
        if elastic is None:
            try:
                elastic = make_elastic(here, hf, world, lengths)
            except ConfigError:
                if tp == cfg.rollout.tp:
                    raise
                elastic = None  # if one engine has all ranks, no rank can train early
        return Sized(
            tp=tp,
            engine_ranks=engine_ranks(here, world.rank) if world.samples else (),
            controller=partial(make_controller, here, world.size),
            elastic=elastic,
            plan=memory_plan(here, hf, world)[0],
        )

    policy = size_policy(cfg, hf, world)
    return EngineSizes(sized, cfg.rollout.tp, policy if world.rank == 0 else None)


def size_policy(cfg: Config, hf: HFConfig, world: World) -> EngineSizePolicy | None:
    """Return the policy that chooses the engine size of every round; None if the size is fixed.

    Raises:
        ConfigError: a configured size is not possible.
    """
    if not rules.changes_size(cfg):
        return None

    def problems(tp: int) -> list[str]:
        sized = with_tp(cfg, tp)
        found = rules.of_world(sized, world.size, ranks_per_node(world))
        found += memory_plan(sized, hf, world)[0].problems
        if 0 < sized.rollout.kv_cache_tokens < memory.longest(cfg, hf):
            found.append(
                f"--rollout.kv_cache_tokens {cfg.rollout.kv_cache_tokens}: engines of {tp} ranks "
                f"would have {sized.rollout.kv_cache_tokens} tokens of KV cache, but one sequence "
                f"may need {memory.longest(cfg, hf)}; raise it"
            )
        return found

    if cfg.debug.rollout_tp:
        if found := [line for tp in cfg.debug.rollout_tp for line in problems(tp)]:
            raise ConfigError(found[0].replace("--rollout.tp", "--debug.rollout_tp"))
        return FixedSizes(cfg.debug.rollout_tp)
    tp, most = cfg.rollout.tp, cfg.rollout.max_tp or ranks_per_node(world)
    if cfg.rollout.max_tp and (found := problems(most)):
        raise ConfigError(found[0].replace("--rollout.tp", "--rollout.max_tp"))
    low = high = tp
    while low > 1 and not problems(low // 2):
        low //= 2
    while 2 * high <= most and not problems(2 * high):
        high *= 2
    announce("planner", f"engines of {low} to {high} ranks, {tp} at the start")
    return TPPlanner(tp, high, min_tp=low)


def make_controller(
    cfg: Config, world_size: int, stop: Stop, elastic: Elastic | None = None
) -> Controller:
    """Return the controller of one round, with the engines of all ranks or, if set, of the last
    --cluster.rollout_ranks ranks. `stop` decides when the round ends."""
    tp, apart = cfg.rollout.tp, cfg.cluster.rollout_ranks
    leaders = range(world_size - apart if apart else 0, world_size, tp)
    return Controller(
        ranks=leaders,
        all_ranks=range(world_size),
        members={first: range(first + 1, first + tp) for first in leaders},
        place=make_place(cfg),
        stop=stop,
        deadline_s=cfg.rollout.stall_timeout_s,
        by_tokens=cfg.debug.deterministic_order,
        elastic=elastic,
    )


def make_place(cfg: Config) -> LeastLoaded:
    """Return the router of requests to engines; with histopipe routing, only for evaluations.

    Without --rollout.queue all requests are sent at once and wait inside the engines. With
    --rollout.queue the controller sends requests as slots become free, so batch composition depends
    on timing. Log-probs then differ in their last bits, and a resumed run is not bit-exact.
    """
    r = cfg.rollout
    most = cfg.env.max_running_episodes if cfg.select.env else r.max_running_requests
    return LeastLoaded(most if r.queue else sys.maxsize, spread=r.routing == "response")


def make_pipe(cfg: Config, leaders: Sequence[int]) -> HistoPipe:
    """Return the router that places requests by response lengths of the previous epoch."""
    return HistoPipe(
        engines=leaders,
        batch=cfg.data.prompts_per_step,
        longest=cfg.rollout.max_tokens,
        rows=cfg.rollout.max_running_requests,
    )
