"""RollMux's experiments, simulated with the shipped schedulers (`sched/cluster.py`,
`sched/phase_mux.py`) and compared with the published values."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from rlcore.hf.size import ModelSize
from rlcore.sched.cluster import Cluster, MuxJob, NodePool
from rlcore.sched.phase_mux import TAIL, Member
from rlcore.sim import mux_drift, mux_trace
from rlcore.sim import published_rollmux as told
from rlcore.sim.cost import EngineCost, engine_cost, model_named
from rlcore.sim.mux_baselines import Greedy, Random, optimum
from rlcore.sim.mux_group import ROLLOUT, TRAIN, Iteration, MuxSimulation, VirtualJob
from rlcore.sim.mux_group import MuxTimeline as Happened
from rlcore.sim.mux_trace import draw_job, draw_trace, run_trace
from rlcore.sim.published_rollmux import KINDS, MICRO, SHAPES, SIZES
from rlcore.sim.table import Row, TableResult, row
from rlcore.sim.workload import GENERATORS
from rlcore.utils.gpus import GPUS, Gpu
from rlcore.utils.seed import derive

POOLS = (
    NodePool(price=told.H20, memory_gb=told.NODE_GB, switch_s=told.WARM_S[ROLLOUT]),
    NodePool(price=told.H800, memory_gb=told.NODE_GB, switch_s=told.WARM_S[TRAIN]),
)
SLOTS = 8
"""Number of GPUs in a node."""
KEEP = 1
"""Number of nodes on which the tail of a rollout on several nodes continues in the
micro-benchmarks (`--mux.tail_nodes`, our choice)."""


@dataclass(slots=True)
class Result:
    """A table with the data for its plot."""

    made: TableResult
    lines: dict[str, list[tuple[float, float]]]
    """Points of each curve, by name."""
    axes: tuple[str, str] = ("", "")
    is_log: bool = False
    happened: dict[str, Happened] | None = None


# ---- rounds of one job


@dataclass(frozen=True, slots=True)
class RolloutLengths:
    """Timing of one rollout: seconds until its last response, start of its tail (the longest fifth
    of the responses), and number of tokens."""

    seconds: float
    tail_s: float
    tokens: int
    moved_s: Mapping[int, float]
    """Seconds of the tail if it moves, including prefill, by number of kept nodes."""


def finish_times(lengths: Sequence[int], prompt: int, cost: EngineCost) -> list[float]:
    """Return the ascending finish times of responses that one engine decodes as one batch."""
    now, before, out = 0.0, 0, []
    for done, length in enumerate(sorted(lengths)):
        live = len(lengths) - done
        now += cost.decode_s(live, live * (prompt + before), length - before)
        before = length
        out.append(now)
    return out


@cache
def rounds(
    model: ModelSize, column: str, gpu: Gpu, tp: int, nodes: int, count: int, seed: int
) -> list[RolloutLengths]:
    """Return the timing of `count` rollouts on nodes of eight GPUs, in data set order."""
    cost = engine_cost(model, gpu, tp)
    generator = GENERATORS[column]
    engines = nodes * SLOTS // tp
    out = []
    for n in range(count):
        lengths = [
            length
            for p in range(told.PROMPTS)
            for length in generator.lengths(n * told.PROMPTS + p, told.SAMPLES, derive(seed, n))
        ]
        ends = sorted(
            t
            for r in range(engines)
            for t in finish_times(lengths[r::engines], generator.prompt_tokens, cost)
        )
        at = ends[int(TAIL * len(ends)) - 1]
        moved = {
            kept: _moved_s(
                sorted(lengths), generator.prompt_tokens, cost, kept * SLOTS // tp, engines
            )
            for kept in range(1, nodes)
        }
        out.append(RolloutLengths(ends[-1], at, sum(lengths), moved))
    return out


def _moved_s(
    lengths: Sequence[int], prompt: int, cost: EngineCost, kept: int, engines: int
) -> float:
    """Return the seconds of a tail that moves to `kept` engines. The tail is the longest fifth of
    the responses, once all other responses are done. Requests that come from other engines are
    first prefilled."""
    at = int(TAIL * len(lengths))
    done = lengths[at]
    left = [length - done for length in lengths[at:]]
    moving = len(left) * (1 - kept / engines) * (prompt + done)
    decode = max(finish_times(left[k::kept], prompt + done, cost)[-1] for k in range(kept))
    return moving * cost.prefill_s / kept + decode


# ---- micro-benchmarks


def iterations_of(
    kind: told.JobKind,
    shapes: Sequence[RolloutLengths],
    train: int,
    solo_s: float = told.SOLO_S,
) -> list[Iteration]:
    """Return iterations of a job kind on `train` train nodes. Their durations vary like those of
    the rollouts `shapes`, and have the mean of the job kind: `solo_s` alone."""
    mean_s = statistics.fmean(r.seconds for r in shapes)
    mean_tokens = statistics.fmean(r.tokens for r in shapes)
    train_s = solo_s / (1 + kind.rollout_per_train)
    rollout_s = solo_s - train_s
    train_s *= (kind.nodes / train) ** kind.train_scaling
    return [
        Iteration(
            rollout_s=rollout_s * r.seconds / mean_s,
            tail_s=rollout_s * r.tail_s / mean_s,
            moved_s=rollout_s * r.moved_s.get(KEEP, 0.0) / mean_s,
            train_s=train_s * r.tokens / mean_tokens,
        )
        for r in shapes
    ]


def _group(
    micro: told.Micro,
    count: int,
    seed: int,
    *,
    migrates: bool = False,
    solo_s: float = told.SOLO_S,
    lengths: str = told.LENGTHS,
    kinds: Mapping[str, told.JobKind] = KINDS,
) -> tuple[list[VirtualJob], list[Sequence[Iteration]]]:
    """Return the jobs of a group, and each job's iterations when it runs alone."""
    model, gpu = model_named(told.MODEL), GPUS["H20"]
    jobs: list[VirtualJob] = []
    alone: list[Sequence[Iteration]] = []
    order = sorted(range(len(micro.jobs)), key=lambda n: -len(micro.pins[n]))
    for n in order:
        kind = kinds[micro.jobs[n]]
        pins = micro.pins[n]
        shapes = rounds(model, lengths, gpu, 1, len(pins), count, derive(seed, "job", n))
        names = {ROLLOUT: tuple(f"r{node}" for node in pins)}
        names[TRAIN] = tuple(f"t{node}" for node in range(micro.train))
        keep = KEEP if migrates and len(pins) > KEEP else 0
        member = Member(job=f"{micro.jobs[n]}{n}", slots=names, keep=keep)
        its = iterations_of(kind, shapes, micro.train, solo_s)
        jobs.append(VirtualJob(member=member, iteration=_cycled(its)))
        alone.append(iterations_of(kind, shapes, kind.nodes, solo_s))
    return jobs, alone


