"""Place jobs on shared nodes: RollMux's inter-group scheduler (arXiv 2512.11306, Algorithm 1).

A job samples on rollout nodes and trains on train nodes. Without sharing, its train nodes idle
during a rollout, and its rollout nodes during training. So the jobs of a group alternate on the
group's nodes. Each job is pinned to some rollout nodes of the group, where its state stays in host
memory. It trains on all train nodes of the group. If all jobs run in one cyclic order
(`phase_mux.py`), an iteration of every job takes

    period = max(T_cycle, T_load)
    T_cycle = max over jobs of rollout + train + sync
    T_load  = max over nodes of the phases that run there

In a group of several jobs, every phase time includes the switch from another job. The formula is a
lower bound. If several nodes and jobs are nearly as busy as the busiest node, a job may wait for
another job in every second round. This wait occurs in one of a hundred random groups (phases in
whole seconds) and adds up to a fifth to the period. Offers (possible placements) use the formula,
but `_period` checks the full order before an offer is taken. Profiles are worst cases. In a fixed
order, a shorter phase never makes another phase start later. So

    period <= slo x T_solo    for every job of the group

is a guarantee, not an estimate. A job is placed where it adds least to the cost: on nodes of a
group, in a group that rents more nodes for it, or in a new group. Groups without slack (T_load >=
T_cycle) are skipped.

A colocated job samples and trains on all of its nodes, so no node idles for other jobs. It holds
its nodes in both pools for a whole iteration. In a group with colocated jobs, a round starts with
all nodes free. First each other job does one rollout and one training. Then the colocated jobs run,
one after the other. With all switches included, the period is then at most

    period = makespan(others, in the cyclic order) + sum over colocated jobs of T_solo

This is a guarantee, too, because a job that does not have to wait only starts earlier. Colocated
jobs fill no idle time, so T_load is the period, and every group with a colocated job is saturated.
Groups with colocated jobs are not skipped; the SLO limits how much time jobs share.

Differences from the paper: the paper uses the formula as the exact period, has no colocated jobs in
groups, and never moves a job; here `repack` moves jobs. Here a group with too few train nodes for a
job may rent more. Rollout node sets of a group's jobs are nested or disjoint. Otherwise a cyclic
order can take far longer than the busiest node (see `tests/unit/test_sched_phase_mux.py`). More
nodes speed up a phase only if the profile says so."""

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, islice
from typing import Any, Literal, NamedTuple

from rlcore.sched.partition import MOST_JOBS, cheapest_partition

