"""Simulate a job on a virtual cluster: steps of rollout, reward, training and weight update."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from rlcore.config import rules
from rlcore.data.data_order import ShuffledEpochs
from rlcore.records import GroupId, Prompt, Request, Sampling, Work, group_of, response_of
from rlcore.sched.prompt_source import EpochPrompts
from rlcore.sched.roles import EngineSizePolicy
from rlcore.sim.async_rollout import SimAsyncRollout, Update
from rlcore.sim.job import SimJob
from rlcore.sim.phases import TrainingWork
from rlcore.sim.round import RoundResult, SimSettings
from rlcore.trainer import policies
from rlcore.trainer.plan import TrainRow
from rlcore.utils.seed import derive

PHASES = ("gen", "reward", "old_log_prob", "update_actor", "update_weights", "resize_engines")
"""Phases of a step in order, except that `resize_engines` comes first. `gen` lasts until the end of
the round and includes scoring during the round; `reward` is the scoring after the round. In an
asynchronous job, `gen` is the learner's wait for samples."""
REPORT_S = 5.0
"""Seconds between reports of lengths, where a policy needs them. Real engines report more often;
so few cost the simulation little, and a response gains some 500 tokens in that time."""


@dataclass(slots=True, kw_only=True)
class SimStep:
    """One step of a run. Times are virtual seconds; `start` counts from the start of the run."""

    number: int
    start: float
    kind: str
    tp: int
    phases: dict[str, float]
    outcome: RoundResult
    work: TrainingWork
    """Work of the update."""

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


class SimPrompts:
    """Prompts of a simulated job, and the lengths of their responses."""

    def __init__(self, job: SimJob) -> None:
        self._job = job
        self._rows: dict[GroupId, int] = {}
        self._drawn: dict[GroupId, Sequence[int]] = {}
        self._counts: dict[GroupId, int] = {}
        self._tokens = np.broadcast_to(np.int32(0), job.workload.prompt_tokens)
        self.sampling = Sampling(max_tokens=job.workload.cap)
        rows = job.cfg.data.num_prompts or None
        self.source = policies.make_source(
            job.cfg, ShuffledEpochs(rows, job.cfg.run.seed, job.cfg.data.shuffle), self._prompt
        )

    def _prompt(self, row: int) -> Prompt:
        return Prompt(index=row, dataset="sim", tokens=self._tokens)

    def start(self, work: Iterable[Work]) -> None:
        """Remember which rows the groups of `work` belong to."""
        for w in work:
            self._rows[w.id], self._counts[w.id] = w.prompt.index, w.num_samples

    def forget(self) -> None:
        """Forget all groups: their round is over."""
        self._rows.clear()
        self._counts.clear()
        self._drawn.clear()

    def row(self, request: Request) -> int:
        """Return the data set row of a request's prompt."""
        return self._rows[group_of(request.id)]

    def length(self, request: Request) -> int:
        """Return the length of a request's response. The lengths of a group are drawn together."""
        group = group_of(request.id)
        if group not in self._drawn:
            self._drawn[group] = self._job.workload.lengths(
                self._rows[group], self._counts[group], derive(self._job.cfg.run.seed, group)
            )
        return self._drawn[group][response_of(request.id)]


