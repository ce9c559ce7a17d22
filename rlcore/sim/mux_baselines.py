"""Baselines for RollMux's placement of jobs: the cheapest possible partition into groups, and
simpler policies."""

import math
import random
from collections import Counter
from collections.abc import Sequence

from rlcore.sched.cluster import ROUNDING, Cluster, Decision, JobGroup, MuxJob, NodePool, Nodes
from rlcore.sched.partition import cheapest_partition


class Careless(Cluster):
    """Scheduler that checks only host memory, and ignores saturation and SLOs."""

    def _limit(self, group: JobGroup, job: MuxJob) -> float:
        return math.inf


class Greedy(Careless):
    """Scheduler that places a job where the additional cost is lowest; ties go to the group with
    the highest utilization."""


class Random(Careless):
    """Scheduler that picks a group at random: a new one, or any with enough host memory."""

    def __init__(self, rollout: NodePool, train: NodePool, seed: int) -> None:
        super().__init__(rollout, train)
        self._dice = random.Random(seed)

    def admit(self, job: MuxJob, on: Nodes | None = None) -> Decision:
        """Place a job as `Cluster.admit` does, but at random."""
        assert on is None, "placed at random, not on fixed nodes"
        passed: Counter[str] = Counter()
        offers = [self._isolated(job), *self._offers(job, passed)]
        chosen = self._dice.choice([o for o in offers if o is not None])
        return self._place(job, chosen, passed)


def optimum(jobs: Sequence[MuxJob], rollout: NodePool, train: NodePool) -> float:
    """Return the lowest cost per hour of any partition of these jobs into groups that meet all
    SLOs. The search is dynamic programming over subsets of jobs.

    The cost is a lower bound: the formula for a group's iteration time is a lower bound, and the
    node sets of jobs may overlap arbitrarily.

    Raises:
        ValueError: there are more than 12 jobs.
    """
    pools = (rollout, train)

    def cost_of(members: tuple[int, ...]) -> float | None:
        return group_cost([jobs[n] for n in members], pools)

    return cheapest_partition(len(jobs), cost_of)[0]


def group_cost(jobs: Sequence[MuxJob], pools: tuple[NodePool, NodePool]) -> float | None:
    """Return the lowest cost per hour of one group; None if no number of nodes meets all SLOs."""
    rollout, train = pools
    if len(jobs) == 1:
        return jobs[0].rollout_nodes * rollout.price + jobs[0].train_nodes * train.price
    limit = min(j.limit_s for j in jobs) * ROUNDING
    if sum(j.train_gb for j in jobs) > train.memory_gb:
        return None
    least = max(j.train_nodes for j in jobs)
    most = sum(j.train_nodes for j in jobs) if any(j.train_scaling for j in jobs) else least
    best: float | None = None
    for nodes in range(least, most + 1):
        load = sum(j.train_on(nodes) + train.switch_s for j in jobs)
        cycle = max(j.rollout_s + j.train_on(nodes) + j.sync_s for j in jobs)
        if max(load, cycle + rollout.switch_s + train.switch_s) > limit:
            continue
        found = least_nodes(jobs, limit, rollout)
        cost = found * rollout.price + nodes * train.price
        best = cost if best is None else min(best, cost)
    return best


def least_nodes(jobs: Sequence[MuxJob], limit: float, pool: NodePool) -> int:
    """Return the minimum number of rollout nodes with at most `limit` seconds of load on each. Each
    job takes `rollout_nodes` distinct nodes. The search is branch and bound."""
    order = sorted(jobs, key=lambda j: (-j.rollout_nodes, -j.rollout_s))
    best = sum(j.rollout_nodes for j in jobs)
    loads: list[float] = []
    memory: list[float] = []

    def place(at: int, node: int, left: int) -> None:
        """Place job `order[at]` on `left` more nodes with index >= `node`, then the next jobs."""
        nonlocal best
        if len(loads) >= best:
            return
        if left == 0:
            at += 1
            if at == len(order):
                best = len(loads)
                return
            node, left = 0, order[at].rollout_nodes
        job = order[at]
        took = job.rollout_s + pool.switch_s
        seen = set()
        for n in range(node, len(loads)):
            fits = loads[n] + took <= limit and memory[n] + job.rollout_gb <= pool.memory_gb
            if not fits or (left == 1 and (loads[n], memory[n]) in seen):
                continue
            seen.add((loads[n], memory[n]))
            loads[n] += took
            memory[n] += job.rollout_gb
            place(at, n + 1, left - 1)
            loads[n] -= took
            memory[n] -= job.rollout_gb
        before = len(loads)
        loads.extend([took] * left)
        memory.extend([job.rollout_gb] * left)
        place(at, len(loads), 0)
        del loads[before:], memory[before:]

    place(0, 0, order[0].rollout_nodes)
    return best