Kind = Literal["packed", "scaled", "isolated", "queued", "refused"]
MOST_PLACEMENTS = 256
"""Maximum number of node sets to try in one group for a job that needs several nodes."""
ROUNDING = 1 + 1e-12
TO_BE_TAKEN = 10**9
"""First of the placeholder numbers that stand for nodes not allocated yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MuxJob:
    """Profile of a job for admission: worst-case times on its own nodes, with every response at its
    length limit."""

    id: str
    rollout_nodes: int
    train_nodes: int
    rollout_s: float
    train_s: float
    sync_s: float = 0.0
    """Seconds of the weight update, while the job waits and its nodes are free for other jobs."""
    slo: float = 2.0
    """Maximum iteration time, as a multiple of the job's iteration time without other jobs."""
    rollout_gb: float = 0.0
    """Host memory in GB that the job occupies on each of its rollout nodes while it runs."""
    train_gb: float = 0.0
    train_scaling: float = 0.0
    """Exponent e of the training speed-up: with n times as many train nodes, training takes n**-e
    of the time. 0: no speed-up; 1: linear."""
    colocated: bool = False
    """Whether the job samples and trains on all its nodes and holds them for whole iterations."""

    def __post_init__(self) -> None:
        def check(is_good: bool, name: str, allowed: str) -> None:
            if not is_good:
                raise ValueError(f"job {self.id}: {name} {getattr(self, name)}: must be {allowed}")

        for name in ("rollout_nodes", "train_nodes"):
            check(getattr(self, name) >= 1, name, "at least 1")
        for name in ("rollout_s", "train_s"):
            value = getattr(self, name)
            check(value > 0 and math.isfinite(value), name, "above 0 s; profile the job")
        for name in ("sync_s", "rollout_gb", "train_gb"):
            value = getattr(self, name)
            check(value >= 0 and math.isfinite(value), name, "at least 0")
        check(self.slo >= 1, "slo", "at least 1 (1: as fast as the job alone)")
        check(0 <= self.train_scaling <= 1, "train_scaling", "from 0 to 1")
        check(not (self.colocated and self.train_scaling), "train_scaling", "0 for a colocated job")

    @property
    def solo_s(self) -> float:
        """Seconds of an iteration when the job shares nodes with no other job."""
        return self.rollout_s + self.train_s + self.sync_s

    @property
    def limit_s(self) -> float:
        """Maximum seconds of an iteration that the SLO allows."""
        return self.slo * self.solo_s

    @property
    def busy_s(self) -> tuple[float, float]:
        """Seconds per iteration in which the job holds its rollout nodes and its train nodes."""
        return (self.solo_s, self.solo_s) if self.colocated else (self.rollout_s, self.train_s)

    def train_on(self, nodes: int) -> float:
        """Return the seconds that the job's training takes on `nodes` nodes."""
        if nodes == self.train_nodes or not self.train_scaling:
            return self.train_s
        return self.train_s * (self.train_nodes / nodes) ** self.train_scaling


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePool:
    """A pool of identical nodes."""

    nodes: int | None = None
    """Number of nodes in the pool; None: unlimited."""
    price: float = 1.0
    """Price of a node per hour."""
    memory_gb: float = math.inf
    """Host memory of a node in GB, available for the states of the jobs pinned to the node."""
    switch_s: float = 0.0
    """Seconds to switch a node to the phase of another job whose state is in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Nodes on which a job's processes already run, so the job cannot be placed elsewhere."""

    rollout: tuple[int, ...]
    train: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of the admission of a job."""

    job: str
    kind: Kind
    """`packed`: the job uses existing nodes of a group. `scaled`: the group rents more nodes.
    `isolated`: the job gets a new group. `queued`: the job waits. `refused`: it can never run."""
    group: int | None
    rollout: tuple[int, ...]
    """Rollout nodes to which the job is pinned."""
    train: tuple[int, ...]
    added: float
    """Cost per hour of the nodes that are added for the job."""
    period_s: float
    """Worst-case seconds of an iteration, equal for all jobs of the group."""
    slowdown: float
    """Ratio of `period_s` to an iteration of the job without other jobs."""
    passed: Mapping[str, int]
    """Number of groups that could not take the job, by reason."""
    why: str = ""

    @classmethod
    def without_nodes(
        cls, job: str, kind: Kind, why: str, passed: Mapping[str, int] | None = None
    ) -> "Decision":
        """Make the decision for a job that gets no nodes."""
        passed = dict(passed or {})
        return cls(job, kind, None, (), (), 0.0, math.inf, math.inf, passed, why)

    def explain(self) -> str:
        """Return the decision as one or two sentences for the log of the job."""
        others = ", ".join(f"{n} {reason}" for reason, n in sorted(self.passed.items()))
        others = f"; other groups: {others}" if others else ""
        if self.group is None:
            return f"job {self.job} is {self.kind}: {self.why}{others}"
        how = {
            "packed": f"shares nodes of group {self.group}",
            "scaled": f"joins group {self.group}, which rents more nodes",
            "isolated": f"gets its own nodes (group {self.group})",
        }[self.kind]
        return (
            f"job {self.job} {how}: rollout {_names(self.rollout)}, train {_names(self.train)}, "
            f"+{self.added:.2f} per hour, at most {self.period_s:.1f} s per iteration, "
            f"{self.slowdown:.2f}x the time alone{others}"
        )


@dataclass(frozen=True, slots=True)
class JobMove:
    """Instruction to move a job, with its state, to other nodes."""

    job: str
    group: int
    rollout: tuple[int, ...]
    train: tuple[int, ...]


def _names(nodes: Sequence[int]) -> str:
    return "+".join(map(str, nodes))


class _NodeUse(NamedTuple):
    """Rollout nodes of a job, and the seconds of its phases, in every round."""

    nodes: tuple[int, ...]
    rollout_s: float
    train_s: float
    sync_s: float


def _repeats(uses: Sequence[_NodeUse], period: float) -> bool:
    """Return whether a new round can begin every `period` seconds. Times are relative to the start
    of a round. If the period is long enough, waiting times stop growing after a few rounds."""
    nodes = {n for use in uses for n in use.nodes}
    free, back, trained = dict.fromkeys(nodes, 0.0), [0.0] * len(uses), 0.0
    tiny = 1e-12 * period
    for _ in range(2 * len(uses) + len(nodes) + 2):  # delays stop growing in fewer rounds, or never
        before = [*free.values(), *back, trained]
        for at, use in enumerate(uses):
            sampled = max(0.0, back[at], *(free[n] for n in use.nodes)) + use.rollout_s
            for n in use.nodes:
                free[n] = sampled
            trained = max(trained, sampled) + use.train_s
            back[at] = max(0.0, trained + use.sync_s - period)
        free = {n: max(0.0, end - period) for n, end in free.items()}
        trained = max(0.0, trained - period)
        now = [*free.values(), *back, trained]
        if all(new <= old + tiny for new, old in zip(now, before, strict=True)):
            return True
    return False


def _period(uses: Sequence[_NodeUse], least: float) -> float:
    """Find the shortest sustainable period that is at least `least`, by bisection. The result is
    never shorter than this period, and longer by a factor of at most 1 + 1e-12."""
    if _repeats(uses, least):
        return least
    low, high = least, sum(use.rollout_s + use.train_s + use.sync_s for use in uses)
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if _repeats(uses, middle) else (middle, high)
    return high


class JobGroup:
    """Group of jobs that alternate on the same nodes."""

    __slots__ = (  # `__slots__` saves time when thousands of groups are built
        "_chain",
        "_period_s",
        "_train_gb",
        "_train_sum",
        "cycle_s",
        "has_colocated",
        "id",
        "jobs",
        "limit_s",
        "load",
        "load_s",
        "pinned",
        "pools",
        "train",
    )

    def __init__(
        self,
        id: int,
        pools: tuple[NodePool, NodePool],
        jobs: Mapping[str, MuxJob] | None = None,
        pinned: Mapping[str, tuple[int, ...]] | None = None,
        train: tuple[int, ...] = (),
    ) -> None:
        """Make a group. `id`: number of the group; negative for a candidate group. `pinned`:
        rollout nodes by job, in ascending order. `train`: train nodes, used by all jobs."""
        self.id = id
        self.pools = pools
        self.jobs = dict(jobs or {})
        self.pinned = dict(pinned or {})
        """Rollout nodes of each job."""
        self.load: dict[int, tuple[float, int, float]] = {}
        """Seconds of rollouts per round, number of jobs and host memory in GB, by rollout node."""
        self.train = train
        self._refresh()

    def _refresh(self) -> None:
        self._period_s = 0.0
        nodes = max(len(self.train), 1)
        self.limit_s = min((j.limit_s for j in self.jobs.values()), default=math.inf)
        self._train_sum, self._chain = self.training(nodes)
        self._train_gb = sum(j.train_gb for j in self.jobs.values())
        load: dict[int, tuple[float, int, float]] = {}
        for name, nodes_of in self.pinned.items():
            job = self.jobs[name]
            for node in nodes_of:
                seconds, count, gb = load.get(node, (0.0, 0, 0.0))
                load[node] = (seconds + job.busy_s[0], count + 1, gb + job.rollout_gb)
        self.load = load
        to_rollout, to_train = self.switches(len(self.jobs))
        self.cycle_s = self._chain + to_rollout + to_train
        """T_cycle: seconds of the longest iteration of any job if no job ever waits."""
        self.load_s = max(
            self._train_sum + len(self.jobs) * to_train,
            max((s + n * to_rollout for s, n, _ in load.values()), default=0.0),
        )
        """T_load: seconds per iteration in which the busiest node is in use."""
        self.has_colocated = any(j.colocated for j in self.jobs.values())
        if self.has_colocated:
            self.load_s = self._round_s()

    def _round_s(self) -> float:
        """Return the seconds of a round in which each colocated job runs without other jobs."""
        to_rollout, to_train = self.switches(len(self.jobs))
        free = dict.fromkeys(self.load, 0.0)
        trained = ended = shared = 0.0
        for name in self.order():
            job = self.jobs[name]
            if job.colocated:
                shared += job.solo_s + to_rollout + to_train
                continue
            sampled = max(free[n] for n in self.pinned[name]) + to_rollout + job.rollout_s
            free |= dict.fromkeys(self.pinned[name], sampled)
            trained = max(trained, sampled) + to_train + job.train_on(max(len(self.train), 1))
            ended = max(ended, trained + job.sync_s)
        return ended + shared

    def training(self, nodes: int) -> tuple[float, float]:
        """Return the sum of all jobs' training times on `nodes` train nodes, and the longest
        iteration of a job with these nodes. Times are in seconds, without switches."""
        total = chain = 0.0
        for job in self.jobs.values():
            took = job.train_on(nodes)
            total += took
            chain = max(chain, job.rollout_s + took + job.sync_s)
        return total, chain

    def switches(self, jobs: int) -> tuple[float, float]:
        """Return the seconds to switch a rollout and a train node to another job. If there is only
        one job, return zeros."""
        return (self.pools[0].switch_s, self.pools[1].switch_s) if jobs > 1 else (0.0, 0.0)

    @property
    def period_s(self) -> float:
        """Seconds of an iteration of every job: usually the larger of `cycle_s` and `load_s`, but
        more if jobs have to wait for each other in every second round."""
        if not self._period_s:
            least = max(self.cycle_s, self.load_s)
            is_simple = len(self.jobs) < 3 or self.has_colocated
            self._period_s = least if is_simple else _period(self._node_uses(), least)
        return self._period_s

    def _node_uses(self) -> "list[_NodeUse]":
        """Return the nodes and phase times of all jobs in the cyclic order, switches included."""
        to_rollout, to_train = self.switches(len(self.jobs))
        nodes = max(len(self.train), 1)
        return [
            _NodeUse(
                self.pinned[name],
                to_rollout + self.jobs[name].rollout_s,
                to_train + self.jobs[name].train_on(nodes),
                self.jobs[name].sync_s,
            )
            for name in self.order()
        ]

    @property
    def is_saturated(self) -> bool:
        """Whether every additional job would make the iterations longer."""
        return self.load_s >= self.cycle_s

    @property
    def host_gb(self) -> tuple[float, float]:
        """Host memory in GB that jobs use on the fullest rollout node, and on every train node."""
        return max((gb for _, _, gb in self.load.values()), default=0.0), self._train_gb

    @property
    def cost(self) -> float:
        """Price of the group's nodes per hour."""
        return len(self.load) * self.pools[0].price + len(self.train) * self.pools[1].price

    def order(self) -> list[str]:
        """Return the jobs in the cyclic order: jobs on more rollout nodes first, ties by admission,
        colocated jobs last. With nested node sets, this order usually gives the shortest period."""
        return sorted(self.jobs, key=lambda n: (self.jobs[n].colocated, -len(self.pinned[n])))

    def with_one(self, job: MuxJob, rollout: Collection[int], train: tuple[int, ...]) -> "JobGroup":
        """Return a copy of the group with `job` added on the given rollout and train nodes."""
        jobs = self.jobs | {job.id: job}
        pinned = self.pinned | {job.id: tuple(sorted(rollout))}
        return JobGroup(self.id, self.pools, jobs, pinned, train)

    def add(self, job: MuxJob, rollout: Collection[int], train: tuple[int, ...]) -> None:
        """Add a job, pinned to the nodes `rollout`, and set the group's train nodes to `train`."""
        self.jobs[job.id] = job
        self.pinned[job.id] = tuple(sorted(rollout))
        self.train = train
        self._refresh()

    def remove(self, name: str) -> tuple[list[int], list[int]]:
        """Remove a job and return the rollout and train nodes that are no longer needed. Train
        nodes stay if another job would miss its SLO without them."""
        del self.jobs[name]
        free = [n for n in self.pinned.pop(name) if not any(n in p for p in self.pinned.values())]
        keep = max((j.train_nodes for j in self.jobs.values()), default=0)
        before = self.train
        for nodes in range(keep, len(before) + 1):
            self.train = before[:nodes]
            self._refresh()
            if self.period_s <= self.limit_s * ROUNDING:
                break
        return free, list(before[len(self.train) :])


