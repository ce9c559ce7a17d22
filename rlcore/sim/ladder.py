"""What the systems give together: one after the other, in all compositions, at five sizes.

    python -m rlcore sim ladder --json FILE --picture FILE

The baseline is a synchronous run of rlcore with everything off, as veRL works: all ranks sample
until the last response, then all train. Every arm has the same data, layout and cost model, and
shares prompts. What the configuration refuses is no arm. The settings here were committed before
the first run of this command and have not been changed since; the result is whatever it is.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlcore.sim import splits
from rlcore.sim.cluster import simulate
from rlcore.sim.cost import hf_named
from rlcore.sim.job import SimJob, config
from rlcore.sim.table import Row, TableResult, row
from rlcore.sim.workload import GENERATORS
from rlcore.utils.gpus import GPUS

GPU = GPUS["H800"]


@dataclass(frozen=True, slots=True)
class LadderSize:
    """A model on a cluster. Layouts are those of the recipe of this model."""

    model: str
    lengths: str
    gpus: int
    tp: int
    """GPUs of an engine."""
    layout: tuple[str, ...]
    prompts: int = 128

    @property
    def name(self) -> str:
        return f"{self.model}/{self.lengths}/{self.gpus}"


_7B = ("--train.tp", "2", "--train.recompute", "full")
_14B = ("--train.tp", "2", "--train.pp", "2", "--train.cp", "2", "--train.recompute", "full")
_32B = ("--train.tp", "4", "--train.cp", "4", "--train.recompute", "full")
_30B_A3B = ("--train.tp", "2", "--train.ep", "8", "--train.recompute", "full")
SIZES = (
    LadderSize("7B", "8k", 16, 1, _7B),
    LadderSize("14B", "16k", 32, 2, _14B),
    LadderSize("32B", "32k", 64, 2, _32B),
    LadderSize("32B", "32k", 128, 2, _32B, prompts=256),
    LadderSize("30B-A3B", "32k", 64, 4, _30B_A3B),
)
SAMPLES = 8
EPOCH = 8
"""Steps of an epoch. HistoPipe knows no lengths in the first one, which is not counted."""
STEPS = 10
"""Simulated steps of an arm: two periods of tail batching."""

TAIL = ("--schedule", "tail_batching")
PLANNER = ("--rollout.adaptive_tp",)
STREAM = ("--mode", "stream")
DRAFTS = ("--rollout.draft", "history")
PIPE = ("--rollout.routing", "histopipe")
QUEUE = ("--rollout.queue",)
ON_POLICY = {"tail": TAIL, "planner": PLANNER, "stream": STREAM, "drafts": DRAFTS}
"""Systems that keep training strictly on-policy."""
ALPHAS = (1, 2, 4)


def job(size: LadderSize, seed: int) -> SimJob:
    """Return the baseline."""
    lengths = replace(GENERATORS[size.lengths], seed=seed)
    cfg = config(
        *("--run.seed", str(seed)),
        *("--data.prompts_per_step", str(size.prompts)),
        *("--data.num_prompts", str(EPOCH * size.prompts)),
        *("--data.max_prompt_tokens", str(lengths.prompt_tokens)),
        *("--rollout.samples_per_prompt", str(SAMPLES)),
        *("--rollout.max_tokens", str(lengths.cap)),
        *("--rollout.tp", str(size.tp)),
        *("--rollout.routing", "response"),
        *("--train.tokens_per_micro_batch", str(lengths.cap + lengths.prompt_tokens)),
        *size.layout,
    )
    made = SimJob(
        name="baseline", cfg=cfg, hf=hf_named(size.model), gpu=GPU, gpus=size.gpus, workload=lengths
    )
    room = int(made.engine(size.tp).cache_tokens)
    return made.with_("baseline", "--rollout.kv_cache_tokens", str(room))


def on_policy(base: SimJob) -> dict[str, SimJob]:
    """Return the baseline and all compositions of the systems that stay on-policy, by name."""
    found = {}
    for chosen in itertools.product((False, True), repeat=len(ON_POLICY)):
        names = [name for name, is_on in zip(ON_POLICY, chosen, strict=True) if is_on]
        name = " + ".join(names) or "baseline"
        found[name] = base.with_(name, *(key for n in names for key in ON_POLICY[n]))
    return found


def bounded(base: SimJob) -> dict[str, SimJob]:
    """Return the asynchronous jobs, by name: every alpha with and without the queue and drafts, and
    HistoPipe, which is one step off-policy. The planner chooses the split."""
    found = {}
    for alpha in ALPHAS:
        chosen = splits.by_planner(base, alpha)
        options = {"queue": QUEUE, "drafts": DRAFTS} | ({"histopipe": PIPE} if alpha == 1 else {})
        for switches in itertools.product((False, True), repeat=len(options)):
            names = [name for name, is_on in zip(options, switches, strict=True) if is_on]
            if "queue" in names and "histopipe" in names:  # a rule refuses it
                continue
            name = " + ".join([f"async {alpha}", *names])
            found[name] = chosen.with_(name, *(key for n in names for key in options[n]))
    return found


RUNGS = (
    "baseline",
    "tail",
    "tail + planner",
    "tail + planner + stream",
    "tail + planner + stream + drafts",
    "async 1 + drafts + histopipe",
    "async 1 + queue + drafts",
    "async 2 + queue + drafts",
    "async 4 + queue + drafts",
)
"""The ladder: each system added to those before it, as far as they may be combined."""


@dataclass(frozen=True, slots=True)
class SimulatedArm:
    """An arm's simulated seconds of a step, one for each seed."""

    seconds: tuple[float, ...]
    age: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seconds)


