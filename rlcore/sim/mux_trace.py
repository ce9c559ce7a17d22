"""Simulate jobs that arrive at a cluster and leave after their iterations, and sum the cost of
nodes. The shipped `sched/cluster.py` places the jobs."""

import heapq
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlcore.sched.cluster import Cluster, JobGroup, MuxJob
from rlcore.sim.published_rollmux import MEAN_HOURS, SHAPES, SIGMA, SIZES, SLO, JobTrace


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job with its arrival time and its duration if it ran alone."""

    job: MuxJob
    at_s: float
    alone_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceResult:
    """Result of a simulated trace of jobs."""

    seconds: float
    """Seconds from the first arrival to the last departure."""
    bill: float
    kept: float
    """Share of jobs whose total duration was at most `slo` times their duration alone."""
    promised: float
    """Share of jobs whose planned iteration time never exceeded their SLO."""
    idle: tuple[float, float]
    """Idle share of the rented time of rollout nodes, and the same share of train nodes."""
    peak: tuple[int, int]
    moves: int
    points: list[tuple[float, float, int]]
    """Points of (seconds, cost per hour, number of jobs), after every arrival and departure."""

    @property
    def per_hour(self) -> float:
        return self.bill / (self.seconds / 3600)


@dataclass(slots=True)
class _Going:
    job: MuxJob
    came: float
    left: float
    """Number of remaining iterations at time `at`."""
    iterations: float
    period_s: float
    at: float
    version: int = 0
    worst_s: float = 0.0

    def may_move(self, now: float, move_s: float) -> bool:
        """Return whether the job would meet its SLO over its whole duration if a move costs it
        `move_s` now. All its remaining iterations are assumed to take as long as the SLO allows."""
        left = self.left - (now - self.at) / self.period_s
        budget = self.iterations * self.job.limit_s
        return now - self.came + move_s + left * self.job.limit_s <= budget

    def replan(self, now: float, period_s: float, lost_s: float) -> float:
        """Continue the job with iterations of `period_s` seconds, after a move that cost `lost_s`
        seconds. Return the new end time of the job."""
        self.left -= (now - self.at) / self.period_s
        self.at, self.period_s = now, period_s
        self.worst_s = max(self.worst_s, period_s)
        if lost_s:
            self.left += lost_s / period_s
        self.version += 1
        return now + max(0.0, self.left) * period_s


def draw_job(
    name: str,
    dice: random.Random,
    shapes: Sequence[str],
    sizes: Sequence[str],
    shares: Mapping[str, float] = SHAPES,
) -> MuxJob:
    """Draw a job at random. A shape (ratio of rollout to training) or size is more likely if the
    argument contains this shape or size several times. `shares`: share of rollout by shape."""
    share = shares[dice.choice(shapes)]
    size = SIZES[dice.choice(sizes)]
    took, nodes = dice.uniform(*size.seconds), dice.choice(size.nodes)
    return MuxJob(
        id=name,
        rollout_nodes=nodes,
        train_nodes=nodes,
        rollout_s=share * took,
        train_s=(1 - share) * took,
        slo=dice.uniform(*SLO),
        rollout_gb=size.gb,
        train_gb=size.gb,
    )


def draw_trace(
    trace: JobTrace, seed: int, *, sigma: float = SIGMA, shares: Mapping[str, float] = SHAPES
) -> list[Arrival]:
    """Draw jobs with Poisson arrivals, log-normal durations of width `sigma` and the size
    frequencies of `trace`."""
    dice = random.Random(seed)
    times = sorted(dice.uniform(0, trace.hours * 3600) for _ in range(trace.jobs))
    hours = [dice.lognormvariate(0, sigma) for _ in times]
    scale = MEAN_HOURS * len(hours) / sum(hours)
    names, weights = zip(*trace.sizes.items(), strict=True)
    out = []
    for n, (at, h) in enumerate(zip(times, hours, strict=True)):
        size = dice.choices(names, weights)
        job = draw_job(f"job {n}", dice, list(shares), size, shares)
        out.append(Arrival(job, at, h * scale * 3600))
    return out


def run_trace(
    cluster: Cluster, arrivals: Iterable[Arrival], *, repack: bool = False, move_s: float = 0.0
) -> TraceResult:
    """Simulate a trace in which every iteration takes its group's worst-case time. `move_s`:
    seconds that a move by `repack` costs a job; a job that would then miss its SLO does not move.
    If a job gets no nodes, raise RuntimeError."""
    going: dict[str, _Going] = {}
    events: list[tuple[float, int, str, int, Arrival | None]] = []
    todo = sorted(arrivals, key=lambda a: a.at_s)
    for n, a in enumerate(todo):
        heapq.heappush(events, (a.at_s, n, a.job.id, 0, a))
    now = start = todo[0].at_s
    count = len(todo)
    busy, rented = [0.0, 0.0], [0.0, 0.0]
    kept = promised = moves = 0
    bill, peak = 0.0, (0, 0)
    points: list[tuple[float, float, int]] = []
    while events:
        at, _, name, version, arrival = heapq.heappop(events)
        if arrival is None and (name not in going or going[name].version != version):
            continue
        _account(cluster, at - now, busy, rented)
        bill += cluster.cost * (at - now) / 3600
        now = at
        moved: dict[str, int] = {}
        if arrival is not None:
            job = arrival.job
            made = cluster.admit(job)
            if made.group is None:
                raise RuntimeError(made.explain())
            iterations = arrival.alone_s / job.solo_s
            going[name] = _Going(job, now, iterations, iterations, job.solo_s, now)
            groups = [cluster.group_of(name)]
            seeds = [name] if made.added else []
        else:
            one = going.pop(name)
            alone = one.iterations * one.job.solo_s
            kept += now - one.came <= one.job.slo * alone * (1 + 1e-9)
            promised += one.worst_s <= one.job.limit_s * (1 + 1e-9)
            left = cluster.leave(name)
            groups = [left] if left is not None else []
            seeds = [next(iter(left.jobs))] if left is not None else []
        for seed in seeds if repack else []:
            fixed = {n for n, g in going.items() if n != name and not g.may_move(now, move_s)}
            for move in cluster.repack(seed, fixed):
                moved[move.job] = move.group
                moves += move.job != name
        touched = {id(g): g for g in groups if cluster.groups.get(g.id) is g}
        touched |= {id(g): g for g in cluster if moved.keys() & g.jobs.keys()}
        if moved:  # a move also changes the groups that the moved jobs have left
            touched = {id(g): g for g in cluster}
        for group in touched.values():
            count = _replan(group, going, now, events, count, moved, move_s, new=name)
        used = cluster.nodes
        peak = max(peak[0], used[0]), max(peak[1], used[1])
        points.append((now, cluster.cost, len(going)))
    return TraceResult(
        seconds=now - start,
        bill=bill,
        kept=kept / len(todo),
        promised=promised / len(todo),
        idle=(1 - busy[0] / rented[0], 1 - busy[1] / rented[1]),
        peak=peak,
        moves=moves,
        points=points,
    )


def _account(cluster: Cluster, seconds: float, busy: list[float], rented: list[float]) -> None:
    for g in cluster:
        rounds = seconds / g.period_s
        busy[0] += rounds * sum(j.rollout_s * j.rollout_nodes for j in g.jobs.values())
        rented[0] += seconds * len(g.load)
        nodes = len(g.train)
        busy[1] += rounds * nodes * sum(j.train_on(nodes) for j in g.jobs.values())
        rented[1] += seconds * nodes


def _replan(
    group: JobGroup,
    going: dict[str, _Going],
    now: float,
    events: list[tuple[float, int, str, int, Arrival | None]],
    count: int,
    moved: dict[str, int],
    move_s: float,
    new: str,
) -> int:
    """Apply the group's new period to all of its jobs, and queue the new end time of each job."""
    for name in group.jobs:
        one = going[name]
        lost_s = move_s if name in moved and name != new else 0.0
        end = one.replan(now, group.period_s, lost_s)
        count += 1
        heapq.heappush(events, (end, count, name, one.version, None))
    return count