@dataclass(slots=True)
class _Offer:
    """Possible placement of a job in an existing group or, if `group` is None, in a new group."""

    group: JobGroup | None
    keep: tuple[int, ...]
    """Existing rollout nodes of the group to which the job would be pinned."""
    more_rollout: int
    more_train: int
    added: float
    period_s: float
    utilization: float
    on: Nodes | None = None
    """All rollout nodes of the job and all train nodes of the group, if the job already runs."""


class _Nodes:
    """Allocator of node numbers; it allocates the lowest free number first."""

    def __init__(self, limit: int | None, first: int = 0) -> None:
        self.limit, self.used = limit, 0
        self._free: list[int] = []
        self._next = first

    def has(self, count: int) -> bool:
        return self.limit is None or self.used + count <= self.limit

    def take(self, count: int) -> tuple[int, ...]:
        assert self.has(count), (self.used, count, self.limit)
        self.used += count
        out = []
        for _ in range(count):
            if self._free:
                out.append(heapq.heappop(self._free))
            else:
                out.append(self._next)
                self._next += 1
        return tuple(out)

    def give(self, nodes: Collection[int]) -> None:
        self.used -= len(nodes)
        for node in nodes:
            heapq.heappush(self._free, node)

    def claim(self, nodes: Collection[int]) -> None:
        """Allocate the given nodes, which must be free."""
        self.used += len(nodes)
        top = max(nodes, default=-1) + 1
        self._free += range(self._next, top)
        self._next = max(self._next, top)
        self._free = [n for n in self._free if n not in nodes]
        heapq.heapify(self._free)

    def mark(self, nodes: Collection[int]) -> None:
        """Mark the given nodes of a saved state as in use, and all other nodes as free."""
        self.used = len(nodes)
        self._next = max(nodes, default=-1) + 1
        self._free = sorted(set(range(self._next)) - set(nodes))