def _cycled(its: Sequence[Iteration]) -> Callable[[int], Iteration]:
    return lambda n: its[n % len(its)]


def micro(count: int, seed: int) -> Result:
    """Simulate the three groups of the paper's micro-benchmarks, on the published nodes."""
    rows: list[Row] = []
    happened = {}
    slow: list[float] = []
    over_gavel = []
    for name, one in MICRO.items():
        kinds = [KINDS[k] for k in one.jobs]
        alone_bill = [k.nodes * (told.H20 + told.H800) for k in kinds]
        nodes = len({n for pin in one.pins for n in pin})
        bill = nodes * told.H20 + one.train * told.H800
        price = sum(alone_bill) / bill
        rows.append(row(f"{name}, bills alone / group", one.price, price, kind="arithmetic"))
        can_migrate = any(len(pin) > KEEP for pin in one.pins)
        for migrates in (False, True) if can_migrate else (False,):
            jobs, alone = _group(one, count, seed, migrates=migrates)
            trace = MuxSimulation(jobs, switch_s=told.WARM_S, tail=TAIL if migrates else 2.0).run(
                count
            )
            solo = [statistics.fmean(i.rollout_s + i.train_s for i in its) for its in alone]
            ours = [trace.period(j.member.job, count // 10) for j in jobs]
            slowdown = [o / s for o, s in zip(ours, solo, strict=True)]
            bills = [KINDS[j.member.job[0]].nodes * (told.H20 + told.H800) for j in jobs]
            gain = sum(b / s for b, s in zip(bills, slowdown, strict=True)) / bill
            what = ", with migration" if migrates else ""
            for version, value in zip(("v1", "OSDI"), one.over_solo, strict=True):
                rows.append(row(f"{name}{what}, over solo ({version})", value, gain, even=1))
            if migrates:
                continue
            slow += slowdown
            happened[name] = trace
            colocated = colocated_gain(one, "H800")
            over = gain / colocated
            rows.append(row(f"{name}, over colocated", one.over_colocated, over, even=1))
            gavel = max(colocated, colocated_gain(one, "H20"), 1.0)
            over_gavel.append(gain / gavel)
            rows += _bubbles(name, one, trace, jobs, alone)
    for what, value, found in (
        ("least", told.OVER_GAVEL[0], min(over_gavel)),
        ("most", told.OVER_GAVEL[1], max(over_gavel)),
    ):
        rows.append(row(f"over Gavel+, {what} of the three", value, found, even=1))
    rows.append(row("slow-down of a job, least", told.SLOWDOWN[0], min(slow), even=1))
    rows.append(row("slow-down of a job, most", told.SLOWDOWN[1], max(slow), even=1))
    notes = [
        "Rounds have the lengths of RollPacker's 8k generator and the data sheet's decode steps on",
        "H20, scaled to an iteration of 300 s alone (ours). Colocated: all of a job on its H800",
        "nodes, rollouts as much faster or slower as the data sheets say. Gavel+: of alone,",
        "colocated on H800 and colocated on H20 what costs least, jobs do not take turns.",
        "A phase that is longer than usual keeps the next job waiting: that, and the switch, is",
        "the slow-down; interference on shared hosts and links is not modelled. Only C has two",
        "rollout nodes, of which its tail can release one.",
    ]
    return Result(TableResult("RollMux, micro-benchmarks", rows, notes), {}, happened=happened)


def colocated_gain(one: told.Micro, where: str) -> float:
    """Return the cost efficiency of colocated jobs on nodes of one kind, relative to the same jobs
    running alone on two pools."""
    price = {"H800": told.H800, "H20": told.H20}[where]
    faster = colocated_rollout(where)
    slower = GPUS["H800"].tflops / GPUS[where].tflops
    gain = bill = 0.0
    for name in one.jobs:
        kind = KINDS[name]
        train_s = told.SOLO_S / (1 + kind.rollout_per_train)
        took = (told.SOLO_S - train_s) * faster + train_s * slower
        gain += kind.nodes * (told.H20 + told.H800) * told.SOLO_S / took
        bill += kind.nodes * price
    return gain / bill


@cache
def colocated_rollout(where: str) -> float:
    """Return the rollout time on GPU type `where` relative to H20, from the data sheets."""
    model = model_named(told.MODEL)
    seconds = [
        statistics.fmean(r.seconds for r in rounds(model, told.LENGTHS, GPUS[gpu], 1, 1, 3, 0))
        for gpu in (where, "H20")
    ]
    return seconds[0] / seconds[1]


def _bubbles(
    name: str,
    one: told.Micro,
    trace: Happened,
    jobs: Sequence[VirtualJob],
    alone: Sequence[Sequence[Iteration]],
) -> list[Row]:
    """Return table rows with the idle share of nodes, for the jobs alone and for the group."""
    end = min(e[-1] for e in trace.ends.values())
    rows = []
    for pool, took in ((ROLLOUT, "rollout_s"), (TRAIN, "train_s")):
        slots = sorted({s for j in jobs for s in j.member.slots[pool]})
        kinds = [KINDS[j.member.job[0]] for j in jobs]
        idle = [
            1 - statistics.fmean(getattr(i, took) / (i.rollout_s + i.train_s) for i in its)
            for its in alone
        ]
        weighed = sum(k.nodes * i for k, i in zip(kinds, idle, strict=True))
        rows.append(row(f"{name}, idle {pool}, alone", None, weighed / sum(k.nodes for k in kinds)))
        busy = trace.busy(slots, end * 0.1, end)
        rows.append(row(f"{name}, idle {pool}, group", None, 1 - busy))
    return rows


# ---- migration of tails

GROUPS = {
    "two jobs on one node": ((0,), (0,)),
    "2 nodes, and a job on one": ((0, 1), (1,)),
    "2 nodes, and a job on each": ((0, 1), (0,), (1,)),
    "4 nodes, and a job on three": ((0, 1, 2, 3), (1,), (2,), (3,)),
}
"""Rollout nodes of the jobs of a group (our assumption). The tail of the first job can move."""


def migration(count: int, seed: int) -> Result:
    """Simulate rollout-heavy jobs that share rollout nodes: without migration of tails, and with it
    for every number of nodes that a tail can keep."""
    rows: list[Row] = []
    least, most = told.MIGRATION
    for group, pins in GROUPS.items():
        for name, column in told.MIGRATION_MODELS:
            without = _shared(name, column, pins, 0, count, seed)
            if len(pins[0]) == 1:  # no node to release
                gain = without / _shared(name, column, pins, 1, count, seed)
                value = most if (name, column) == ("14B", "8k") else least
                rows.append(row(f"{group}, {name}/{column}", value, gain, even=1))
            for kept in range(1, len(pins[0])):
                gain = without / _shared(name, column, pins, kept, count, seed)
                cell = f"{group}, {name}/{column}, tail keeps {kept}"
                rows.append(row(cell, None, gain))
    notes = [
        "Iterations a second with migration at 80 % against without; jobs of T_rollout = 2.5",
        "T_train on nodes of 8 H20, each with a train node of its own. As in rlcore/mux, a tail",
        "releases whole nodes and a rollout starts once all of its nodes are free, so two jobs on",
        "one node gain nothing. The paper releases single GPUs. Published: the least and, for",
        "14B/8k, the most; the group is not published. What moves is prefilled again.",
    ]
    return Result(TableResult("RollMux, migration of long tails", rows, notes), {})


def _shared(
    name: str, column: str, pins: Sequence[Sequence[int]], kept: int, count: int, seed: int
) -> float:
    """Return the mean seconds of an iteration of rollout-heavy jobs on rollout nodes `pins`. The
    tail of a rollout continues on `kept` nodes if the job has more; 0: tails do not move."""
    model, tp = model_named(name), 2 if name == "32B" else 1
    jobs = []
    for n, pin in enumerate(pins):
        mine = rounds(model, column, GPUS["H20"], tp, len(pin), count, derive(seed, n))
        mean_train = statistics.fmean(r.seconds for r in mine) / KINDS["D"].rollout_per_train
        tokens = statistics.fmean(r.tokens for r in mine)
        its = [
            Iteration(
                rollout_s=r.seconds,
                tail_s=r.tail_s,
                moved_s=r.moved_s.get(kept, 0.0),
                train_s=mean_train * r.tokens / tokens,
            )
            for r in mine
        ]
        slots = {ROLLOUT: tuple(f"r{node}" for node in pin), TRAIN: (f"t{n}",)}
        member = Member(job=f"{n}", slots=slots, keep=kept if len(pin) > kept else 0)
        jobs.append(VirtualJob(member=member, iteration=_cycled(its)))
    trace = MuxSimulation(jobs, switch_s=told.WARM_S, tail=TAIL if kept else 2.0).run(count)
    return statistics.fmean(trace.period(j.member.job, count // 10) for j in jobs)


# ---- warm and cold starts


def switches(count: int, seed: int) -> Result:
    """Compare warm starts (states kept in host memory) with cold starts (states loaded again)."""
    rows: list[Row] = []
    for version, warm_s in (("v1", 1.7), ("OSDI", told.WARM_S[ROLLOUT])):
        cell, ratio = f"start, cold / warm ({version})", told.COLD_S[version] / warm_s
        rows.append(row(cell, told.WARM_RATIO[version], ratio, kind="arithmetic"))
    for name, one in MICRO.items():
        for version, cold in told.COLD_S.items():
            jobs, _ = _group(one, count, seed)
            warm_s = _period(jobs, told.WARM_S, count)
            lost = 1 - warm_s / _period(jobs, {ROLLOUT: cold, TRAIN: cold}, count)
            value = told.COLD_LOSS if version == "OSDI" else None
            cell = f"{name}, throughput lost, cold {cold:g} s"
            rows.append(row(cell, value, lost, even=0))
    notes = [
        "Cold over warm is published seconds, divided. Seconds of a start are not simulated. The",
        "throughput lost is decided by the assumed 300 s of an iteration (table sensitivity).",
    ]
    return Result(TableResult("RollMux, warm and cold starts", rows, notes), {})


# ---- weight updates


def weight_update_s(route: str, gb: float, gpus: int, in_node_gbs: float) -> float:
    """Return the seconds in which `gb` of weights, sharded over `gpus` train GPUs, reach as many
    rollout GPUs in another cluster. All traffic between the clusters shares one link.

    Args:
        route: `two_stage`: each shard crosses once, then the rollout GPUs gather the shards.
            `flat`: every rollout GPU gets every shard from its owner. `ring`: an all-gather of all
            GPUs, in which rollout GPUs contribute as much as they get.
        in_node_gbs: speed of a GPU's links inside a node.
    """
    if route == "flat":
        return gpus * gb / told.SLOW_GBS
    if route == "ring":  # each edge carries all shards but one
        return 2 * gb * (1 - 1 / (2 * gpus)) / told.SLOW_GBS
    assert route == "two_stage", route
    other_nodes = gb * max(0, gpus - SLOTS) / gpus / told.FAST_GBS
    in_node = gb * (1 - 1 / min(gpus, SLOTS)) / in_node_gbs
    return gb / told.SLOW_GBS + other_nodes + in_node


def weight_update(count: int, seed: int) -> Result:
    """Compare a weight update in two stages with other routes, by the speed of links. Neither the
    seed nor the size of the model changes a ratio."""
    rows: list[Row] = []
    gb = 2 * model_named(told.MODEL).parameters / 1e9
    for gpus, bounds in told.SYNC.items():
        seconds = {
            route: weight_update_s(route, gb, gpus, GPUS["H20"].link_gbs)
            for route in ("two_stage", "flat", "ring")
        }
        for route in ("flat", "ring"):
            gain = seconds[route] / seconds["two_stage"]
            for what, value in zip(("least", "most"), bounds, strict=True):
                cell = f"{gpus} to {gpus} GPUs, {route} / two_stage, {what}"
                note = f"{seconds[route]:.1f} s, {seconds['two_stage']:.1f} s in two stages"
                rows.append(row(cell, value, gain, even=1, note=note))
    notes = [
        f"{told.MODEL}, one link of {told.SLOW_GBS:g} GB/s between clusters. Stages follow each",
        "other; latencies and checksums take no time. The paper's baseline is not published, so",
        "two are here. tools/bench_sync.py measures both (7.85, 14.6; 2.04, 2.45).",
    ]
    return Result(TableResult("RollMux, weight update in two stages", rows, notes), {})


# ---- sensitivity to assumed constants

SOLO_SWEEP = (100.0, 200.0, 300.0, 600.0, 900.0)
"""Seconds of an iteration alone in the sensitivity table; a published phase takes 50 to 900 s."""
HEAVY_SWEEP = (0.6, 0.75, 0.85, 0.9)
"""Share of rollout in an iteration of rollout-heavy jobs; train-heavy jobs have its complement."""


def sensitivity(count: int, seed: int) -> Result:
    """Show how cells of `micro`, `switches` and `trace200` depend on assumed constants. One
    constant at a time is varied."""
    rows, lines = _group_sweeps(count, seed)
    rows += _trace_sweeps(seed)
    notes = [
        "One constant of published_rollmux.py is varied at a time. A published cell that is right",
        "for one value alone does not support the simulation.",
    ]
    made = TableResult("RollMux, cells by assumed constant", rows, notes)
    return Result(made, lines, ("seconds of an iteration alone", "share of throughput lost"))


def _group_sweeps(count: int, seed: int) -> tuple[list[Row], dict[str, list[tuple[float, float]]]]:
    rows: list[Row] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for solo_s in SOLO_SWEEP:
        for name, one in MICRO.items():
            jobs, alone = _group(one, count, seed, solo_s=solo_s)
            period = _period(jobs, told.WARM_S, count)
            cold = _period(jobs, dict.fromkeys(told.WARM_S, told.COLD_S["OSDI"]), count)
            lost = 1 - period / cold
            what = f"{name}, {solo_s:g} s an iteration alone"
            note = "used in the tables" if solo_s == told.SOLO_S else ""
            rows.append(row(f"{what}: lost, cold", told.COLD_LOSS, lost, even=0, note=note))
            gain = _over_solo(one, period, alone)
            rows.append(row(f"{what}: over solo (OSDI)", one.over_solo[1], gain, even=1, note=note))
            lines.setdefault(f"lost by cold starts, {name}", []).append((solo_s, lost))
    for column in ("8k", "16k", "32k"):
        for name, one in MICRO.items():
            jobs, alone = _group(one, count, seed, lengths=column)
            gain = _over_solo(one, _period(jobs, told.WARM_S, count), alone)
            note = "used in the tables" if column == told.LENGTHS else ""
            cell = f"{name}, lengths {column}: over solo (OSDI)"
            rows.append(row(cell, one.over_solo[1], gain, even=1, note=note))
    for ratio in (0.5, 0.75, 1.0, 1.5, 2.0):
        kinds = {**KINDS, "A": told.JobKind(ratio)}
        one = MICRO["A+A"]
        jobs, alone = _group(one, count, seed, kinds=kinds)
        gain = _over_solo(one, _period(jobs, told.WARM_S, count), alone)
        note = "used in the tables" if ratio == KINDS["A"].rollout_per_train else ""
        cell = f"A+A, rollout / training {ratio:g}: over solo (OSDI)"
        rows.append(row(cell, one.over_solo[1], gain, even=1, note=note))
    return rows, lines


def _trace_sweeps(seed: int) -> list[Row]:
    rows: list[Row] = []
    for sigma in (0.5, 1.0, 1.5):
        note = "used in the tables" if sigma == told.SIGMA else ""
        arrivals = draw_trace(told.TRACE_200, derive(seed, 0), sigma=sigma)
        rows += _savings(f"trace200, width of durations {sigma:g}", arrivals, POOLS, note)
    for share in HEAVY_SWEEP:
        shares = SHAPES | {"rollout-heavy": share, "train-heavy": 1 - share}
        arrivals = draw_trace(told.TRACE_200, derive(seed, 0), shares=shares)
        rows += _savings(f"trace200, heavy phases {share:g}", arrivals, POOLS, "")
    arrivals = draw_trace(told.TRACE_200, derive(seed, 0))
    for memory in (1000.0, 1500.0, 2000.0):
        pools = replace(POOLS[0], memory_gb=memory), replace(POOLS[1], memory_gb=memory)
        note = "used in the tables" if memory == told.NODE_GB else ""
        rows += _savings(f"trace200, {memory:g} GB a node", arrivals, pools, note)
    for factor in (0.5, 1.0, 2.0):
        scaled = [replace(a, job=_longer(a.job, factor)) for a in arrivals]
        note = "used in the tables" if factor == 1 else ""
        rows += _savings(f"trace200, iterations x {factor:g}", scaled, POOLS, note)
    return rows


def _period(jobs: Sequence[VirtualJob], switch_s: Mapping[str, float], count: int) -> float:
    trace = MuxSimulation(jobs, switch_s=switch_s, tail=2.0).run(count)
    return trace.period(jobs[0].member.job, count // 10)


def _over_solo(one: told.Micro, period: float, alone: Sequence[Sequence[Iteration]]) -> float:
    """Return the cost efficiency of a group whose jobs all have the same period, over solo."""
    order = sorted(range(len(one.jobs)), key=lambda n: -len(one.pins[n]))
    nodes = len({n for pin in one.pins for n in pin})
    gain = 0.0
    for n, its in zip(order, alone, strict=True):
        solo = statistics.fmean(i.rollout_s + i.train_s for i in its)
        gain += KINDS[one.jobs[n]].nodes * (told.H20 + told.H800) * solo / period
    return gain / (nodes * told.H20 + one.train * told.H800)


def _longer(job: MuxJob, factor: float) -> MuxJob:
    return replace(job, rollout_s=job.rollout_s * factor, train_s=job.train_s * factor)


def _savings(
    what: str, arrivals: Sequence[mux_trace.Arrival], pools: tuple[NodePool, NodePool], note: str
) -> list[Row]:
    """Return the bills of jobs alone and of colocated jobs, relative to RollMux's."""
    ours = run_trace(Cluster(*pools), arrivals).bill
    solo = run_trace(Cluster(*pools, most_jobs=1), arrivals).bill
    free = replace(pools[0], price=0.0), pools[1]
    colocated = run_trace(Cluster(*free, most_jobs=1), _colocated(arrivals)).bill
    rows = []
    for arm, bill in (("solo", solo), ("colocated", colocated)):
        value = told.TRACE_200_TOLD[f"{arm} / RollMux"]
        rows.append(row(f"{what}: {arm} / RollMux", value, bill / ours, even=1, note=note))
    return rows


# ---- traces


def _colocated(arrivals: Sequence[mux_trace.Arrival]) -> list[mux_trace.Arrival]:
    """Return the arrivals with all phases of a job on its train nodes. Durations are scaled to
    rollouts on these nodes."""
    faster = colocated_rollout("H800")
    out = []
    for a in arrivals:
        took = a.job.rollout_s * faster + a.job.train_s
        out.append(replace(a, alone_s=a.alone_s * took / a.job.solo_s))
    return out


def _arms(arrivals: Sequence[mux_trace.Arrival], seed: int) -> dict[str, mux_trace.TraceResult]:
    cold = told.COLD_S["OSDI"]
    return {
        "RollMux": run_trace(Cluster(*POOLS), arrivals),
        "with moves": run_trace(Cluster(*POOLS), arrivals, repack=True, move_s=cold),
        "solo": run_trace(Cluster(*POOLS, most_jobs=1), arrivals),
        "colocated": run_trace(
            Cluster(replace(POOLS[0], price=0.0), POOLS[1], most_jobs=1), _colocated(arrivals)
        ),
        "random": run_trace(Random(*POOLS, seed), arrivals),
        "greedy": run_trace(Greedy(*POOLS), arrivals),
    }


def _lines(arms: Mapping[str, mux_trace.TraceResult]) -> dict[str, list[tuple[float, float]]]:
    return {name: [(t / 3600, bill) for t, bill, _ in o.points] for name, o in arms.items()}


def _of_trace(name: str, runs: Sequence[Mapping[str, mux_trace.TraceResult]]) -> list[Row]:
    """Return table rows for results that are not published, for every scheduler."""
    facts: dict[str, Callable[[mux_trace.TraceResult, mux_trace.TraceResult], float]] = {
        "$/h of the time until the last job is done": lambda o, ours: o.per_hour,
        "bill / RollMux's": lambda o, ours: o.bill / ours.bill,
        "jobs within their SLO": lambda o, ours: o.kept,
        "jobs never asked for more": lambda o, ours: o.promised,
        "peak nodes, rollout": lambda o, ours: o.peak[0],
        "peak nodes, train": lambda o, ours: o.peak[1],
    }
    rows = []
    for arm in runs[0]:
        for what, of in facts.items():
            found = statistics.fmean(of(arms[arm], arms["RollMux"]) for arms in runs)
            rows.append(row(f"{name}, {arm}, {what}", None, found))
    moves = statistics.fmean(arms["with moves"].moves for arms in runs)
    rows.append(row(f"{name}, with moves, moves", None, moves))
    return rows


_Of = Callable[[mux_trace.TraceResult, mux_trace.TraceResult, mux_trace.TraceResult], float]
FACTS_200: dict[str, _Of] = {
    # arguments: results of RollMux, solo and colocated scheduling
    "RollMux, $/h": lambda m, s, c: m.bill / told.WINDOW_HOURS,
    "solo, $/h": lambda m, s, c: s.bill / told.WINDOW_HOURS,
    "colocated, $/h": lambda m, s, c: c.bill / told.WINDOW_HOURS,
    "solo / RollMux": lambda m, s, c: s.bill / m.bill,
    "colocated / RollMux": lambda m, s, c: c.bill / m.bill,
    "SLO kept": lambda m, s, c: m.kept,
    "fewer bubbles, rollout": lambda m, s, c: 1 - m.idle[0] / s.idle[0],
    "fewer bubbles, train": lambda m, s, c: 1 - m.idle[1] / s.idle[1],
    "peak H20": lambda m, s, c: 8 * m.peak[0],
    "peak H800": lambda m, s, c: 8 * m.peak[1],
    "peak H20, solo": lambda m, s, c: 8 * s.peak[0],
    "peak H800, solo": lambda m, s, c: 8 * s.peak[1],
}
OF_OTHERS = ("solo, $/h", "colocated, $/h", "peak H20, solo", "peak H800, solo")


def trace200(count: int, seed: int) -> Result:
    """Simulate 200 jobs in two weeks, and average over `count` traces."""
    runs = []
    for n in range(count):
        runs.append(_arms(draw_trace(told.TRACE_200, derive(seed, n)), derive(seed, n)))

    rows: list[Row] = []
    for arm in ("RollMux", "with moves"):
        found = {
            cell: statistics.fmean(of(arms[arm], arms["solo"], arms["colocated"]) for arms in runs)
            for cell, of in FACTS_200.items()
        }
        for cell, value in told.TRACE_200_TOLD.items():
            if arm == "RollMux" or cell not in OF_OTHERS:
                what = "" if arm == "RollMux" else " (with moves)"
                is_fitted = cell == "solo, $/h"
                even = 1.0 if " / " in cell else None
                rows.append(row(cell + what, value, found[cell], fitted=is_fitted, even=even))
    rows += _of_trace("trace", runs)
    notes = [
        f"Means of {count} traces. $/h: the bill over {told.WINDOW_HOURS} h, the published window.",
        "The jobs are ours: the nine profiles, Poisson arrivals, log-normal durations of the",
        "published mean, sizes fitted on what the jobs cost alone. Every iteration takes the worst",
        "case. Bubbles: share of solo's idle time that is saved. With moves: `Cluster.repack`,",
        "which is not in the paper; a job loses 135.8 s, a cold start, whenever it is moved.",
    ]
    made = TableResult("RollMux, 200 jobs in two weeks", rows, notes)
    return Result(made, _lines(runs[0]), ("hours", "$ an hour"))


def trace300(count: int, seed: int) -> Result:
    """Simulate 300 jobs in 580 hours, for each job size (S, M, L) and for their mix."""
    rows: list[Row] = []
    lines = {}
    for name, sizes in (("S", {"S": 1.0}), ("M", {"M": 1.0}), ("L", {"L": 1.0}), ("mixed", None)):
        trace = told.TRACE_300 if sizes is None else replace(told.TRACE_300, sizes=sizes)
        arms = _arms(draw_trace(trace, seed), seed)
        for arm in ("RollMux", "with moves"):
            rows.append(row(f"300 jobs, {name}, {arm}, SLO kept", 1.0, arms[arm].kept))
        for arm in ("random", "greedy"):
            least, most = told.SLO_KEPT[arm]
            kept = arms[arm].kept
            rows.append(row(f"300 jobs, {name}, {arm}, SLO kept, least", least, kept))
            rows.append(row(f"300 jobs, {name}, {arm}, SLO kept, most", most, kept))
        rows += _of_trace(f"300 jobs, {name}", [arms])
        if name == "mixed":
            lines = _lines(arms)
    notes = [
        "Philly's arrivals are not among the published: Poisson here. The profiles are ours.",
        "Random and greedy keep no promise: they rent fewer nodes, and for longer, since their",
        "jobs take turns on nodes that are overloaded.",
    ]
    made = TableResult("RollMux, 300 jobs in 580 hours", rows, notes)
    return Result(made, lines, ("hours", "$ an hour"))


def slo(count: int, seed: int) -> Result:
    """Simulate the cost of the 200 jobs as a function of their SLO."""
    arrivals = draw_trace(told.TRACE_200, seed)
    rows: list[Row] = []
    lines: dict[str, list[tuple[float, float]]] = {"RollMux": [], "with moves": []}
    for factor in (1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0):
        tight = [replace(a, job=replace(a.job, slo=factor)) for a in arrivals]
        for arm in lines:
            moves = arm == "with moves"
            o = run_trace(
                Cluster(*POOLS), tight, repack=moves, move_s=told.COLD_S["OSDI"] if moves else 0
            )
            per_hour = o.bill / told.WINDOW_HOURS
            kept = f"{o.promised:.0%} of the promises kept"
            rows.append(row(f"SLO {factor:g}, {arm}, $/h", None, per_hour, note=kept))
            lines[arm].append((factor, per_hour))
    made = TableResult("RollMux, the 200 jobs with one SLO for all", rows, [])
    return Result(made, lines, ("SLO: times alone", "$ an hour"))


def group_size(count: int, seed: int) -> Result:
    """Simulate the cost of the 200 jobs as a function of the maximum number of jobs per group."""
    arrivals = draw_trace(told.TRACE_200, seed)
    rows: list[Row] = []
    lines: dict[str, list[tuple[float, float]]] = {"RollMux": []}
    for most in (1, 2, 3, 4, 5, 6, 8, 12):
        o = run_trace(Cluster(*POOLS, most_jobs=most), arrivals)
        per_hour = o.bill / told.WINDOW_HOURS
        rows.append(row(f"at most {most} jobs, $/h", None, per_hour))
        lines["RollMux"].append((most, per_hour))
    made = TableResult("RollMux, the 200 jobs with groups of at most so many", rows, [])
    return Result(made, lines, ("jobs of a group, at most", "$ an hour"))


def drift(count: int, seed: int) -> Result:
    """Simulate `count` traces of 200 jobs whose rollouts change while they run, against a placement
    that is made anew every hour."""
    rows: list[Row] = []
    lines: dict[str, list[tuple[float, float]]] = {"cost": [], "SLO kept": []}
    for share in (0.0, 0.1, 0.2, 0.4):
        costs, kept = [], []
        for n in range(count):
            of = derive(seed, n)
            arrivals = draw_trace(told.TRACE_200, of)
            stays = mux_drift.run(POOLS, arrivals, share, of)
            again = mux_drift.run(POOLS, arrivals, share, of, placed_again=True)
            costs.append(stays.bill / again.bill)
            kept.append(stays.kept)
        cost, slo_kept = statistics.fmean(costs), statistics.fmean(kept)
        spread = f"{min(costs):.3f} to {max(costs):.3f}"
        rows.append(
            row(f"drift {share:.0%}, cost / placed anew every hour", None, cost, note=spread)
        )
        rows.append(row(f"drift {share:.0%}, SLO kept", None, slo_kept))
        lines["cost"].append((share, cost))
        lines["SLO kept"].append((share, slo_kept))
    notes = [
        "Published (OSDI): 1.08 to 1.11 and 95.6 to 98.7 %, of three drifts that are not known to",
        "us. Ours: by its last iteration, a job's rollout is longer or shorter by up to the share.",
        "A job that is a tenth slower than its profile gets a new one, or joins again with a cold",
        "start, as in the arbiter. The placement anew moves all jobs every hour for nothing,",
        "largest first, by the same rules.",
    ]
    made = TableResult("RollMux, 200 jobs that drift", rows, notes)
    return Result(made, lines, ("change of rollouts, at most", "ratio; share"))


# ---- against the optimum

PER_INSTANCE = 12


def against_optimum(count: int, seed: int) -> Result:
    """Compare the cost of schedulers with the optimal cost, on `count` instances of twelve jobs,
    for each of the nine job profiles and for their mix."""
    rows: list[Row] = []
    workloads = {f"{shape} {size}": ([shape], [size]) for shape in SHAPES for size in SIZES}
    workloads["mixed"] = (list(SHAPES), list(SIZES))
    means: dict[str, list[float]] = {"RollMux": [], "with moves": [], "random": [], "greedy": []}
    kept: dict[str, list[float]] = {arm: [] for arm in means}
    worst = dict.fromkeys(means, 0.0)
    for name, (shapes, sizes) in workloads.items():
        ratios: dict[str, list[float]] = {arm: [] for arm in means}
        keeps: dict[str, list[float]] = {arm: [] for arm in means}
        for n in range(count):
            dice = random.Random(f"{seed} {name} {n}")
            jobs = [draw_job(str(at), dice, shapes, sizes) for at in range(PER_INSTANCE)]
            best = optimum(jobs, *POOLS)
            for arm, cluster in _clusters(derive(seed, n)).items():
                _admit_all(cluster, jobs, repack=arm == "with moves")
                ratios[arm].append(cluster.cost / best)
                good = sum(cluster.group_of(j.id).period_s <= j.limit_s * 1.000001 for j in jobs)
                keeps[arm].append(good / len(jobs))
        for arm in means:
            means[arm].append(statistics.fmean(ratios[arm]))
            kept[arm].append(statistics.fmean(keeps[arm]))
            worst[arm] = max(worst[arm], *ratios[arm])
        for arm in ("RollMux", "with moves"):
            most = max(ratios[arm])
            rows.append(row(f"{name}, {arm}, mean", None, means[arm][-1], note=f"most {most:.3f}"))
    for arm in means:
        as_told = "RollMux" if arm == "with moves" else arm
        for at, (what, pick) in enumerate((("least", min), ("most", max))):
            cell = f"bill / optimum, {arm}, {what} of the workloads"
            rows.append(row(cell, told.OVER_OPTIMUM[as_told][at], pick(means[arm])))
        for at, (what, pick) in enumerate((("least", min), ("most", max))):
            cell = f"SLO kept, {arm}, {what}"
            rows.append(row(cell, told.SLO_KEPT[as_told][at], pick(kept[arm])))
        rows.append(row(f"bill / optimum, {arm}, most of all", None, worst[arm]))
    notes = [
        f"{count} instances of {PER_INSTANCE} jobs a workload, SLO uniform from 1 to 2; jobs come",
        "one after the other, the optimum (subset dynamic programming) knows all of them. The",
        "profiles are ours. Random and greedy break promises, so they may be cheaper than the",
        "optimum, which keeps all. With moves: `Cluster.repack`, which is not in the paper.",
    ]
    return Result(TableResult("RollMux, the bill against the cheapest partition", rows, notes), {})


def _clusters(seed: int) -> dict[str, Cluster]:
    return {
        "RollMux": Cluster(*POOLS),
        "with moves": Cluster(*POOLS),
        "random": Random(*POOLS, seed),
        "greedy": Greedy(*POOLS),
    }


def _admit_all(cluster: Cluster, jobs: Sequence[MuxJob], *, repack: bool) -> None:
    for job in jobs:
        if cluster.admit(job).added and repack:
            cluster.repack(job.id)


# ---- decision time

SIZES_OF_CLUSTERS = (100, 200, 500, 1000, 2000, 5000, 10_000)


def decisions(count: int, seed: int) -> Result:
    """Measure the processor time of an admission to clusters with 100 to 10,000 jobs."""
    rows: list[Row] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    dice = random.Random(seed)
    cluster = Cluster(*POOLS)
    shapes, sizes = list(SHAPES), list(SIZES)
    there: list[str] = []
    for size in SIZES_OF_CLUSTERS:
        while len(there) < size:
            job = draw_job(f"job {len(there)}", dice, shapes, sizes)
            cluster.admit(job)
            there.append(job.id)
        for arm in ("admit", "admit and repack"):
            took = []
            for n in range(count if arm == "admit" else max(count // 4, 10)):
                job = draw_job(f"new {arm} {n}", dice, shapes, sizes)
                begin = time.process_time()
                decision = cluster.admit(job)
                if arm != "admit" and decision.added:
                    cluster.repack(job.id)
                took.append((time.process_time() - begin) * 1e3)
                cluster.leave(job.id)
            took.sort()
            p50, p99 = took[len(took) // 2], took[int(0.99 * len(took))]
            note = f"p99 {p99:.2f} ms, {len(cluster.groups)} groups"
            rows.append(row(f"{arm}, {size} jobs, p50 ms", None, p50, note=note, p99=p99))
            lines.setdefault(f"{arm}, p50", []).append((size, p50))
            lines.setdefault(f"{arm}, p99", []).append((size, p99))
    notes = [
        "Processor time of one core; jobs of the nine profiles, mixed, as they come. Published:",
        f"{told.DECISION_MS} ms with 2,000 jobs, on another machine.",
    ]
    made = TableResult("RollMux, milliseconds of a decision", rows, notes)
    return Result(made, lines, ("jobs in the cluster", "ms"), is_log=True)


EXPERIMENTS: dict[str, tuple[Callable[[int, int], Result], int]] = {
    # (function, default of --rounds: number of iterations, traces, instances or decisions)
    "micro": (micro, 100),
    "migration": (migration, 60),
    "switches": (switches, 60),
    "weight_update": (weight_update, 1),
    "sensitivity": (sensitivity, 60),
    "trace200": (trace200, 5),
    "trace300": (trace300, 1),
    "slo": (slo, 1),
    "group_size": (group_size, 1),
    "drift": (drift, 5),
    "optimum": (against_optimum, 40),
    "decisions": (decisions, 200),
}