def simulated(
    size: LadderSize, seeds: Sequence[int], say: Callable[[str], None]
) -> dict[str, SimulatedArm]:
    """Simulate all arms of a size."""
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in seeds:
        base = job(size, seed)
        for name, arm in (on_policy(base) | bounded(base)).items():
            skip = EPOCH if arm.cfg.select.mode == "async" else 0
            done = simulate(arm, STEPS, skip=skip)
            found.setdefault(name, []).append((done.seconds, done.age))
        say(f"{size.name}, seed {seed}")
    return {
        name: SimulatedArm(tuple(s for s, _ in runs), statistics.fmean(a for _, a in runs))
        for name, runs in found.items()
    }


def table(
    seeds: Sequence[int], say: Callable[[str], None], sizes: Sequence[LadderSize] = SIZES
) -> TableResult:
    """Return the speed-up of every arm over the baseline, the best composition of each kind, and
    what each system contributes to it."""
    rows: list[Row] = []
    for size in sizes:
        found = simulated(size, seeds, say)
        rows += [_speed_up(size, found, name) | {"part": "rung"} for name in RUNGS]
        others = [name for name in found if name not in RUNGS]
        rows += [_speed_up(size, found, name) | {"part": "arm"} for name in others]
        for kind, names in (
            ("on-policy", [n for n in found if not n.startswith("async")]),
            ("bounded staleness", [n for n in found if n.startswith("async")]),
        ):
            best = min(names, key=lambda n: found[n].mean)
            cell = f"{size.name}: best {kind}: {best}"
            row_ = _speed_up(size, found, best)
            rows.append(row_ | {"cell": cell, "part": "best", "kind_of_best": kind})
            rows += _contributions(size, found, best)
    notes = [
        f"{len(seeds)} seeds; speed-ups of a step over the baseline. `gain of`: by how much one",
        "system makes the composition faster; below 1, it loses beside the others.",
    ]
    return TableResult("All systems together, over synchronous steps", rows, notes)


def _speed_up(size: LadderSize, found: Mapping[str, SimulatedArm], name: str) -> Row:
    base, arm = found["baseline"], found[name]
    ratios = [b / s for b, s in zip(base.seconds, arm.seconds, strict=True)]
    return row(
        f"{size.name}: {name}",
        None,
        base.mean / arm.mean,
        size=size.name,
        arm=name,
        seconds=round(arm.mean, 1),
        spread=round(max(ratios) - min(ratios), 3),
        age=round(arm.age, 2),
    )


def _contributions(size: LadderSize, found: Mapping[str, SimulatedArm], best: str) -> list[Row]:
    """Return by how much each system of a composition makes it faster: below 1, it loses."""
    rows = []
    parts = best.split(" + ")
    for part in parts:
        rest = " + ".join(p for p in parts if p != part) or "baseline"
        if rest not in found:  # the mode itself: its gain is the row of the composition
            continue
        gain = found[rest].mean / found[best].mean
        cell = f"{size.name}: {best}: gain of {part}"
        rows.append(row(cell, None, gain, size=size.name, arm=part, part="gain"))
    return rows
