"""Simulate a run on a virtual cluster: steps of rollout, reward, training and weight update."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np

from rlcore.config.schema import StreamConfig, TailConfig
from rlcore.records import GroupId, Prompt, Request, Sampling, group_of, response_of
from rlcore.sched.planner import TPPlanner
from rlcore.sched.prompt_source import EpochPrompts
from rlcore.sched.stream import StreamWindow, cells
from rlcore.sched.tail_batching import TailBatching
from rlcore.sim.cost import EngineCost
from rlcore.sim.phases import TrainingCost
from rlcore.sim.rewards import Rewards
from rlcore.sim.round import RoundResult, SimSettings
from rlcore.sim.workload import Workload
from rlcore.utils.errors import ConfigError
from rlcore.utils.seed import derive

RowOf = Callable[[Request], int]
PHASES = ("gen", "reward", "old_log_prob", "update_actor", "update_weights", "resize_engines")
"""Phases of a step in order, except that `resize_engines` comes first. `gen` lasts until the end of
the round and includes scoring during the round; `reward` is the scoring after the round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRule:
    """Rule for when half of the engines switch from decoding to training. `earliest` and `latest`
    limit the share of finished responses at which these engines may switch."""

    earliest: float = StreamConfig.earliest
    latest: float = StreamConfig.latest
    checks_cache: bool = True
    """Whether to switch only if the decoding engines' KV caches hold all unfinished requests."""
    once: bool = False
    """Whether engines train only the groups that are complete at the switch to training."""
    batch_tokens: int = 16_384
    """Approximate number of tokens per training micro-batch of an engine."""


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """Settings of a simulated run: virtual cluster, workload and policies."""

    name: str
    gpus: int
    tp: int
    costs: Callable[[int], EngineCost]
    """Function that returns the costs of an engine with the given number of GPUs."""
    training: TrainingCost
    workload: Workload
    num_prompts: int
    num_samples: int
    schedule: Literal["all", "tail_batching"] = "all"
    eta_prompts: float = TailConfig.eta_prompts
    eta_samples: float = TailConfig.eta_samples
    rewards: Callable[[RowOf], Rewards] = lambda row_of: Rewards()
    """Function that makes the reward scorers of a run, which may adapt during the run. Its argument
    returns the data set row of a request's prompt."""
    max_tp: int = 0
    """Maximum `tp` that the planner may choose between rounds; 0: `tp` is fixed."""
    min_tp: int = 1
    """Minimum `tp` that the planner may choose; engines of this size must fit into GPU memory."""
    reshard_s: Callable[[int], float] = lambda tp: 0.0
    """Function that returns the seconds to change to engines of the given number of GPUs."""
    overlap_logprobs: bool = False
    """Whether idle GPUs compute log-probs of finished responses during rollout (RLHFuse)."""
    stream: StreamRule | None = None
    """Rule for when half of the engines train while the others decode; None: never."""
    max_running: int = 1 << 30
    """Maximum number of requests that an engine decodes at a time."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus % self.tp:
            raise ConfigError(f"{self.gpus} GPUs cannot be divided into engines of {self.tp}")


@dataclass(slots=True, kw_only=True)
class SimStep:
    """One step of a run. Times are virtual seconds; `start` counts from the start of the run."""

    number: int
    start: float
    kind: str
    tp: int
    phases: dict[str, float]
    outcome: RoundResult

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


class SimRun:
    """Simulation of a run with the settings of a `ClusterPlan`."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self._rows: dict[GroupId, int] = {}
        self._drawn: dict[GroupId, Sequence[int]] = {}
        self._counts: dict[GroupId, int] = {}
        self._prompt_tokens = np.broadcast_to(np.int32(0), plan.workload.prompt_tokens)
        self._source = self._make_source()
        self._rewards = plan.rewards(lambda request: self._rows[group_of(request.id)])
        self._planner: TPPlanner | None = None
        if plan.max_tp:
            self._planner = TPPlanner(plan.tp, plan.max_tp, min_tp=plan.min_tp)
        self._tp = plan.tp
        self._world = cache(self._make_world)
        self._now = 0.0
        self._number = 0

    def steps(self, count: int) -> Iterator[SimStep]:
        """Simulate the next `count` steps. If the controller fails a round, raise RuntimeError."""
        for _ in range(count):
            yield self._step()

    def _step(self) -> SimStep:
        plan = self._plan
        todo = self._source.next_round(Sampling(max_tokens=plan.workload.cap))
        tp = self._planner.size(todo.kind) if self._planner else plan.tp
        phases = dict.fromkeys(PHASES, 0.0)
        if tp != self._tp:
            phases["resize_engines"], self._tp = plan.reshard_s(tp), tp
        self._rows = {w.id: w.prompt.index for w in todo.work}
        self._counts = {w.id: w.num_samples for w in todo.work}
        self._drawn.clear()
        outcome = self._world(tp).run(todo)
        self._source.settle(outcome.kept, outcome.dropped)
        if self._planner:
            self._planner.after(todo.kind, outcome.preemptions, outcome.cache_used)
        phases |= self._after(outcome)
        step = SimStep(
            number=self._number,
            start=self._now,
            kind=todo.kind,
            tp=tp,
            phases=phases,
            outcome=outcome,
        )
        self._now += step.seconds
        self._number += 1
        return step

    def _after(self, outcome: RoundResult) -> dict[str, float]:
        """Return the seconds of each phase for the samples of a finished round."""
        training = self._plan.training
        lengths = [p + n for p, n, done in outcome.samples() if not done]
        logprobs = training.logprobs_s(lengths)
        if self._plan.overlap_logprobs:
            logprobs -= min(logprobs, outcome.idle * outcome.seconds)
        return {
            "gen": outcome.seconds,
            "reward": outcome.reward_s,
            "old_log_prob": logprobs,
            "update_actor": training.update_s(lengths) + outcome.stream_left_s + training.step_s,
            "update_weights": training.sync_s,
        }

    def _make_source(self) -> EpochPrompts | TailBatching:
        plan, next_rows = self._plan, rows_in_order()
        if plan.schedule == "all":
            return EpochPrompts(
                lambda n: [self._prompt_of(row) for _, row in next_rows(n)],
                plan.num_prompts,
                plan.num_samples,
            )
        return TailBatching(
            next_rows,
            self._prompt_of,
            num_prompts=plan.num_prompts,
            num_samples=plan.num_samples,
            eta_prompts=plan.eta_prompts,
            eta_samples=plan.eta_samples,
        )

    def _make_world(self, tp: int) -> SimSettings:
        plan, engines = self._plan, self._plan.gpus // tp
        training, rule, cost = plan.training, plan.stream, plan.costs(tp)
        elastic = None
        if rule is not None and engines > 1:
            elastic = StreamWindow(
                cells([(r,) for r in range(engines)], [(r,) for r in range(engines)]),
                cache_tokens=cost.cache_tokens if rule.checks_cache else math.inf,
                max_running=plan.max_running,
                batch_tokens=rule.batch_tokens,
                earliest=rule.earliest,
                latest=rule.latest,
                check_every=StreamConfig.check_every,
            )
        return SimSettings(
            [cost] * engines,
            self._length,
            rewards=self._rewards,
            max_running=plan.max_running,
            elastic=elastic,
            # `training` is the cost on all GPUs, but an engine has only 1/engines of the GPUs
            train_s=lambda n: engines * (training.update_s(n) + training.logprobs_s(n)),
            trains_once=rule is not None and rule.once,
        )

    def _prompt_of(self, row: int) -> Prompt:
        return Prompt(index=row, dataset="sim", tokens=self._prompt_tokens)

    def _length(self, request: Request) -> int:
        group = request.group
        if group not in self._drawn:
            self._drawn[group] = self._plan.workload.lengths(
                self._rows[group], self._counts[group], derive(self._plan.seed, group)
            )
        return self._drawn[group][response_of(request.id)]


