"""Fit the constants of the cost model on published seconds: `python -m rlcore sim calibrate`.

Points are all seconds that the five papers publish of decoding, training and whole steps, of 7B,
8B, 14B and 32B. Five constants are fitted on all points at once. Then each paper is left out in
turn, the constants are fitted on the others, and the paper's points are predicted. The error of
these predictions is what to expect of a prediction, so it is the error bar of simulated seconds.

The paper on truncated importance sampling publishes no seconds. RollMux publishes its phases only
as a range of 50 to 900 s; its warm starts give `sleep_s` and `offload_s` (`cost.py`).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from rlcore.sched.roles import Round
from rlcore.sched.router import LeastLoaded
from rlcore.sched.stop import StopAtAll
from rlcore.sim import published, rollpacker
from rlcore.sim.async_rollout import EndlessPrompts, PromptLengths
from rlcore.sim.cluster import Summary, simulate
from rlcore.sim.cost import CONSTANTS, ERROR, Constants, engine_cost, model_named
from rlcore.sim.rewards import UNLIMITED
from rlcore.sim.round import SimSettings
from rlcore.sim.table import TableResult, row
from rlcore.sim.user import rewards
from rlcore.sim.workload import FLASH_8K
from rlcore.utils.gpus import GPUS

PRIOR = {
    # most plausible value before any point is seen, and the logarithm of the factor by which it may
    # well be wrong
    "bandwidth": (0.7, 0.2),
    "layer_s": (60e-6, 0.5),
    "collective_s": (12e-6, 0.5),
    "padding": (0.2, 1.0),
    "overhead_s": (20.0, 1.0),
}
"""Fitted constants. A paper may have no point that depends on a constant: ROLL Flash has none for
`collective_s`. Then the fit on this paper keeps the prior value."""
NOISE = 0.25
"""Logarithm of the factor by which a published number may well differ from any such model."""
STEPS = 5
"""Simulated steps of a point; every fifth step of tail batching is long."""


@dataclass(frozen=True, slots=True)
class Point:
    """A published number of seconds, and how to simulate it."""

    paper: str
    cell: str
    published: float
    simulated: Callable[[Constants], float]


def points(seed: int = 0) -> list[Point]:
    """Return all points."""
    found = []
    told: float
    for name in published.SYSTEMS:
        told = published.ROLLOUT_S[name]
        found.append(Point("RollPacker", f"{name}: rollout", told, partial(_rollout, name, seed)))
        if name in published.TRAINING_S:
            told = published.TRAINING_S[name]
            simulated = partial(_training, name, seed)
            found.append(Point("RollPacker", f"{name}: training", told, simulated))
        for kind, told in zip(("short", "long"), published.FIGURE_10C[name], strict=True):
            simulated = partial(_step, name, kind, seed)
            found.append(Point("RollPacker", f"{name}: {kind} step", told, simulated))
    told = published.STREAM_S["none"]
    found.append(Point("RollPacker", "7B/8k: long step of math", told, partial(_math, seed)))
    for (prompts, samples), both in published.REPLICATION_S.items():
        for spread, told in zip((False, True), both, strict=True):
            where = "any engine" if spread else "one engine"
            simulated = partial(_replicated, prompts, samples, spread, seed)
            cell = f"8B/8k, {prompts} x {samples}, {where}: rollout"
            found.append(Point("ROLL Flash", cell, told, simulated))
    share = published.RHYMERL_ROLLOUT_SHARE
    cell = "32B/16k: training over rollout"
    found.append(Point("RhymeRL", cell, (1 - share) / share, partial(_rhymerl, seed)))
    return found


@lru_cache(maxsize=256)
def _verl(name: str, seed: int, c: Constants) -> Summary:
    return simulate(rollpacker.job_of("veRL", published.SYSTEMS[name], seed, constants=c), 1)


def _rollout(name: str, seed: int, c: Constants) -> float:
    """Return the rollout seconds of veRL."""
    return _verl(name, seed, c).phases["gen"]


def _training(name: str, seed: int, c: Constants) -> float:
    """Return the seconds of veRL's learner."""
    p = _verl(name, seed, c).phases
    return p["old_log_prob"] + p["update_actor"] + p["update_weights"]


@lru_cache(maxsize=256)
def _rollpacker(name: str, seed: int, c: Constants) -> Summary:
    job = rollpacker.ladder(published.SYSTEMS[name], seed, constants=c)["trainer"]
    return simulate(rollpacker.fixed_tp(job), STEPS)


def _step(name: str, kind: str, seed: int, c: Constants) -> float:
    """Return the seconds of a short or long step of RollPacker."""
    return _rollpacker(name, seed, c).by_kind[kind]