class Cluster:
    """Rollout pool, train pool, and the groups of jobs that share the nodes of these pools."""

    def __init__(self, rollout: NodePool, train: NodePool, *, most_jobs: int | None = None) -> None:
        """`most_jobs` is the maximum number of jobs in a group; None: no limit."""
        self.pools = (rollout, train)
        self._most_jobs = most_jobs
        self.groups: dict[int, JobGroup] = {}
        self._group_of: dict[str, JobGroup] = {}
        self._rollout, self._train = _Nodes(rollout.nodes), _Nodes(train.nodes)
        self._next_group = 0

    @property
    def cost(self) -> float:
        """Cost of all nodes in use, per hour."""
        return self._rollout.used * self.pools[0].price + self._train.used * self.pools[1].price

    @property
    def nodes(self) -> tuple[int, int]:
        """Numbers of rollout nodes and train nodes in use."""
        return self._rollout.used, self._train.used

    def free(self, is_rollout: bool) -> list[int]:
        """Return the unused nodes of the rollout pool if `is_rollout`, else of the train pool. The
        pool must not be unlimited."""
        nodes = self._rollout if is_rollout else self._train
        assert nodes.limit is not None
        used = {n for g in self for n in (g.load if is_rollout else g.train)}
        return [n for n in range(nodes.limit) if n not in used]

    def group_of(self, job: str) -> JobGroup:
        """Return the group of a job. If the job is unknown, raise KeyError."""
        return self._group_of[job]

    def __iter__(self) -> Iterator[JobGroup]:
        return iter(self.groups.values())

    def admit(self, job: MuxJob, on: Nodes | None = None) -> Decision:
        """Place a job where it adds least to the cost and no job misses its SLO. Among equally
        cheap places, prefer the highest utilization, then the oldest group. If the job already runs
        `on` some nodes, use these nodes only. `queued` and `refused` decisions change nothing.

        Raises:
            ValueError: a job with this name exists.
        """
        if job.id in self._group_of:
            raise ValueError(f"job {job.id}: the name is in use; choose another")
        passed: Counter[str] = Counter()
        if why := self.never(job, None if on is None else (len(on.rollout), len(on.train))):
            return Decision.without_nodes(job.id, "refused", why, passed)
        if on is not None:
            offer = self._offer_on(job, on)
            if isinstance(offer, str):
                return Decision.without_nodes(job.id, "queued", offer, passed)
            return self._place(job, offer, passed)
        alone = self._isolated(job)
        offers = list(self._offers(job, passed))
        best = _best(alone, offers)
        while best is not None and best.group is not None and not self._keeps(best, job):
            passed["where a job would miss its SLO"] += 1
            offers.remove(best)
            best = _best(alone, offers)
        if best is None:
            free = [
                "any number of" if n.limit is None else str(n.limit - n.used)
                for n in (self._rollout, self._train)
            ]
            why = (
                f"it needs {job.rollout_nodes} rollout and {job.train_nodes} train nodes, but "
                f"{free[0]} and {free[1]} are free; it is tried again when a job leaves"
            )
            return Decision.without_nodes(job.id, "queued", why, passed)
        return self._place(job, best, passed)

    def leave(self, name: str) -> JobGroup | None:
        """Remove a job and free the nodes that are no longer needed. Return the job's group, or
        None if the group is now empty. If the job is unknown, raise KeyError."""
        group = self._group_of.pop(name)
        rollout, train = group.remove(name)
        self._rollout.give(rollout)
        self._train.give(train)
        if group.jobs:
            return group
        del self.groups[group.id]
        return None

    def reprofile(self, job: MuxJob) -> bool:
        """Replace the profile of a job and return True. If any job of the group would then miss its
        SLO, or a node would lack memory, change nothing and return False. If the job is unknown,
        raise KeyError."""
        group = self._group_of[job.id]
        old = group.jobs[job.id]
        group.jobs[job.id] = job
        group._refresh()
        if group.period_s <= group.limit_s * ROUNDING and self._has_memory(group):
            return True
        group.jobs[job.id] = old
        group._refresh()
        return False

    def _has_memory(self, group: JobGroup) -> bool:
        """Return whether the states of the group's jobs fit into the host memory of its nodes."""
        rollout_gb, train_gb = group.host_gb
        return rollout_gb <= self.pools[0].memory_gb and train_gb <= self.pools[1].memory_gb

    def repack(self, name: str, fixed: Collection[str] = ()) -> list[JobMove]:
        """Regroup the job `name` with jobs of other groups to reduce the cost; return the moves.

        The job's group and the groups with the highest cost per job are regrouped, up to 12 jobs in
        all. Another group takes part only if one of its jobs could share nodes with a job of the
        job's group. The new groups are the cheapest partition. Groups with a job in `fixed` do not
        change. The caller must notify the jobs that move. If the job is unknown, raise KeyError."""
        before = self._around(self._group_of[name], set(fixed))
        jobs = [j for g in before for j in g.jobs.values()]
        if not before:
            return []
        jobs.sort(key=lambda j: (-j.rollout_nodes, -j.rollout_s))  # large jobs are pinned first
        builder = _Builder(self)

        def cost_of(members: tuple[int, ...]) -> float | None:
            group = builder.build([jobs[n] for n in members])
            return None if group is None else group.cost

        cost, parts = cheapest_partition(len(jobs), cost_of)
        if cost > sum(g.cost for g in before) * (1 - 1e-9):
            return []
        after = builder.settle([[jobs[n] for n in part] for part in parts], before)
        return self._exchange(before, after)

    def _around(self, group: JobGroup, fixed: Collection[str]) -> list[JobGroup]:
        """Return `group` and the groups to regroup with it; none if `group` must not change."""
        mine = list(group.jobs.values())
        if group.jobs.keys() & fixed or len(mine) > MOST_JOBS:
            return []
        found = sorted(
            (
                g
                for g in self.groups.values()
                if g is not group
                and not g.jobs.keys() & fixed
                and len(g.jobs) + len(mine) <= MOST_JOBS
                and any(self._could_share(a, b) for a in mine for b in g.jobs.values())
            ),
            key=lambda g: (-g.cost / len(g.jobs), g.id),
        )
        out, count = [group], len(mine)
        for g in found:
            if count + len(g.jobs) <= MOST_JOBS:
                out.append(g)
                count += len(g.jobs)
        return out

    def _could_share(self, a: MuxJob, b: MuxJob) -> bool:
        """Return whether two jobs would meet their SLOs in one group, on separate rollout nodes if
        necessary."""
        switches = self.pools[0].switch_s + self.pools[1].switch_s
        if a.colocated or b.colocated:
            return a.solo_s + b.solo_s + 2 * switches <= min(a.limit_s, b.limit_s)
        train = a.train_s + b.train_s + 2 * self.pools[1].switch_s
        return max(a.solo_s + switches, b.solo_s + switches, train) <= min(a.limit_s, b.limit_s)

    def _exchange(self, before: Sequence[JobGroup], after: Sequence[JobGroup]) -> list[JobMove]:
        """Replace the groups `before` by `after` and return the moves; none if the pools lack
        nodes. Real nodes replace the placeholders (numbers from `TO_BE_TAKEN`)."""
        nodes = [n for g in after for n in g.load], [n for g in after for n in g.train]
        old = sum(len(g.load) for g in before), sum(len(g.train) for g in before)
        pools = self._rollout, self._train
        if not all(p.has(len(n) - o) for p, n, o in zip(pools, nodes, old, strict=True)):
            return []
        was = {name: (g.id, g.pinned[name], g.train) for g in before for name in g.jobs}
        for g in before:
            del self.groups[g.id]
            self._rollout.give(list(g.load))
            self._train.give(g.train)
        for pool, now in zip(pools, nodes, strict=True):
            pool.claim({n for n in now if n < TO_BE_TAKEN})
        moves = []
        for new in after:
            real = [
                {n: n if n < TO_BE_TAKEN else pool.take(1)[0] for n in names}
                for pool, names in zip(pools, (new.load, new.train), strict=True)
            ]
            if new.id < 0:
                group = self._new_group()
            else:
                group = self.groups[new.id] = JobGroup(new.id, self.pools)
            for job in new.jobs.values():
                pinned = [real[0][n] for n in new.pinned[job.id]]
                group.add(job, pinned, tuple(real[1][n] for n in new.train))
                self._group_of[job.id] = group
            for name in group.jobs:
                runs = (group.id, group.pinned[name], group.train)
                if runs != was[name]:
                    moves.append(JobMove(name, *runs))
        self.groups = dict(sorted(self.groups.items()))
        return moves

    def state(self) -> dict[str, Any]:
        """Return the whole state of the cluster as plain values, for `restore`."""
        return {
            "next": self._next_group,
            "groups": [
                {
                    "id": g.id,
                    "train": list(g.train),
                    "jobs": [asdict(j) | {"pinned": list(g.pinned[j.id])} for j in g.jobs.values()],
                }
                for g in self.groups.values()
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the current state by a saved result of the method `state`."""
        self.groups.clear()
        self._group_of.clear()
        self._next_group = state["next"]
        for saved in state["groups"]:
            group = self.groups[saved["id"]] = JobGroup(saved["id"], self.pools)
            for values in saved["jobs"]:
                job = MuxJob(**{k: v for k, v in values.items() if k != "pinned"})
                group.add(job, values["pinned"], tuple(saved["train"]))
                self._group_of[job.id] = group
        self._rollout.mark([n for g in self.groups.values() for n in g.load])
        self._train.mark([n for g in self.groups.values() for n in g.train])

    # ---- offers

    def never(self, job: MuxJob, runs_on: tuple[int, int] | None = None) -> str:
        """If the cluster can never run a job, return the reason, else an empty string. `runs_on`:
        numbers of rollout and train nodes on which the job already runs."""
        for pool, what, nodes, gb in (
            (self.pools[0], "rollout", job.rollout_nodes, job.rollout_gb),
            (self.pools[1], "train", job.train_nodes, job.train_gb),
        ):
            if pool.nodes is not None and nodes > pool.nodes:
                return f"it needs {nodes} {what} nodes but the pool has {pool.nodes}"
            if gb > pool.memory_gb:
                return (
                    f"its {what} state needs {gb:g} GB per node, but a node has {pool.memory_gb:g} "
                    "GB of host memory"
                )
        if runs_on is None or runs_on == (job.rollout_nodes, job.train_nodes):
            return ""
        return (
            f"its profile has {job.rollout_nodes} rollout and {job.train_nodes} train nodes but it "
            f"runs on {runs_on[0]} and {runs_on[1]}; profile it with these numbers of nodes"
        )

    def _keeps(self, offer: _Offer, job: MuxJob) -> bool:
        """Return whether all jobs meet their SLOs if the job takes the offer. The offer's period is
        only a lower bound, so compute the period of the full cyclic order."""
        group = offer.group
        assert group is not None
        rollout = (*offer.keep, *range(-offer.more_rollout, 0))
        train = (*group.train, *range(-offer.more_train, 0))
        return group.with_one(job, rollout, train).period_s <= self._limit(group, job)

    def _isolated(self, job: MuxJob) -> _Offer | None:
        if not (self._rollout.has(job.rollout_nodes) and self._train.has(job.train_nodes)):
            return None
        added = job.rollout_nodes * self.pools[0].price + job.train_nodes * self.pools[1].price
        busiest = max(job.busy_s) / job.solo_s
        return _Offer(None, (), job.rollout_nodes, job.train_nodes, added, job.solo_s, busiest)

    def _offers(self, job: MuxJob, passed: Counter[str]) -> Iterator[_Offer]:
        """Yield the offers of all groups, oldest group first. Count the groups without an offer in
        `passed`, by reason."""
        for group in self.groups.values():
            offer = self._ask(group, job)
            if isinstance(offer, str):
                passed[offer] += 1
            else:
                yield offer

    def _limit(self, group: JobGroup, job: MuxJob) -> float:
        """Return the maximum seconds of an iteration if this job joins the group. 0: the job must
        not join the group."""
        if group.is_saturated and not (group.has_colocated or job.colocated):
            return 0.0
        return min(group.limit_s, job.limit_s) * ROUNDING

    def _ask(self, group: JobGroup, job: MuxJob) -> _Offer | str:
        """Return the cheapest offer of a group for a job, or the reason why there is no offer."""
        limit = self._limit(group, job)
        if limit == 0.0:
            return "saturated"
        if len(group.jobs) == self._most_jobs:
            return "full"
        if group.has_colocated or job.colocated:
            return self._ask_round(group, job, limit)
        to_rollout, to_train = group.switches(len(group.jobs) + 1)
        nodes = max(len(group.train), job.train_nodes)
        total, chain = group._train_sum, group._chain
        if nodes > len(group.train):
            if not self._train.has(nodes - len(group.train)):
                return "without free nodes"
            total, chain = group.training(nodes)
        took = job.train_on(nodes)
        train_load = total + took + (len(group.jobs) + 1) * to_train
        cycle = max(chain, job.rollout_s + took + job.sync_s) + to_rollout + to_train
        if max(train_load, cycle) > limit:
            return "where a job would miss its SLO"
        if group._train_gb + job.train_gb > self.pools[1].memory_gb:
            return "without host memory"
        room = limit - job.rollout_s - to_rollout
        most_gb = self.pools[0].memory_gb - job.rollout_gb
        fits = [
            (s + n * to_rollout, node)
            for node, (s, n, gb) in group.load.items()
            if s + n * to_rollout <= room and gb <= most_gb
        ]
        fits.sort()
        keep = self._placement(group, job.rollout_nodes, fits)
        if keep is None:
            return "without free nodes"
        more = job.rollout_nodes - len(keep)
        busiest = max(s + n * to_rollout for s, n, _ in group.load.values())
        own = max((load for load, node in fits if node in keep), default=0.0)
        load = max(train_load, busiest, own + job.rollout_s + to_rollout)
        more_train = nodes - len(group.train)
        added = more * self.pools[0].price + more_train * self.pools[1].price
        if load > limit:
            return "where a job would miss its SLO"
        return _Offer(group, keep, more, more_train, added, max(cycle, load), load / cycle)

    def _ask_round(self, group: JobGroup, job: MuxJob, limit: float) -> _Offer | str:
        """Return the group's offer, or the reason why there is none, for a colocated job or a group
        with colocated jobs. Try nodes of the group first, then new nodes. Compute the full
        round."""
        more_train = max(0, job.train_nodes - len(group.train))
        if not self._train.has(more_train):
            return "without free nodes"
        if group._train_gb + job.train_gb > self.pools[1].memory_gb:
            return "without host memory"
        train = tuple(range(len(group.train) + more_train))
        most_gb = self.pools[0].memory_gb - job.rollout_gb
        fits = sorted((s, node) for node, (s, _, gb) in group.load.items() if gb <= most_gb)
        why = "without free nodes"
        for nodes in (fits, []):
            keep = self._placement(group, job.rollout_nodes, nodes)
            if keep is None:
                continue
            more = job.rollout_nodes - len(keep)
            found = group.with_one(job, (*keep, *range(-more, 0)), train)
            if found.period_s <= limit:
                added = more * self.pools[0].price + more_train * self.pools[1].price
                use = found.load_s / found.cycle_s
                return _Offer(group, keep, more, more_train, added, found.period_s, use)
            why = "where a job would miss its SLO"
        return why

    def _offer_on(self, job: MuxJob, on: Nodes) -> _Offer | str:
        """Return the offer for a job that already runs, or the reason why the job has to wait. If a
        group uses some of the job's nodes, the job joins this group, else a new group."""
        here = f"it runs on rollout {_names(on.rollout)} and train {_names(on.train)}"
        later = "it is tried again when a job leaves"
        mine = set(on.rollout), set(on.train)
        owners = [g for g in self if mine[0] & g.load.keys() or mine[1].intersection(g.train)]
        if not owners:
            alone = self._isolated(job)
            if alone is None:  # the pools have become smaller than the set of nodes in use
                used = f"{self._rollout.used} rollout and {self._train.used} train nodes"
                return f"{here}, but all nodes are in use ({used}); {later}"
            return replace(alone, on=on)
        who = ", ".join(str(g.id) for g in owners)
        if len(owners) > 1:
            return (
                f"{here}, nodes of several groups ({who}), but a job can share nodes with one "
                f"group only; {later}"
            )
        (group,) = owners
        first = set(group.train[: len(on.train)])
        if mine[1] <= set(group.train):
            if first != mine[1]:
                return (
                    f"{here}, but group {who} uses train nodes {_names(group.train)} in this "
                    f"order; {later}"
                )
            train = group.train
        elif mine[1].issuperset(group.train):
            train = (*group.train, *(n for n in on.train if n not in group.train))
        else:
            return f"{here}, but group {who} uses train nodes {_names(group.train)}; {later}"
        for name, nodes in group.pinned.items():
            if len(mine[0].intersection(nodes)) not in (0, len(nodes), len(mine[0])):
                return (
                    f"{here}, but job {name} on rollout {_names(nodes)}; two jobs of a group must "
                    f"share all rollout nodes of one of them, or none; {later}"
                )
        if len(group.jobs) == self._most_jobs:
            return f"{here}, but group {who} of these nodes is full; {later}"
        found = group.with_one(job, on.rollout, train)
        if not self._has_memory(found):
            return f"{here}, but these hosts lack memory for another job; {later}"
        if found.period_s > found.limit_s * ROUNDING:  # but a saturated group may take the job
            return f"{here}, but a job of group {who} would miss its SLO; {later}"
        keep = tuple(n for n in on.rollout if n in group.load)
        more, more_train = len(on.rollout) - len(keep), len(train) - len(group.train)
        added = more * self.pools[0].price + more_train * self.pools[1].price
        use = found.load_s / found.cycle_s
        there = Nodes(rollout=on.rollout, train=train)
        return _Offer(group, keep, more, more_train, added, found.period_s, use, there)

    def _placement(
        self, group: JobGroup, nodes: int, fits: Sequence[tuple[float, int]]
    ) -> tuple[int, ...] | None:
        """Choose rollout nodes of the group for a job: as many as possible, least loaded nodes
        first. The job's node set must be nested with or disjoint from every other job's node set.
        If the pool lacks the remaining nodes, return None."""
        names = [node for _, node in fits]
        sets = {frozenset(p) for p in group.pinned.values()}
        for more in range(nodes + 1):
            if not self._rollout.has(more):
                return None
            if more == nodes:
                return ()
            for chosen in islice(combinations(names, nodes - more), MOST_PLACEMENTS):
                if nodes == 1 or all(_is_nested(other, chosen, more) for other in sets):
                    return chosen
        return None

    def _place(self, job: MuxJob, offer: _Offer, passed: Mapping[str, int]) -> Decision:
        kind: Kind = "scaled" if offer.more_rollout or offer.more_train else "packed"
        if offer.group is None:
            kind = "isolated"
        group = self._pin(job, offer)
        return Decision(
            job.id,
            kind,
            group.id,
            group.pinned[job.id],
            group.train,
            offer.added,
            group.period_s,
            group.period_s / job.solo_s,
            dict(passed),
        )

    def _pin(self, job: MuxJob, offer: _Offer) -> JobGroup:
        """Allocate the nodes of an offer, add the job to its group, and return the group."""
        group = offer.group
        if group is None:
            group = self._new_group()
        if offer.on is None:
            rollout = (*offer.keep, *self._rollout.take(offer.more_rollout))
            train = (*group.train, *self._train.take(offer.more_train))
        else:
            rollout, train = offer.on.rollout, offer.on.train
            self._rollout.claim(set(rollout) - set(offer.keep))
            self._train.claim(set(train) - set(group.train))
        group.add(job, rollout, train)
        self._group_of[job.id] = group
        return group

    def _new_group(self) -> JobGroup:
        group = self.groups[self._next_group] = JobGroup(self._next_group, self.pools)
        self._next_group += 1
        return group


def _is_nested(other: frozenset[int], chosen: Collection[int], more: int) -> bool:
    """Return whether the node set `other` is nested with or disjoint from the set of `chosen` and
    `more` new nodes."""
    common = len(other.intersection(chosen))
    return common in (0, len(other)) or (not more and common == len(chosen))


def _best(alone: _Offer | None, offers: Sequence[_Offer]) -> _Offer | None:
    best = alone
    for offer in offers:
        if best is None or _is_better(offer, best):
            best = offer
    return best


def _is_better(a: _Offer, b: _Offer) -> bool:
    """Return whether offer `a` is strictly better than `b`. Groups are visited oldest first, so on
    a tie the older group wins."""
    if not math.isclose(a.added, b.added, rel_tol=1e-9, abs_tol=1e-9):
        return a.added < b.added
    return a.utilization > b.utilization * ROUNDING


class _Builder(Cluster):
    """Cluster with unlimited nodes in which `repack` builds candidate groups."""

    def __init__(self, of: Cluster) -> None:
        rollout, train = (replace(p, nodes=None) for p in of.pools)
        super().__init__(rollout, train, most_jobs=of._most_jobs)
        self._rollout, self._train = _Nodes(None, TO_BE_TAKEN), _Nodes(None, TO_BE_TAKEN)

    def _new_group(self) -> JobGroup:
        return JobGroup(-1, self.pools)

    def _limit(self, group: JobGroup, job: MuxJob) -> float:
        return min(group.limit_s, job.limit_s) * ROUNDING

    def build(self, jobs: Sequence[MuxJob], start: JobGroup | None = None) -> JobGroup | None:
        """Build one group of `jobs`, together with the jobs of the group `start` if given. If SLOs,
        memory or the maximum number of jobs make the group impossible, return None."""
        self._group_of.clear()
        group = start
        for job in jobs:
            if group is None:
                offer: _Offer | str | None = self._isolated(job)
            else:
                offer = self._ask(group, job)
            if not isinstance(offer, _Offer):
                return None
            group = self._pin(job, offer)
        if group is not None and group.period_s > group.limit_s * ROUNDING:
            return None
        return group

    def settle(
        self, parts: Sequence[Sequence[MuxJob]], before: Sequence[JobGroup]
    ) -> list[JobGroup]:
        """Build a group for every list of jobs in `parts`. If the group costs no more, its jobs
        stay on their old nodes."""
        left = list(before)
        out = []
        for jobs in sorted(parts, key=len, reverse=True):
            names = {j.id for j in jobs}
            new = self.build(jobs)
            assert new is not None
            old = max(left, key=lambda g: len(names & g.jobs.keys()), default=None)
            if old is not None and names & old.jobs.keys():
                left.remove(old)
                kept = self._kept(old, jobs)
                if kept is not None and kept.cost <= new.cost * ROUNDING:
                    new = kept
            out.append(new)
        return out

    def _kept(self, old: JobGroup, jobs: Sequence[MuxJob]) -> JobGroup | None:
        """Build a group of `jobs` in which the jobs of the old group stay on their nodes."""
        kept = {name: job for name, job in old.jobs.items() if job in jobs}
        pinned = {name: old.pinned[name] for name in kept}
        need = max(j.train_nodes for j in jobs)
        start = JobGroup(old.id, self.pools, kept, pinned, old.train[:need])
        return self.build([j for j in jobs if j.id not in start.jobs], start)