def rows_in_order() -> Callable[[int], list[tuple[int, int]]]:
    """Return a function from n to the next n (epoch, row) pairs of an endless data set."""
    at = 0

    def next_rows(n: int) -> list[tuple[int, int]]:
        nonlocal at
        at += n
        return [(0, row) for row in range(at - n, at)]

    return next_rows


@dataclass(slots=True)
class Summary:
    """Averages over simulated steps."""

    steps: int
    seconds: float
    phases: dict[str, float]
    long_share: float
    trained_share: float
    """Share of the decoded tokens that are trained."""
    idle: float
    """Share of the rollout time in which an engine was idle, averaged over the engines."""
    preemptions: float
    tokens: float
    """Mean number of response tokens that are trained in a step."""
    streamed: float = 0.0
    """Share of the kept groups that are trained while other requests are still decoded."""
    by_kind: dict[str, float] = field(default_factory=dict)
    """Mean seconds of a step, by kind of rollout round (`all`, `short` or `long`)."""


def summarize(steps: Sequence[SimStep]) -> Summary:
    """Average one or more steps of a run."""
    mean = statistics.fmean
    outcomes = [s.outcome for s in steps]
    kinds = dict.fromkeys(s.kind for s in steps)
    rollout = sum(o.seconds for o in outcomes)
    return Summary(
        steps=len(steps),
        seconds=mean(s.seconds for s in steps),
        phases={name: mean(s.phases[name] for s in steps) for name in PHASES},
        long_share=mean(s.kind == "long" for s in steps),
        trained_share=sum(sum(o.lengths) for o in outcomes) / sum(o.decoded for o in outcomes),
        idle=sum(o.idle * o.seconds for o in outcomes) / max(rollout, 1e-30),
        preemptions=mean(o.preemptions for o in outcomes),
        tokens=mean(sum(o.lengths) for o in outcomes),
        streamed=sum(len(o.streamed) for o in outcomes)
        / max(sum(len(o.kept) for o in outcomes), 1),
        by_kind={k: mean(s.seconds for s in steps if s.kind == k) for k in kinds},
    )