class SimRun:
    """Simulation of a job with --mode sync or stream."""

    def __init__(self, job: SimJob) -> None:
        self._job = job
        self._prompts = SimPrompts(job)
        self._rewards = job.rewards(self._prompts.row)
        self._planner = _planner(job)
        self._tp = job.cfg.rollout.tp
        self._world = cache(self._make_world)
        self._now = 0.0
        self._number = 0

    def steps(self, count: int) -> Iterator[SimStep]:
        """Simulate the next `count` steps. If the controller fails a round, raise RuntimeError."""
        for _ in range(count):
            yield self._step()

    def _step(self) -> SimStep:
        job, source = self._job, self._prompts.source
        todo = source.next_round(self._prompts.sampling)
        tp = self._planner.size(todo.kind) if self._planner else job.cfg.rollout.tp
        phases = dict.fromkeys(PHASES, 0.0)
        if tp != self._tp:
            phases["resize_engines"], self._tp = job.resize_s(tp), tp
        self._prompts.start(todo.work)
        outcome = self._world(tp).run(todo)
        source.settle(outcome.kept, outcome.dropped)
        self._prompts.forget()
        if self._planner:
            self._planner.after(todo.kind, outcome.preemptions, outcome.cache_used)
        work = job.training.work(outcome.rows())
        phases |= self._after(outcome, work)
        step = SimStep(
            number=self._number,
            start=self._now,
            kind=todo.kind,
            tp=tp,
            phases=phases,
            outcome=outcome,
            work=work,
        )
        self._now += step.seconds
        self._number += 1
        return step

    def _after(self, outcome: RoundResult, work: TrainingWork) -> dict[str, float]:
        """Return the seconds of each phase for a finished round and the training on it."""
        training = self._job.training
        logprobs = training.logprobs_s(work)
        if self._job.overlap_logprobs:
            logprobs -= min(logprobs, outcome.idle * outcome.seconds)
        update_s = training.update_s(work) + training.step_s + training.offload_s
        return {
            "gen": outcome.seconds,
            "reward": outcome.reward_s,
            "old_log_prob": logprobs,
            "update_actor": update_s + outcome.stream_left_s,
            "update_weights": training.sync_s,
        }

    def _make_world(self, tp: int) -> SimSettings:
        job, training = self._job, self._job.training
        cfg = policies.with_tp(job.cfg, tp)
        cost = job.engine(tp)
        first = job.gpus - job.rollout_gpus
        elastic = policies.make_elastic(cfg, job.hf, job.gpus)

        def train_s(rows: Sequence[TrainRow], groups: int) -> float:
            some = replace(training, dp=groups)
            work = some.work(rows)
            return (some.update_s(work) + some.logprobs_s(work)) * training.dp / groups

        return SimSettings(
            [cost] * (job.rollout_gpus // tp),
            self._prompts.length,
            ranks=range(first, job.gpus, tp),
            rewards=self._rewards,
            max_running=cfg.rollout.max_running_requests,
            drafts=job.drafts,
            row_of=self._prompts.row,
            elastic=elastic,
            train_s=train_s,
            load_s=job.offload_s / 2,
            controller=partial(policies.make_controller, cfg, job.gpus),
            report_s=REPORT_S if elastic is not None else 0.0,
        )


def _planner(job: SimJob) -> EngineSizePolicy | None:
    def problems(tp: int) -> list[str]:
        found = rules.of_world(policies.with_tp(job.cfg, tp), job.gpus, job.gpu.per_node)
        if not found and (problem := job.problem(tp)):
            found.append(problem)
        return found

    return policies.size_policy(job.cfg, job.gpu.per_node, problems)


class SimAsyncRun:
    """Simulation of a job with --mode async."""

    def __init__(self, job: SimJob) -> None:
        self._job, self._prompts = job, SimPrompts(job)
        cfg, source = job.cfg, self._prompts.source
        assert isinstance(source, EpochPrompts)
        first, tp = job.train_gpus, cfg.rollout.tp

        def issue(count: int) -> list[Work]:
            work = source.issue(count, self._prompts.sampling)
            self._prompts.start(work)
            return work

        world = SimSettings(
            [job.engine(tp)] * (job.rollout_gpus // tp),
            self._prompts.length,
            ranks=range(first, job.gpus, tp),
            rewards=job.rewards(self._prompts.row),
            max_running=cfg.rollout.max_running_requests,
            drafts=job.drafts,
            row_of=self._prompts.row,
            report_s=REPORT_S if cfg.rollout.routing == "histopipe" else 0.0,
        )
        training = job.training
        self.rollout = SimAsyncRollout(
            world,
            policies.make_async_controller(cfg, job.gpus, issue),
            train_s=job.train_s,
            sync_s=training.sync_s,
            mode=cfg.async_.weight_update,
        )

    def updates(self, count: int) -> list[Update]:
        """Simulate the next `count` training steps."""
        return self.rollout.run(count)


def simulate(job: SimJob, steps: int, skip: int = 0) -> "Summary":
    """Return the averages of `steps` steps of a job after the first `skip`. Of an asynchronous job,
    at least the steps until the buffer is full are left out."""
    if job.cfg.select.mode != "async":
        return summarize(list(SimRun(job).steps(skip + steps))[skip:])
    run = SimAsyncRun(job)
    run.updates(max(skip, math.ceil(job.cfg.async_.alpha) + 1))
    return summarize_updates(job, run.rollout, run.updates(steps))


@dataclass(slots=True)
class Summary:
    """Averages over simulated steps."""

    steps: int
    seconds: float
    phases: dict[str, float]
    long_share: float
    trained_share: float
    """Share of the decoded tokens that are trained. In an asynchronous job, tokens of unfinished
    responses and of the buffer are not counted, as they may still be trained."""
    idle: float
    """Share of the rollout time in which an engine was idle, averaged over the engines."""
    preemptions: float
    tokens: float
    """Mean number of response tokens that are trained in a step."""
    computed: float = 0.0
    """Mean number of prompt and response tokens that an update computes."""
    squares: float = 0.0
    """Mean sum of the squared lengths of samples, as far as an update computes them."""
    prefill_tokens: float = 0.0
    """Mean number of tokens that engines prefill in a step."""
    cached_tokens: float = 0.0
    """Mean number of prompt tokens that another request had in the KV cache."""
    streamed: float = 0.0
    """Share of the kept groups that are trained while other requests are still decoded."""
    by_kind: dict[str, float] = field(default_factory=dict)
    """Mean seconds of a step, by kind of rollout round (`all`, `short` or `long`)."""
    age: float = 0.0
    """Mean age of the samples in policy versions."""


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
        computed=mean(s.work.tokens for s in steps),
        squares=mean(s.work.squares for s in steps),
        prefill_tokens=mean(o.stats["sched/prefill_tokens"] for o in outcomes),
        cached_tokens=mean(o.stats["sched/cached_tokens"] for o in outcomes),
        streamed=sum(len(o.streamed) for o in outcomes)
        / max(sum(len(o.kept) for o in outcomes), 1),
        by_kind={k: mean(s.seconds for s in steps if s.kind == k) for k in kinds},
    )


def summarize_updates(job: SimJob, rollout: SimAsyncRollout, updates: Sequence[Update]) -> Summary:
    """Average one or more steps of an asynchronous job."""
    mean = statistics.fmean
    phases = dict.fromkeys(PHASES, 0.0)
    phases["gen"] = mean(u.waited for u in updates)
    phases["update_weights"] = job.training.sync_s
    phases["update_actor"] = mean(u.seconds - u.waited for u in updates) - job.training.sync_s
    work = [job.training.work(u.rows) for u in updates]
    trained = sum(sum(u.lengths) for u in rollout.updates)
    return Summary(
        steps=len(updates),
        seconds=mean(u.seconds for u in updates),
        phases=phases,
        long_share=0.0,
        trained_share=trained / (trained + rollout.discarded),
        idle=1 - rollout.busy,
        preemptions=rollout.preemptions / len(rollout.updates),
        tokens=mean(sum(u.lengths) for u in updates),
        computed=mean(w.tokens for w in work),
        squares=mean(w.squares for w in work),
        prefill_tokens=rollout.prefilled / len(rollout.updates),
        cached_tokens=rollout.cached / len(rollout.updates),
        age=mean(age for u in updates for age in u.ages),
    )
