"""Simulate a cluster of jobs whose rollouts become longer or shorter while they run."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlcore.sched import drift
from rlcore.sched.cluster import Cluster, JobGroup, MuxJob, NodePool
from rlcore.sim.mux_trace import Arrival
from rlcore.sim.published_rollmux import COLD_S

HOUR = 3600.0


@dataclass(slots=True)
class _Drifting:
    job: MuxJob
    change: float
    """Change of the rollout's duration from the first to the last iteration, relative."""
    iterations: float
    came: float
    done: float = 0.0
    allowed_s: float = 0.0
    """Seconds that the SLO allows for the iterations that are done."""
    lost_s: float = 0.0
    """Seconds of the next hour that are lost to a cold start."""

    @property
    def now(self) -> MuxJob:
        """The job with its present durations."""
        part = min(1.0, self.done / self.iterations)
        return replace(self.job, rollout_s=self.job.rollout_s * (1 + self.change * part))

    def advance(self, seconds: float, period_s: float) -> float:
        """Run iterations of `period_s` for up to `seconds`. Return the seconds that were used."""
        lost, self.lost_s = self.lost_s, 0.0
        ran = min((seconds - lost) / period_s, self.iterations - self.done)
        self.done += ran
        self.allowed_s += ran * self.now.limit_s
        return lost + ran * period_s

    def start_cold(self) -> None:
        self.lost_s = COLD_S["OSDI"]


@dataclass(frozen=True, slots=True)
class DriftResult:
    """Result of a simulated trace of jobs that drift."""

    bill: float
    kept: float
    """Share of the jobs that took at most their SLO, by the durations that they had."""


def run(
    pools: tuple[NodePool, NodePool],
    arrivals: Sequence[Arrival],
    share: float,
    seed: int,
    *,
    placed_again: bool = False,
) -> DriftResult:
    """Simulate a trace hour by hour. Over its life, a job's rollouts change by up to `share`, in
    either direction. As in the arbiter, a job that has become slower than its profile by more than
    a tenth (`sched/drift.py`) gets a new profile; if a job of its group would then miss its SLO, it
    joins again, with a cold start. With `placed_again`, all jobs are placed anew every hour by
    their present durations, as if moves cost nothing. If a job gets no nodes, raise RuntimeError.
    """
    dice = random.Random(seed)
    todo = sorted(arrivals, key=lambda a: a.at_s)
    changes = [dice.uniform(-share, share) for _ in todo]
    cluster, going = Cluster(*pools), dict[str, _Drifting]()
    bill, now, kept, first = 0.0, todo[0].at_s, 0, 0
    while first < len(todo) or going:
        while first < len(todo) and todo[first].at_s < now + HOUR:
            a = todo[first]
            iterations = a.alone_s / a.job.solo_s
            going[a.job.id] = _Drifting(a.job, changes[first], iterations, came=now)
            _admit(cluster, a.job)
            first += 1
        if placed_again:
            cluster = Cluster(*pools)
            for one in sorted(going.values(), key=lambda g: -g.now.rollout_nodes * g.now.rollout_s):
                _admit(cluster, one.now)
        bill += cluster.cost
        periods = {name: _period_s(cluster.group_of(name), going) for name in going}
        for name, one in list(going.items()):
            used = one.advance(HOUR, periods[name])
            if one.done >= one.iterations:
                kept += now + used - one.came <= one.allowed_s * (1 + 1e-9)
                del going[name]
                cluster.leave(name)
        for one in going.values():
            _reprofile(cluster, one)
        now += HOUR
    return DriftResult(bill, kept / len(todo))


def _reprofile(cluster: Cluster, one: _Drifting) -> None:
    now, profile = one.now, cluster.group_of(one.job.id).jobs[one.job.id]
    recent = [now.rollout_s] * drift.TOO_MANY
    if drift.drifted(recent, profile.rollout_s) is None or cluster.reprofile(now):
        return
    cluster.leave(now.id)
    _admit(cluster, now)
    one.start_cold()


def _period_s(group: JobGroup, going: Mapping[str, _Drifting]) -> float:
    """Return the seconds of an iteration by the present durations of the group's jobs."""
    jobs = {name: going[name].now for name in group.jobs}
    return JobGroup(group.id, group.pools, jobs, group.pinned, group.train).period_s


def _admit(cluster: Cluster, job: MuxJob) -> None:
    made = cluster.admit(job)
    if made.group is None:
        raise RuntimeError(made.explain())