def _math(seed: int, c: Constants) -> float:
    """Return the seconds of a long step of 7B/8k on math, without the stream trainer."""
    system = published.SYSTEMS["7B/8k"]
    keys = ("--schedule", "tail_batching")
    job = rollpacker.job_of("math", system, seed, *keys, constants=c)
    scorer = partial(rewards, "math", job.gpu, "dedicated", system.gpus, seed)
    return simulate(replace(job, rewards=scorer), STEPS).by_kind["long"]


def _replicated(prompts: int, samples: int, spread: bool, seed: int, c: Constants) -> float:
    """Return the rollout seconds of ROLL Flash's prompt replication."""
    cost = engine_cost(model_named("8B"), GPUS["H800"], 1, constants=c)
    seconds = 0.0
    for k in range(STEPS):
        world = SimSettings(
            [cost] * published.REPLICATION_ENGINES,
            PromptLengths(FLASH_8K, samples, seed + k),
            place=partial(LeastLoaded, UNLIMITED, spread=spread),
        )
        work = EndlessPrompts(samples, first=1000 * k)(prompts)
        seconds += world.run(Round(work=work, stop=StopAtAll())).seconds / STEPS
    return seconds


def _rhymerl(seed: int, c: Constants) -> float:
    """Return the seconds of training over those of rollout, in veRL as RhymeRL measured it. That
    veRL trains with FSDP, which packs."""
    system = published.System("32B", published.RHYMERL_GPUS, 4, "16k", (4, 1, 4))
    job = rollpacker.job_of("veRL", system, seed, "--rollout.samples_per_prompt", "16", constants=c)
    p = simulate(replace(job, gpu=GPUS["H100"], is_roll=False), 1).phases
    return (p["old_log_prob"] + p["update_actor"] + p["update_weights"]) / p["gen"]


# ---- the fit


def fit(points: Sequence[Point]) -> Constants:
    """Return the constants that fit the points best (maximum a posteriori).

    The fit minimizes a sum of squares with one term per point and one per constant. A point's term
    is the logarithm of simulated / published seconds, divided by `NOISE`. A constant's term is the
    logarithm of its ratio to its value in `PRIOR`, divided by its deviation in `PRIOR`.
    """
    from scipy.optimize import least_squares

    told = [math.log(p.published) for p in points]
    prior = [(math.log(value), deviation) for value, deviation in PRIOR.values()]

    def constants(x: Sequence[float]) -> Constants:
        logs = zip(PRIOR, x, prior, strict=True)
        return replace(CONSTANTS, **{n: math.exp(m + v * d) for n, v, (m, d) in logs})

    def errors(x: Sequence[float]) -> list[float]:
        c = constants(x)
        found = [math.log(p.simulated(c)) - t for p, t in zip(points, told, strict=True)]
        return [*(error / NOISE for error in found), *x]

    found = least_squares(errors, [0.0] * len(prior), diff_step=0.05, xtol=1e-2, max_nfev=6)
    return constants(found.x)


def table(
    seed: int = 0, say: Callable[[str], None] = print
) -> tuple[TableResult, dict[str, float]]:
    """Fit the constants on all points, and on all papers but one. Return a row per point, and the
    constants. A row has the seconds by the fit on all points, and by the fit without its paper."""
    every = points(seed)
    best = fit(every)
    rows = []
    for paper in dict.fromkeys(p.paper for p in every):
        say(f"without {paper} ...")
        others = fit([p for p in every if p.paper != paper])
        for p in (p for p in every if p.paper == paper):
            blind = p.simulated(others)
            rows.append(
                row(
                    f"{paper}, {p.cell}",
                    p.published,
                    p.simulated(best),
                    fitted=True,
                    without_paper=round(blind, 3),
                    ratio=round(blind / p.published, 3),
                    note=f"without {paper}: {blind:.4g} (x{blind / p.published:.2f})",
                )
            )
    logs = [math.log(float(str(r["ratio"]))) for r in rows]
    median = statistics.median(map(abs, logs))
    spread = math.sqrt(statistics.fmean(x * x for x in logs))
    constants = {n: getattr(best, n) for n in PRIOR}
    notes = [
        "fitted on all points: " + ", ".join(f"{n} {v:.4g}" for n, v in constants.items()),
        f"each paper from the others: median error {math.exp(median) - 1:.0%}, "
        f"error bar x/÷ {math.exp(spread):.2f}",
        f"in use (cost.py): error bar x/÷ {ERROR}",
    ]
    result = TableResult("The cost model against all published seconds", rows, notes)
    return result, constants | {"median": math.exp(median) - 1, "error": math.exp(spread)}
