"""RollPacker's published tables beside simulations with the shipped controller and policies."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rlcore.sim import published
from rlcore.sim.cluster import SimRun, SimStep, Summary, simulate, summarize
from rlcore.sim.cost import CONSTANTS, Constants, hf_named, model_named
from rlcore.sim.job import RowOf, SimJob, config
from rlcore.sim.lengths import read_lengths
from rlcore.sim.phases import judge_bytes
from rlcore.sim.published import PROMPTS, SAMPLES, SYSTEMS, UTILIZATION, System
from rlcore.sim.rewards import Rewards
from rlcore.sim.table import Row, TableResult, row
from rlcore.sim.user import rewards
from rlcore.sim.workload import GENERATORS, Recorded, Workload
from rlcore.utils.gpus import GPUS

H800 = GPUS["H800"]

# ---- jobs


def job_of(
    name: str,
    system: System,
    seed: int,
    *keys: str,
    prompts: int = PROMPTS,
    gpus: int = 0,
    constants: Constants = CONSTANTS,
) -> SimJob:
    """Return the job of veRL: wait for all responses, then score all, then train."""
    gpus = gpus or system.gpus
    tp, pp, cp = system.layout
    lengths = replace(GENERATORS[system.lengths], seed=seed)
    cfg = config(
        *("--run.seed", str(seed)),
        *("--data.prompts_per_step", str(prompts)),
        *("--data.max_prompt_tokens", str(lengths.prompt_tokens)),
        *("--rollout.samples_per_prompt", str(SAMPLES)),
        *("--rollout.max_tokens", str(lengths.cap)),
        *("--rollout.max_running_requests", "1024"),
        *("--rollout.gpu_memory_utilization", str(UTILIZATION)),
        *("--rollout.routing", "response"),
        *("--rollout.tp", str(system.tp)),
        *("--train.tp", str(tp), "--train.pp", str(pp), "--train.cp", str(cp)),
        *("--train.tokens_per_micro_batch", str(lengths.cap + lengths.prompt_tokens)),
        *("--algo.kl_coef", "0.001"),  # log-probs of a reference model, too
        *("--train.share_prefix", "false"),  # not in the papers' systems
        *keys,
    )
    made = partial(rewards, "mix", H800, "dedicated", gpus, seed)
    return SimJob(
        name=name,
        cfg=cfg,
        hf=hf_named(system.model),
        gpu=H800,
        gpus=gpus,
        workload=lengths,
        rewards=partial(_fixed, made, after=True),
        is_roll=True,
        constants=constants,
    )


def ladder(
    system: System,
    seed: int,
    *,
    prompts: int = PROMPTS,
    gpus: int = 0,
    constants: Constants = CONSTANTS,
) -> dict[str, SimJob]:
    """Return jobs for veRL, for the techniques of table 2 added to veRL one by one, and for
    RLHFuse as strengthened by the paper."""
    verl = job_of("veRL", system, seed, prompts=prompts, gpus=gpus, constants=constants)
    tail = verl.with_("tail", "--schedule", "tail_batching")
    beside = partial(rewards, "mix", H800, "streamed", verl.gpus, seed)
    judge = judge_bytes(model_named("7B"), streamed=True) / system.tp
    reward = replace(tail, name="reward", rewards=beside, judge_bytes=judge)
    planner = reward.with_("planner", "--rollout.adaptive_tp")
    trainer = planner.with_("trainer", *stream_keys(planner))
    fuse = replace(
        verl.with_("RLHFuse", *stream_keys(verl)),
        rewards=partial(rewards, "mix", H800, "dedicated", verl.gpus, seed),
        overlap_logprobs=True,
    )
    return {p.name: p for p in (verl, tail, reward, planner, trainer, fuse)}


def stream_keys(job: SimJob) -> tuple[str, ...]:
    """Return the keys that switch the stream trainer on; it must know the size of the cache."""
    room = int(job.engine(job.cfg.rollout.tp).cache_tokens)
    return "--mode", "stream", "--rollout.kv_cache_tokens", str(room)


def fixed_tp(job: SimJob) -> SimJob:
    """Return the job without the planner."""
    return job.with_("tp fixed", "--rollout.no_adaptive_tp")


def _fixed(made: Callable[[RowOf], Rewards], row_of: RowOf, *, after: bool = False) -> Rewards:
    return made(row_of).fixed_timeouts(after=after)


# ---- figure 11: only rollout rounds


def arm_of_figure_11(column: str, eta_prompts: float, eta_samples: float, seed: int) -> SimJob:
    """Return the job of one cell of figure 11. Only its rollout seconds are used."""
    job = job_of(column, SYSTEMS[published.FIGURE_11[column].system], seed)
    job = replace(job, rewards=lambda row_of: Rewards())
    if eta_prompts == eta_samples == 1:
        return job
    etas = ("--tail.eta_prompts", str(eta_prompts), "--tail.eta_samples", str(eta_samples))
    return job.with_(column, "--schedule", "tail_batching", *etas)


def figure_11(count: int, seed: int, data: Path) -> TableResult:
    """Return a row per cell of figure 11: the mean seconds of a round relative to the baseline."""
    rows, notes = [], []
    for column, at in published.FIGURE_11.items():
        seconds = {}
        for arm, etas in published.FIGURE_11_ARMS.items():
            steps = list(SimRun(arm_of_figure_11(column, *etas, seed)).steps(count))
            found = summarize(steps)
            seconds[arm] = found.phases["gen"]
            told = published.FIGURE_11_SECONDS[arm][column]
            rows.append(
                row(
                    f"figure 11, {column}, {arm}",
                    told / at.baseline_s,
                    seconds[arm] / seconds["baseline"],
                    fitted=at.fitted,
                    seconds=round(seconds[arm], 1),
                    published_seconds=told,
                    long_share=found.long_share,
                    trained_share=round(found.trained_share, 3),
                )
            )
        if at.note:
            notes.append(at.note)
    title = "RollPacker, figure 11: mean rollout seconds of a round, against the baseline's"
    return TableResult(title, rows, notes)


# ---- whole steps


def _rounded(found: Summary) -> dict[str, float]:
    return {k: round(v, 1) for k, v in found.phases.items()}


def _run(jobs: Mapping[str, SimJob], count: int) -> dict[str, Summary]:
    return {name: simulate(job, count) for name, job in jobs.items()}


def table_1(count: int, seed: int, data: Path) -> TableResult:
    """Return table 1: shares of rollout, reward and training in a step of veRL."""
    rows = []
    system = SYSTEMS["14B/16k"]
    for task, told in published.TABLE_1.items():
        made = partial(rewards, task, H800, "dedicated", system.gpus, seed)
        job = replace(job_of(task, system, seed), rewards=partial(_fixed, made, after=True))
        found = simulate(job, max(5, count // 10))
        p = found.phases
        ours = (p["gen"], p["reward"], p["old_log_prob"] + p["update_actor"] + p["update_weights"])
        for name, value, seconds in zip(("rollout", "reward", "training"), told, ours, strict=True):
            fitted = task == "math" or name == "training"
            share = seconds / found.seconds
            rows.append(row(f"table 1, {task}, {name}", value, share, fitted=fitted))
    return TableResult("RollPacker, table 1: shares of a step of veRL, 14B/16k", rows, [])


def table_2(count: int, seed: int, data: Path) -> TableResult:
    """Return table 2: speed-ups over veRL, with two rows where versions of the paper differ."""
    rows = []
    for name, system in SYSTEMS.items():
        arms = ladder(system, seed)
        fixed = fixed_tp(arms["trainer"])
        found = _run(arms | {fixed.name: fixed}, count)
        for arm, told in published.TABLE_2[name].items():
            speed_up = found["veRL"].seconds / found[arm].seconds
            for version, value in zip(("", " (arXiv v1)"), told, strict=False):
                cell = f"table 2, {name}, + {arm}{version}"
                rows.append(row(cell, value, speed_up, phases=_rounded(found[arm])))
        (once,) = published.TABLE_2[name]["trainer"]
        fixed_s = found[fixed.name].seconds
        cell = f"table 2, {name}, + trainer, tp fixed"
        rows.append(row(cell, once, found["veRL"].seconds / fixed_s))
        for what, seconds in (("", found["trainer"].seconds), (", tp fixed", fixed_s)):
            ours = found["RLHFuse"].seconds / seconds
            rows.append(row(f"over RLHFuse, {name}{what}", published.OVER_RLHFUSE[name], ours))
    return TableResult(
        "RollPacker, table 2: speed-up of a step over veRL, each line with those before it",
        rows,
        [
            "Where two versions were published, a row has the submission's, the next arXiv v1's.",
            "Seconds are the cost model's (`sim calibrate`); of a math reward they are fitted on",
            "table 1. Lengths are figure 11's. The judge of veRL and RLHFuse has GPUs of its own",
            "besides. Published rollouts differ among themselves (figure 10b: short rounds of 32B",
            "take 75 s, those of figure 11 have 44 s left), so not all can be met.",
            "Planner: with all engines decoding no request is preempted, so after four calm rounds "
            "it",
            "halves TP where the weights fit, and the tail, which is one step after another,",
            "takes longer. Hence the rows with TP fixed.",
        ],
    )


def figure_10c(count: int, seed: int, data: Path) -> TableResult:
    """Return figure 10c: seconds of a short and of a long step with all techniques."""
    rows = []
    for name, system in SYSTEMS.items():
        whole = ladder(system, seed)["trainer"]
        for what, job in (("", whole), (", tp fixed", fixed_tp(whole))):
            steps = list(SimRun(job).steps(max(count, 5)))  # 5 steps have at least one long round
            for kind, told in zip(("short", "long"), published.FIGURE_10C[name], strict=True):
                found = summarize([s for s in steps if s.kind == kind])
                rows.append(
                    row(
                        f"figure 10c, {name}, {kind} round{what}, s",
                        told,
                        found.seconds,
                        ratio=round(found.seconds / told, 3),
                        phases=_rounded(found),
                        note=f"x{found.seconds / told:.2f}",
                    )
                )
    return TableResult(
        "RollPacker, figure 10c: seconds of a step",
        rows,
        [
            "With these lengths no request of 14B is preempted, so the planner's rule (four calm",
            "rounds halve TP) goes to TP 1, where a decode step takes longer: hence the rows with",
            "TP fixed.",
        ],
    )


# ---- rewards


def reward_table(count: int, seed: int, data: Path) -> TableResult:
    """Return the speed-ups of a step by the parts of reward scoring (section 6), each over the part
    before it, with tail batching."""
    rows = []
    for name, system in SYSTEMS.items():
        verl = job_of(name, system, seed, "--schedule", "tail_batching")

        def step_s(job: SimJob) -> float:
            return simulate(job, max(5, count)).seconds

        def scored(kind: str, judge: str, at: SimJob = verl, gpus: int = system.gpus) -> SimJob:
            return replace(at, rewards=partial(rewards, kind, H800, judge, gpus, seed))

        during = step_s(scored("mix", "dedicated"))
        cell = f"{name}, scored during the rollout"
        rows.append(row(cell, published.ASYNC_REWARD[name], step_s(verl) / during))
        code = scored("code", "dedicated")
        fixed = replace(code, rewards=partial(_fixed, code.rewards))
        cell = f"{name}, adaptive timeout, code"
        rows.append(row(cell, published.ADAPTIVE_TIMEOUT, step_s(fixed) / step_s(code)))
        # the same GPUs in all: a quarter of them is the judge's, or all have engine and judge
        apart = round((1 - published.JUDGE_GPUS) * system.gpus)
        rest = job_of(name, system, seed, "--schedule", "tail_batching", gpus=apart)
        whole = judge_bytes(model_named("7B"), streamed=False) / system.tp
        half = judge_bytes(model_named("7B"), streamed=True) / system.tp
        shared = replace(scored("judge", "shared"), judge_bytes=whole)
        streamed = replace(scored("judge", "streamed"), judge_bytes=half)
        shared_s = step_s(shared)
        cell = f"{name}, judge beside the engine"
        of_rest = scored("judge", "dedicated", rest)
        rows.append(row(cell, published.SHARED_JUDGE, step_s(of_rest) / shared_s))
        cell = f"{name}, half of its layers from the host"
        rows.append(row(cell, published.STREAMED_JUDGE[name], shared_s / step_s(streamed)))
    return TableResult(
        "RollPacker, section 6: speed-up of a step by the parts of reward scoring",
        rows,
        [
            "Published for the judge beside the engine is the largest speed-up. GPUs are equal in",
            "both arms; no cost of two processes on a GPU (MPS) is simulated. All values are of",
            "whole steps; of which part the published ones are, the paper does not say.",
        ],
    )


# ---- stream trainer


def stream(count: int, seed: int, data: Path) -> TableResult:
    """Return table 3: seconds of a step of 7B/8k on math, averaged over long rounds."""
    system = SYSTEMS["7B/8k"]
    plain = replace(
        job_of("stream", system, seed, "--schedule", "tail_batching"),
        rewards=partial(rewards, "math", H800, "dedicated", system.gpus, seed),
    )

    def mean(*keys: str) -> float:
        steps = SimRun(plain.with_("stream", *keys)).steps(max(count, 5))
        return statistics.fmean(s.seconds for s in steps if s.kind == "long")

    def at(name: str) -> tuple[str, ...]:
        if name == "none":
            return ()
        share = () if name == "adaptive" else ("--stream.earliest", str(int(name[:-1]) / 100))
        return (*stream_keys(plain), *share, "--stream.latest", "0.5")

    rows = [
        row(f"table 3, {name}, s", t, mean(*at(name))) for name, t in published.STREAM_S.items()
    ]
    return TableResult(
        "RollPacker, table 3: seconds of a long step of 7B/8k with the stream trainer",
        rows,
        [
            "Not simulated: table 4, groups that are fetched once. No key has that behaviour.",
        ],
    )


# ---- planner


def planner(count: int, seed: int, data: Path) -> TableResult:
    """Return figures 6 and 12a: preemptions, rollout seconds by TP, and the planner's speed-up."""
    path = data / "lengths" / "epochs_long.jsonl.gz"
    lengths, said = read_lengths(path)
    rows = []
    found: dict[int, list[SimStep]] = {}
    for tp in (1, 2):
        job = _planner_job("8B", published.FIGURE_6_GPUS, tp, lengths, seed)
        found[tp] = list(SimRun(job).steps(max(5, count // 5)))
    for what, told in (
        ("preemptions", published.FIGURE_6_PREEMPTIONS),
        ("rollout, s", published.FIGURE_6_SECONDS),
    ):
        for (kind, tp), value in told.items():
            of_kind = [s.outcome for s in found[tp] if s.kind == kind]
            mean = statistics.fmean(
                o.preemptions if what == "preemptions" else o.seconds for o in of_kind
            )
            rows.append(
                row(
                    f"figure 6, {kind}, tp {tp}, {what}",
                    value,
                    mean,
                    note="not comparable: other lengths",
                )
            )
    for what, told in (
        ("preemptions", published.FIGURE_6_PREEMPTIONS),
        ("seconds", published.FIGURE_6_SECONDS),
    ):
        ours = {r["cell"]: r["simulated"] for r in rows}
        name = "preemptions" if what == "preemptions" else "rollout, s"
        for kind in ("short", "long"):
            cells = [f"figure 6, {kind}, tp {tp}, {name}" for tp in (1, 2)]
            rows.append(
                row(
                    f"figure 6, {kind}, tp 2 / tp 1, {what}",
                    told[kind, 2] / told[kind, 1],
                    # mypy sees objects, but these values are numbers
                    float(ours[cells[1]]) / float(ours[cells[0]]),  # type: ignore[arg-type]
                )
            )
    rows.append(_figure_12a(lengths, seed))
    return TableResult(
        "RollPacker, figures 6 and 12a: tensor parallelism and preemptions",
        rows,
        [
            f"Lengths: {said}.",
            "They are of another model (32B, AIME), since those of the paper's Qwen3-8B are not",
            "published: the ratios can be held against it, the absolute numbers cannot. Costs are",
            "the data sheet's, nothing is fitted.",
        ],
    )


def _planner_job(name: str, gpus: int, tp: int, lengths: Workload, seed: int, *keys: str) -> SimJob:
    """Return a job with tail batching unless `keys` say otherwise, of which the rollout counts."""
    system = System(name, gpus, tp, "32k", (2, 1, 1))
    made = job_of(f"tp {tp}", system, seed, "--schedule", "tail_batching", *keys)
    return replace(made, workload=lengths, rewards=lambda row_of: Rewards())


def _figure_12a(lengths: Recorded, seed: int) -> Row:
    """Return the planner's speed-up over fixed TP 1 while the length cap grows from 8k to 32k."""
    seconds: dict[str, list[float]] = {}
    sizes: list[int] = []
    for name, top in (("fixed", 0), ("planner", H800.per_node)):
        clipped = Growing(lengths, 8_192)
        keys = ("--rollout.adaptive_tp", "--rollout.max_tp", str(top)) if top else ()
        run = SimRun(_planner_job("14B", 16, 1, clipped, seed, "--schedule", "all", *keys))
        seconds[name] = []
        for cap in range(8_192, 32_769, 2_048):
            clipped.raise_cap(cap)
            (step,) = run.steps(1)
            seconds[name].append(step.seconds)
            if top:
                sizes.append(step.tp)
    ratios = [a / b for a, b in zip(seconds["fixed"], seconds["planner"], strict=True)]
    return row(
        "figure 12a, planner against tp 1, mean",
        published.FIGURE_12A_SPEEDUP,
        statistics.fmean(ratios),
        sizes=sizes,
        note=f"tp by step: {' '.join(map(str, sizes))}",
    )


@dataclass(slots=True)
class Growing:
    """Recorded lengths under a cap that can be raised."""

    of: Recorded
    cap: int

    @property
    def prompt_tokens(self) -> int:
        return self.of.prompt_tokens

    def raise_cap(self, cap: int) -> None:
        """Raise the cap for the following rounds."""
        self.cap = cap

    def lengths(self, row: int, count: int, seed: int) -> list[int]:
        return [min(n, self.cap) for n in self.of.lengths(row, count, seed)]


# ---- scaling


def scaling(count: int, seed: int, data: Path) -> TableResult:
    """Return figure 14: samples per second of 14B/16k, relative to veRL on 32 GPUs."""
    system = SYSTEMS["14B/16k"]
    rows: list[Row] = []
    first = 0.0
    for gpus, (prompts, verl, ours) in published.SCALING.items():
        arms = ladder(system, seed, prompts=prompts, gpus=gpus)
        for name, job, told in (
            ("veRL", arms["veRL"], verl),
            ("RollPacker", arms["trainer"], ours),
        ):
            rate = prompts * SAMPLES / simulate(job, count).seconds
            is_unit = not first
            first = first or rate
            cell = f"figure 14, {gpus} GPUs, {name}"
            rows.append(row(cell, told, rate / first, fitted=is_unit))
    return TableResult(
        "RollPacker, figure 14: samples a second of 14B/16k, against veRL over 32 GPUs",
        rows,
        ["The first cell is 1 by definition."],
    )


TABLES: dict[str, Callable[[int, int, Path], TableResult]] = {
    "11": figure_11,
    "10c": figure_10c,
    "1": table_1,
    "2": table_2,
    "rewards": reward_table,
    "planner": planner,
    "stream": stream,
    "scaling": scaling,
}
