"""Build the policies of sampling from the configuration: prompt source, controller, router, engine
sizes. The trainer and the simulator call these functions, so a simulation runs what would train."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlcore import algos
from rlcore.config import rules
from rlcore.config.schema import Config
from rlcore.data.data_order import ShuffledEpochs, WeightedEpochs
from rlcore.hf.config import HFConfig
from rlcore.mcore.layout import layout_of, model_parallel_groups
from rlcore.records import Prompt, Work
from rlcore.rollout.async_controller import AsyncController
from rlcore.rollout.controller import Controller
from rlcore.sched.histopipe import HistoPipe
from rlcore.sched.planner import FixedSizes, TPPlanner
from rlcore.sched.prompt_source import EpochPrompts
from rlcore.sched.roles import Elastic, EngineSizePolicy, Stop
from rlcore.sched.router import LeastLoaded
from rlcore.sched.staleness import SampleBuffer
from rlcore.sched.stream import LengthDistribution, StreamWindow, cells
from rlcore.sched.tail_batching import TailBatching
from rlcore.trainer import memory
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import announce


def estimator(cfg: Config) -> str:
    """Return the name of the advantage estimator."""
    return algos.estimator(algos.module(cfg.select.algo), cfg.algo)


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


def order_of(cfg: Config, sizes: Sequence[int] | None) -> ShuffledEpochs | WeightedEpochs:
    """Return the order of the training rows, a mixture if data.weights is set. `sizes`: number of
    rows of each entry of data.train; None: an endless task."""
    seed, shuffle = cfg.run.seed, cfg.data.shuffle
    if cfg.data.weights and sizes is not None:
        return WeightedEpochs(sizes, cfg.data.weights, seed, shuffle)
    return ShuffledEpochs(sum(sizes) if sizes is not None else None, seed, shuffle)


def max_replaced(cfg: Config) -> int:
    """Return the number of groups of equal scores that a step replaces at most; 0: none."""
    if cfg.algo.equal_reward_groups != "replace":
        return 0
    return math.ceil(cfg.algo.max_replaced_groups * cfg.data.prompts_per_step)


def make_source(
    cfg: Config, sampler: ShuffledEpochs | WeightedEpochs, prompt_of: Callable[[int], Prompt]
) -> EpochPrompts | TailBatching:
    """Return the prompt source of --schedule. `prompt_of` returns the prompt of a row."""
    sizes = {
        "num_prompts": cfg.data.prompts_per_step,
        "num_samples": cfg.rollout.samples_per_prompt,
    }
    if cfg.select.schedule == "all":

        def next_prompts(n: int) -> list[Prompt]:
            return [prompt_of(row) for _, row in sampler.next(n)]

        return EpochPrompts(
            next_prompts,
            **sizes,
            greedy_baseline=estimator(cfg) == "remax",
            num_started=cfg.env.num_groups,
            group_size=cfg.env.group_size,
            max_replaced=max_replaced(cfg),
        )
    tail, rows = cfg.tail, sampler.state()["num_rows"]
    starts = int(tail.eta_prompts * cfg.data.prompts_per_step)
    if rows is not None and rows < starts:
        raise ConfigError(
            f"--data.train {' '.join(cfg.data.train)}: has {rows} prompts but a short round starts "
            f"{starts} different prompts; lower --data.prompts_per_step"
        )
    return TailBatching(
        sampler.next,
        prompt_of,
        **sizes,
        eta_prompts=tail.eta_prompts,
        eta_samples=tail.eta_samples,
        quotas=rules.quotas(cfg) or None,
        max_replaced=max_replaced(cfg),
    )


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


def make_async_controller(
    cfg: Config,
    world_size: int,
    issue: Callable[[int], list[Work]],
    kind: Callable[..., AsyncController] = AsyncController,
) -> AsyncController:
    """Return the controller of --mode async, with the engines of the last --cluster.rollout_ranks
    ranks. `issue` returns the work of the next n prompts; `kind` makes the controller."""
    tp, first = cfg.rollout.tp, world_size - cfg.cluster.rollout_ranks
    rollout_ranks = range(first, world_size)
    leaders = rollout_ranks[::tp]
    piped = cfg.rollout.routing == "histopipe"
    return kind(
        buffer=SampleBuffer(cfg.data.prompts_per_step, cfg.async_.alpha, cfg.async_.extra_prompts),
        issue=issue,
        trainers=range(first),
        rollout_ranks=rollout_ranks,
        ranks=leaders,
        members={leader: range(leader + 1, leader + tp) for leader in leaders},
        place=make_pipe(cfg, leaders) if piped else make_place(cfg),
        deadline_s=cfg.rollout.stall_timeout_s,
        max_replaced=max_replaced(cfg),
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


def make_elastic(
    cfg: Config, hf: HFConfig, world_size: int, lengths: LengthDistribution | None = None
) -> StreamWindow | None:
    """Return the policy by which ranks start to train before a round ends (--mode stream); None in
    other modes. `lengths` has the known response lengths.

    Raises:
        ConfigError: all ranks form one engine or one model-parallel group.
    """
    if cfg.select.mode != "stream":
        return None
    layouts = [layout_of(cfg.train, world_size, rank) for rank in range(world_size)]
    r = cfg.rollout
    return StreamWindow(
        cells(
            [engine_ranks(cfg, rank) for rank in range(0, world_size, r.tp)],
            model_parallel_groups(cfg.train, world_size),
            [layout.lockstep_ranks for layout in layouts],
        ),
        cache_tokens=r.kv_cache_tokens or r.max_running_requests * memory.longest(cfg, hf),
        max_running=r.max_running_requests,
        batch_tokens=cfg.train.tokens_per_micro_batch,
        earliest=cfg.stream.earliest,
        latest=cfg.stream.latest,
        check_every=cfg.stream.check_every,
        lengths=lengths,
    )


def size_policy(
    cfg: Config, per_node: int, problems: Callable[[int], list[str]]
) -> EngineSizePolicy | None:
    """Return the policy that chooses the engine size of every round; None if the size is fixed.
    `problems` returns why engines of a size are not possible.

    Raises:
        ConfigError: a configured size is not possible.
    """
    if not rules.changes_size(cfg):
        return None
    if cfg.debug.rollout_tp:
        if found := [line for tp in cfg.debug.rollout_tp for line in problems(tp)]:
            raise ConfigError(found[0].replace("--rollout.tp", "--debug.rollout_tp"))
        return FixedSizes(cfg.debug.rollout_tp)
    tp, most = cfg.rollout.tp, cfg.rollout.max_tp or per_node
    if cfg.rollout.max_tp and (found := problems(most)):
        raise ConfigError(found[0].replace("--rollout.tp", "--rollout.max_tp"))
    low = high = tp
    while low > 1 and not problems(low // 2):
        low //= 2
    while 2 * high <= most and not problems(2 * high):
        high *= 2
    announce("planner", f"engines of {low} to {high} ranks, {tp} at the start")
    return TPPlanner(tp, high, min_tp=low)
