"""Tensor-parallel sizes that the engines may have, and the objects that depend on them."""

from functools import partial

from rlcore.cli.builders.devices import memory_plan
from rlcore.cli.world import World
from rlcore.config import rules
from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.sched.roles import Elastic, EngineSizePolicy
from rlcore.sched.stream import LengthDistribution
from rlcore.trainer import memory, policies
from rlcore.trainer.policies import engine_ranks, make_controller, make_elastic, with_tp
from rlcore.trainer.sizes import EngineSizes, Sized
from rlcore.utils.errors import ConfigError


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
                elastic = make_elastic(here, hf, world.size, lengths)
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

    def problems(tp: int) -> list[str]:
        sized = with_tp(cfg, tp)
        found = rules.of_world(sized, world.size, world.ranks_per_node)
        found += memory_plan(sized, hf, world)[0].problems
        if 0 < sized.rollout.kv_cache_tokens < memory.longest(cfg, hf):
            found.append(
                f"--rollout.kv_cache_tokens {cfg.rollout.kv_cache_tokens}: engines of {tp} ranks "
                f"would have {sized.rollout.kv_cache_tokens} tokens of KV cache, but one sequence "
                f"may need {memory.longest(cfg, hf)}; raise it"
            )
        return found

    return policies.size_policy(cfg, world.ranks_per_node, problems)
