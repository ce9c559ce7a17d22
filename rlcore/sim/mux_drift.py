"""Simulate a cluster of jobs whose rollouts become longer or shorter while they run."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlcore.sched.cluster import Cluster, MuxJob, NodePool
from rlcore.sim.mux_trace import Arrival

HOUR = 3600.0


class Following(Cluster):
    """Cluster whose jobs have the durations that were measured last, and stay where they are."""

    def follow(self, job: MuxJob) -> None:
        """Replace the profile of a job, even if a job of its group then misses its SLO."""
        group = self.group_of(job.id)
        group.jobs[job.id] = job
        group._refresh()


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

    @property
    def now(self) -> MuxJob:
        """The job with its present durations."""
        part = min(1.0, self.done / self.iterations)
        return replace(self.job, rollout_s=self.job.rollout_s * (1 + self.change * part))

    def advance(self, seconds: float, period_s: float) -> float:
        """Run iterations of `period_s` for up to `seconds`. Return the seconds that were used."""
        ran = min(seconds / period_s, self.iterations - self.done)
        self.done += ran
        self.allowed_s += ran * self.now.limit_s
        return ran * period_s


@dataclass(frozen=True, slots=True)
class DriftResult:
    """Result of a simulated trace of jobs that drift."""

    bill: float
    kept: float
    """Share of the jobs that took at most their SLO, by the durations that they had."""


def run(
    pools: tuple[NodePool, NodePool],
    arrivals: Sequence[Arrival],
    drift: float,
    seed: int,
    *,
    placed_again: bool = False,
) -> DriftResult:
    """Simulate a trace hour by hour. Over its life, a job's rollouts change by up to the share
    `drift`, in either direction; durations are measured every hour, and new jobs are placed by
    them. With `placed_again`, all jobs are placed anew every hour, as if moves cost nothing. If a
    job gets no nodes, raise RuntimeError."""
    dice = random.Random(seed)
    todo = sorted(arrivals, key=lambda a: a.at_s)
    changes = [dice.uniform(-drift, drift) for _ in todo]
    cluster, going = Following(*pools), dict[str, _Drifting]()
    bill, now, kept, first = 0.0, todo[0].at_s, 0, 0
    while first < len(todo) or going:
        while first < len(todo) and todo[first].at_s < now + HOUR:
            a = todo[first]
            iterations = a.alone_s / a.job.solo_s
            going[a.job.id] = _Drifting(a.job, changes[first], iterations, came=now)
            _admit(cluster, a.job)
            first += 1
        if placed_again:
            cluster = Following(*pools)
            for one in sorted(going.values(), key=lambda g: -g.now.rollout_nodes * g.now.rollout_s):
                _admit(cluster, one.now)
        bill += cluster.cost
        for name, one in list(going.items()):
            used = one.advance(HOUR, cluster.group_of(name).period_s)
            if one.done >= one.iterations:
                kept += now + used - one.came <= one.allowed_s * (1 + 1e-9)
                del going[name]
                cluster.leave(name)
        for one in going.values():
            cluster.follow(one.now)
        now += HOUR
    return DriftResult(bill, kept / len(todo))


def _admit(cluster: Cluster, job: MuxJob) -> None:
    made = cluster.admit(job)
    if made.group is None:
        raise RuntimeError(made.explain())
