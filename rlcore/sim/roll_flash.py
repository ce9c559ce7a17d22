"""ROLL Flash's tables (arXiv:2510.11345), simulated with the shipped controller and sample buffer.

Settings that the paper leaves open are constants here, with their source. `table.py` says how cells
are labelled.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rlcore.records import Request, Work, group_of
from rlcore.sched.roles import Round
from rlcore.sched.router import LeastLoaded
from rlcore.sched.stop import StopAtAll, StopAtFirst
from rlcore.sim.async_rollout import (
    EndlessPrompts,
    PromptLengths,
    SimAsyncRollout,
    Update,
    async_rollout,
)
from rlcore.sim.cluster import SimAsyncRun, SimRun, simulate
from rlcore.sim.cost import EngineCost, engine_cost, hf_named, model_named
from rlcore.sim.job import SimJob, config
from rlcore.sim.published import REPLICATION_ENGINES, REPLICATION_S
from rlcore.sim.rewards import UNLIMITED, Rewards
from rlcore.sim.round import SimSettings
from rlcore.sim.splits import proposed, with_split
from rlcore.sim.table import Row, TableResult, row
from rlcore.sim.workload import FLASH_8K, GENERATORS, Generator
from rlcore.trainer.plan import TrainRow
from rlcore.utils.gpus import GPUS
from rlcore.utils.seed import derive

PROMPTS, SAMPLES = 256, 16
"""Prompts per step (256, the paper's rollout batch) and responses per prompt (our assumption)."""
MODEL, GPU, TP = "8B", GPUS["H800"], 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """Assumed response lengths of a model; the paper's lengths are not available."""

    generator: Generator
    max_running: int
    """Maximum number of running requests per engine; its KV cache usually has room for them."""
    speed_up: float
    """Published speed-up of asynchronous training over Sync-Naive on 128 GPUs."""
    prompts: int = PROMPTS
    """Number of prompts in a step."""


def _around(middle: int) -> Generator:
    return Generator(cap=32_768, mu=math.log(middle), sp=0.4, sr=0.5, pt=1.0, a=-3.5, b=1.0, s=0.5)


LAWS = {
    "3k": Law(generator=_around(3000), max_running=80, speed_up=2.24),
    "8k": Law(generator=_around(8000), max_running=32, speed_up=2.13),
    "RollPacker": Law(generator=GENERATORS["32k"], max_running=256, speed_up=2.24),
}
"""Assumed lengths of at most 32,768 tokens, by name. `3k`: median 3,000, for a base model (the
paper's Qwen3-8B-Base), fitted on the speed-up of 16 + 24 GPUs. `8k`: median 8,000, for a thinking
model (the paper's Think), our assumption. In `3k` and `8k`, 1 in 20 responses is in the long tail.
`RollPacker`: RollPacker's 32k generator (workload.py), median 800. The longest response is more
than 20 times the median, as ROLL Flash reports for its own lengths."""

SIZES = (16, 32, 64, 128)
"""Cluster sizes in GPUs; the paper gives only the speed-up of 128 GPUs as a number."""
GROWTH = 7.6
"""Published growth of asynchronous throughput with 8 times the GPUs; the model is not stated."""
SPLIT, SPLIT_SPEED_UP = (16, 24), 2.0
"""Numbers of training and rollout GPUs, and the approximate published speed-up over Sync-Naive on
40 GPUs. The model is not stated."""
ALPHAS = (0, 1, 2, 4, 8)
BEST_ALPHA = {"32k limit, 256 prompts": 2, "4k limit, 256 prompts": 1, "32k limit, 32 prompts": 4}
"""Published smallest alpha with nearly the full speed-up, by setting, from third-party notes on the
paper. It is 2 for models of 0.6B to 8B."""
ENOUGH = 1.05
"""Maximum ratio of a step's seconds to those of the fastest alpha that counts as nearly the full
speed-up (our assumption)."""
SYNC_STEPS = 3
"""Number of steps for which Sync-Naive, the synchronous baseline, is simulated."""

QUEUE_S = {"batch": 125, "queue": 58, "queue, 16 more": 37}
"""Published seconds for 8 prompts x 8 responses with dynamic filtering, by scheduling method."""
EXTRA = {"queue": 0, "queue, 16 more": 16}
KEPT = 0.75
"""Share of prompts that dynamic filtering keeps because their rewards differ; fitted together with
`FLASH_8K`."""
QUEUE_REPLICAS, QUEUE_ROUNDS = 8, 10
"""Number of engines for `queue` (our assumption), and batches simulated per unit of `--rounds`."""

EPISODES, TURNS, TURN_TOKENS = 256, 23, 50
LATENCY_S = 10.0, 10.0
"""Published mean and standard deviation of the seconds of an environment step: a Gaussian, cut at
0. `TURNS` (turns per episode) is fitted on the 892 s of `ENV_S`."""
ENV_S = 892, 362
"""Published seconds of an agentic rollout: environments in lockstep, independent environments."""
AGENTIC = {"ALFWorld": (1.58, 2.72), "SWE": (1.23, 1.81)}
"""Published speed-ups by task over the fully sequential version: with independent environments, and
with overlapped training as well."""
AGENTIC_GPUS, AGENTIC_INFER = 64, 4
"""Total number of GPUs, and number of rollout GPUs if training is separate (our assumptions)."""


def cost() -> EngineCost:
    """Return the data-sheet costs of one engine (8B on one H800)."""
    return engine_cost(model_named(MODEL), GPU, TP)


def job(law: Law, gpus: int, seed: int, *keys: str) -> SimJob:
    """Return the job of Sync-Naive: all GPUs sample, then all train. The responses of a prompt
    share one engine, and all requests start at once."""
    lengths = law.generator
    cfg = config(
        *("--run.seed", str(seed)),
        *("--data.prompts_per_step", str(law.prompts)),
        *("--data.max_prompt_tokens", str(lengths.prompt_tokens)),
        *("--rollout.samples_per_prompt", str(SAMPLES)),
        *("--rollout.max_tokens", str(lengths.cap)),
        *("--rollout.max_running_requests", str(law.max_running)),
        *("--train.tokens_per_micro_batch", str(lengths.cap + lengths.prompt_tokens)),
        *("--train.share_prefix", "false"),  # not in the paper's system
        *keys,
    )
    hf = hf_named(MODEL)
    return SimJob(name="Sync-Naive", cfg=cfg, hf=hf, gpu=GPU, gpus=gpus, workload=lengths)


@dataclass(frozen=True, slots=True)
class StepBound:
    """Simulated seconds of a step, and the upper bound on these seconds."""

    seconds: float
    bound: float
    """Upper bound on `seconds` by Proposition 2 of ROLL Flash."""

    @property
    def facts(self) -> dict[str, object]:
        """Columns of a table row: simulated seconds, bound, and whether the bound holds."""
        return {
            "seconds": round(self.seconds, 1),
            "bound_s": round(self.bound, 1),
            "holds": _holds(self.seconds, self.bound),
        }


def sync_naive(law: Law, gpus: int, steps: int, seed: int) -> float:
    """Return the seconds of a Sync-Naive step. ROLL Flash's propositions do not cover this case."""
    return simulate(job(law, gpus, seed), steps).seconds


def flow(law: Law, train: int, infer: int, alpha: float, seed: int) -> SimAsyncRollout:
    """Return a simulation of asynchronous training on `train` + `infer` GPUs. Each request waits at
    the controller until an engine has room (queue scheduling, prompt replication)."""
    queued = job(law, train + infer, seed, "--rollout.queue", "--rollout.routing", "response")
    return SimAsyncRun(with_split(queued, infer, alpha)).rollout


def measured(law: Law, train: int, infer: int, alpha: float, steps: int, seed: int) -> StepBound:
    """Return the mean seconds of a step and their upper bound, once the sample buffer is full."""
    updates = _steady(flow(law, train, infer, alpha, seed), alpha, steps)
    lengths = [n for u in updates for n in u.lengths]
    trained = sum(u.trained for u in updates) / len(updates)
    bound = bound_2(law, lengths, infer, alpha, trained)
    return StepBound(sum(u.seconds for u in updates) / len(updates), bound)


def _steady(made: SimAsyncRollout, alpha: float, steps: int) -> list[Update]:
    """Return at least `steps` updates, once the sample buffer is full. Prompts of 1 + alpha steps
    start together, so a slow update recurs after as many steps: only whole cycles are measured. The
    first two cycles are up to a sixth slower than later ones."""
    cycle = math.ceil(alpha) + 1
    made.run(2 * cycle)
    return made.run(math.ceil(steps / cycle) * cycle)


def best_share(law: Law, gpus: int, seed: int) -> int:
    """Return the number of training GPUs by Proposition 2, rounded to sixteenths of all GPUs. They
    are a share beta* = E mu_t / (mu_g + E mu_t): a sample takes mu_g s to generate, E mu_t s to
    train."""
    made = job(law, gpus, seed)
    (step,) = SimRun(made).steps(1)
    out, alone = step.outcome, made.training_on(1)
    generate = out.seconds * (1 - out.idle) * gpus
    work = alone.work(out.rows())
    trained = alone.update_s(work) + alone.logprobs_s(work)
    unit = max(gpus // 16, 1)
    share = round(gpus * trained / (generate + trained) / unit) * unit
    return min(max(share, unit), gpus - unit)


def planned(law: Law, gpus: int, seed: int) -> int:
    """Return the number of training GPUs that the shipped planner proposes for alpha 2."""
    return gpus - proposed(job(law, gpus, seed), range(TP, gpus, TP), 2)


# ---- propositions


def bound_1(lengths: Sequence[int], workers: int, alpha: float) -> float:
    """Return Proposition 1's bound on the seconds to generate N samples on K workers: N mu_g / K +
    L_g / (alpha + 1). mu_g, L_g: mean and maximum seconds of a sample; a token takes a second."""
    batches = len(lengths) / (4 * workers)
    return sum(lengths) / batches / workers + max(lengths) / (alpha + 1)


def bound_2(law: Law, lengths: Sequence[int], infer: int, alpha: float, trained: float) -> float:
    """Return Proposition 2's bound on the seconds of a step, plus a weight update: max(N E mu_t /
    (beta K), N mu_g / ((1 - beta) K) + L_g / (alpha + 1)). With alpha 0, training and generation
    alternate, so the terms are added. The share beta of K workers trains N samples E times, each
    for mu_t seconds. The other workers are slots of engines' full batches. mu_g, L_g: mean and
    maximum seconds of a sample in a slot. `trained`: the first term, in seconds."""
    work, longest = _generation(law, lengths, infer)
    samples, mean = law.prompts * SAMPLES, sum(lengths) / len(lengths)
    # each weight update makes engines prefill all running requests again
    again = (1 + alpha) * samples * mean * cost().prefill_s / infer
    generated = work + again + longest / (alpha + 1)
    sync_s = with_split(job(law, 2, 0), 1, alpha).training.sync_s
    return (max(trained, generated) if alpha else trained + generated) + sync_s


def _generation(law: Law, lengths: Sequence[int], infer: int) -> tuple[float, float]:
    """Return the seconds to generate a step's samples in all batch slots, and the seconds of the
    longest sample. A running request has half of its final length, in a mean weighted by length."""
    c, full = cost(), law.max_running
    total, samples = sum(lengths), law.prompts * SAMPLES
    behind = sum(n * n for n in lengths) / (2 * total)
    each = c.decode_s(full, full * (300 + behind), 1)  # seconds of a decode step with a full batch
    prefill = samples * 300 * c.prefill_s / infer
    return samples * total / len(lengths) * each / (infer * full) + prefill, max(lengths) * each


def _always(seconds: float) -> Callable[[Sequence[TrainRow]], float]:
    return lambda rows: seconds


def _holds(seconds: float, bound: float) -> bool:
    return seconds <= bound * (1 + 1e-9)


def broken(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the table cells that exceed a proposition's bound. Any such cell shows that the
    simulation or the bound is wrong."""
    return [str(r["cell"]) for r in rows if r.get("holds") is False]


# ---- tables


def scaling(steps: int, seed: int) -> TableResult:
    """Return the speed-up of asynchronous training over Sync-Naive by number of GPUs, alpha 2, with
    the planner's split and with beta*."""
    rows: list[Row] = []
    for name, law in LAWS.items():
        speed: dict[str, dict[int, float]] = {"planner": {}, "beta*": {}}
        for gpus in SIZES:
            naive = sync_naive(law, gpus, SYNC_STEPS, seed)
            told = law.speed_up if gpus == SIZES[-1] else None
            splits = {"planner": planned(law, gpus, seed), "beta*": best_share(law, gpus, seed)}
            for by, train in splits.items():
                ours = measured(law, train, gpus - train, 2, steps, seed)
                speed[by][gpus] = 1 / ours.seconds
                facts = ours.facts | {"sync_s": round(naive, 1), "law": name, "train": train}
                if by == "planner":
                    facts["at"] = gpus
                note = f"{train} train"
                cell = f"{name}, {gpus} GPUs, split by {by}"
                rows.append(row(cell, told, naive / ours.seconds, even=1, note=note) | facts)
        for by, of in speed.items():
            growth = of[SIZES[-1]] / of[SIZES[0]]
            cell = f"{name}, throughput of {SIZES[-1]} GPUs over {SIZES[0]}, split by {by}"
            rows.append(row(cell, GROWTH, growth, even=1))
    notes = ["planner: sched/balance.py, which a run asks; only 128 GPUs are published by number"]
    return TableResult("ROLL Flash: asynchronous over Sync-Naive, alpha 2", rows, [*notes, _note()])


def staleness(steps: int, seed: int) -> TableResult:
    """Return the speed-up of 16 train + 24 rollout GPUs over Sync-Naive on 40 GPUs, by alpha."""
    rows: list[Row] = []
    for name, law in LAWS.items():
        naive = sync_naive(law, sum(SPLIT), SYNC_STEPS, seed)
        for alpha in ALPHAS:
            ours = measured(law, *SPLIT, alpha, steps, seed)
            told = SPLIT_SPEED_UP if alpha == 2 else None
            note = "" if alpha == 2 else "not published by number; the paper's knee is at 2"
            fitted = alpha == 2 and name == "3k"
            facts = ours.facts | {"law": name, "at": alpha}
            speed_up = naive / ours.seconds
            cell = f"{name}, alpha {alpha}"
            rows.append(row(cell, told, speed_up, fitted=fitted, even=1, note=note) | facts)
    title = "ROLL Flash: staleness, 16 GPUs that train and 24 that sample over Sync-Naive on 40"
    return TableResult(title, rows, [_note()])


def alphas(steps: int, seed: int) -> TableResult:
    """Return the smallest alpha with nearly the full speed-up, by length limit and by number of
    prompts in a step, on 16 + 24 GPUs."""
    rows: list[Row] = []
    for name, law in LAWS.items():
        short = replace(law, generator=replace(law.generator, cap=4096))
        laws = law, short, replace(law, prompts=32)
        for (setting, told), one in zip(BEST_ALPHA.items(), laws, strict=True):
            found = {a: measured(one, *SPLIT, a, steps, seed).seconds for a in ALPHAS[1:]}
            enough = min(a for a, s in found.items() if s <= ENOUGH * min(found.values()))
            seconds = {str(a): round(s, 1) for a, s in found.items()}
            cell = f"{name}, {setting}: best alpha"
            rows.append(row(cell, told, enough, seconds=seconds))
    notes = [
        f"best alpha: the smallest of {ALPHAS[1:]} whose step takes at most {ENOUGH:g} times as "
        "long as the fastest; only 8B is simulated",
    ]
    return TableResult("ROLL Flash: the best alpha", rows, [*notes, _note()])


def splits(steps: int, seed: int) -> TableResult:
    """Return the samples per second for every split of 40 GPUs into training and rollout GPUs with
    alpha 2, and compare the fastest split, the planner's and beta* with the published one."""
    rows: list[Row] = []
    gpus, samples = sum(SPLIT), PROMPTS * SAMPLES
    for name, law in LAWS.items():
        fastest, most = 0, 0.0
        for train in range(4, gpus, 4):
            ours = measured(law, train, gpus - train, 2, steps, seed)
            facts = ours.facts | {"law": name, "at": train}
            cell = f"{name}, {train} train, {gpus - train} infer: samples/s"
            rows.append(row(cell, None, samples / ours.seconds) | facts)
            if samples / ours.seconds > most:
                fastest, most = train, samples / ours.seconds
        train = planned(law, gpus, seed)
        ours = measured(law, train, gpus - train, 2, steps, seed)
        facts = ours.facts | {"law": name, "note": f"{train} train"}
        rows.append(
            row(f"{name}, split by planner: samples/s", None, samples / ours.seconds) | facts
        )
        of = {"fastest": fastest, "planner": train, "beta*": best_share(law, gpus, seed)}
        for by, train in of.items():
            rows.append(row(f"{name}, GPUs that train, {by}", SPLIT[0], train))
    notes = ["fastest: of the nine; the paper's 16 + 24 GPUs are said to be the best of its splits"]
    return TableResult("ROLL Flash: every split of 40 GPUs, alpha 2", rows, [*notes, _note()])


def propositions(steps: int, seed: int) -> TableResult:
    """Return simulated seconds of a batch and the bounds of Propositions 1 and 2, which the seconds
    must not exceed. For Proposition 1, 64 workers have one slot each and training takes no time."""
    rows: list[Row] = []
    for alpha in ALPHAS:
        found, bound = list_scheduling(64, alpha, 4 * steps, seed)
        cell = f"1: 64 workers, 256 samples, alpha {alpha}: s"
        rows.append(_within(cell, found, bound))
    for name, law in LAWS.items():
        few = replace(law, prompts=32)
        for train, infer in ((1, 4), (2, 3), (3, 2)):
            for alpha in ALPHAS:
                ours = measured(few, train, infer, alpha, 4 * steps, seed)
                cell = f"2: {name}, 32 prompts, {train} + {infer}, alpha {alpha}: s"
                rows.append(_within(cell, ours.seconds, ours.bound))
    notes = [
        f"hold in {len(rows) - len(broken(rows))} of {len(rows)} cases; the bounds are the paper's "
        "formulas with our lengths and costs",
    ]
    return TableResult("ROLL Flash: Propositions 1 and 2, seconds and bounds", rows, notes)


def _within(cell: str, seconds: float, bound: float) -> Row:
    """Return the row of simulated seconds that must not exceed a bound."""
    note = f"bound {bound:.4g}"
    holds = _holds(seconds, bound)
    return row(cell, None, seconds, note=note, bound_s=round(bound, 3), holds=holds)


def list_scheduling(workers: int, alpha: float, steps: int, seed: int) -> tuple[float, float]:
    """Return the seconds of a batch of four samples per worker, and Proposition 1's bound. Training
    takes no time, and a token takes one second."""
    made = async_rollout(
        [EngineCost(step_s=1.0)] * workers,
        PromptLengths(GENERATORS["16k"], 1, seed),
        issue=EndlessPrompts(1),
        batch=4 * workers,
        alpha=alpha,
        train_s=lambda rows: 0.0,
        mode="in_place",
        max_running=1,
        place=LeastLoaded(1, spread=True),
    )
    updates = _steady(made, alpha, steps)
    lengths = [n for u in updates for n in u.lengths]
    return sum(u.seconds for u in updates) / len(updates), bound_1(lengths, workers, alpha)


def queue(steps: int, seed: int) -> TableResult:
    """Return the seconds until dynamic filtering has kept 8 groups of 8 responses: with queue
    scheduling, relative to running prompts in whole batches."""
    arms = {
        "": (FLASH_8K, False),
        "; --rollout.routing response": (FLASH_8K, True),
        "; RollPacker's 16k lengths": (GENERATORS["16k"], False),
    }
    rows: list[Row] = []
    rounds = QUEUE_ROUNDS * steps
    for arm, (generator, spread) in arms.items():
        mean = dict.fromkeys(QUEUE_S, 0.0)
        for k in range(rounds):
            lengths = PromptLengths(generator, 8, derive(seed, "queue", k) % 2**31)
            mean["batch"] += _in_batches(lengths, seed, k) / rounds
            for name, more in EXTRA.items():
                mean[name] += _in_a_queue(lengths, seed, k, more, spread=spread) / rounds
        for name in EXTRA:
            told = QUEUE_S[name] / QUEUE_S["batch"]
            found = mean[name] / mean["batch"]
            seconds = {key: round(s, 1) for key, s in mean.items()}
            cell, is_fitted = f"{name}{arm}: of batch", generator is FLASH_8K
            rows.append(row(cell, told, found, fitted=is_fitted, even=1, seconds=seconds))
    return TableResult(
        "ROLL Flash: queue scheduling, 8 x 8, seconds as a share of those in batches",
        rows,
        [
            f"published seconds: {', '.join(f'{k} {v}' for k, v in QUEUE_S.items())}; {rounds} "
            f"batches an arm, {QUEUE_REPLICAS} engines, the filter keeps {KEPT:.0%}",
            "ROLL keeps 8 prompts running until 8 are kept, and starts one whenever one ends; "
            "StopAtFirst replaces only a dropped prompt",
        ],
    )


def _keeps(group: str, seed: int, round_: int) -> bool:
    return derive(seed, "kept", round_, group) / 2**63 < KEPT


class _Filter(Rewards):
    """Rewards that are equal within a group if dynamic filtering is to drop the group."""

    def __init__(self, seed: int, round_: int) -> None:
        super().__init__()
        self._seed, self._number = seed, round_

    def score(self, request: Request, length: int, seconds: float) -> float:
        differs = _keeps(group_of(request.id), self._seed, self._number)
        return float(differs and request.id.endswith(".0"))


def _in_batches(lengths: PromptLengths, seed: int, round_: int) -> float:
    """Return the seconds until 8 groups are kept, if prompts run in whole batches of 8 and each
    batch waits for all its responses."""
    source, kept, seconds = EndlessPrompts(8, first=1000 * round_), 0, 0.0
    while kept < 8:
        work = source(8)
        out = SimSettings([cost()] * QUEUE_REPLICAS, lengths).run(
            Round(work=work, stop=StopAtAll())
        )
        seconds += out.seconds
        kept += sum(_keeps(w.id, seed, round_) for w in work)
    return seconds


def _in_a_queue(
    lengths: PromptLengths, seed: int, round_: int, more: int, *, spread: bool
) -> float:
    """Return the seconds until 8 groups are kept, if 8 + `more` prompts run at the beginning."""
    source = EndlessPrompts(8, first=1000 * round_)
    work = source(8 + more)
    stop = StopAtFirst({"s": 8}, {w.id: "s" for w in work}, lambda domain: _another(source))
    world = SimSettings(
        [cost()] * QUEUE_REPLICAS,
        lengths,
        rewards=_Filter(seed, round_),
        place=partial(LeastLoaded, UNLIMITED, spread=spread),
    )
    return world.run(Round(work=work, stop=stop)).seconds


def _another(source: EndlessPrompts) -> Work:
    return source(1)[0]


def replication(steps: int, seed: int) -> TableResult:
    """Compare two placements of a prompt's responses: all on one engine, and each on any engine."""
    rows: list[Row] = []
    for name, generator in (("", FLASH_8K), ("; RollPacker's 16k lengths", GENERATORS["16k"])):
        for (prompts, samples), (one, anywhere) in REPLICATION_S.items():
            seconds = {False: 0.0, True: 0.0}
            for k in range(steps):
                lengths = PromptLengths(generator, samples, derive(seed, "replication", k) % 2**31)
                for spread in seconds:
                    world = SimSettings(
                        [cost()] * REPLICATION_ENGINES,
                        lengths,
                        place=partial(LeastLoaded, UNLIMITED, spread=spread),
                    )
                    work = EndlessPrompts(samples, first=1000 * k)(prompts)
                    seconds[spread] += world.run(Round(work=work, stop=StopAtAll())).seconds / steps
            speed_up = seconds[False] / seconds[True]
            found = [round(s, 1) for s in seconds.values()]
            cell = f"{prompts} x {samples}{name}: speed-up"
            made = row(cell, one / anywhere, speed_up, even=1)
            rows.append(made | {"seconds": found, "told": [one, anywhere]})
    return TableResult(
        "ROLL Flash: prompt replication",
        rows,
        [
            f"assumed: {REPLICATION_ENGINES} engines; lengths and costs of `queue`, nothing is "
            "fitted here"
        ],
    )


class Turns(Rewards):
    """Rewards that add the environment seconds of all turns of an episode after its last token. A
    request that waits for its environment holds no engine slot, so the order of tokens and waits
    does not matter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def done_at(self, now: float, request: Request, length: int) -> tuple[float, float]:
        dice = np.random.default_rng(derive(self._seed, "turns", request.id))
        took = float(np.maximum(dice.normal(*LATENCY_S, TURNS), 0).sum())
        return now + took, took


def agentic(steps: int, seed: int) -> TableResult:
    """Compare lockstep environments with independent ones, without and with overlapped training."""
    together = sum(_together(derive(seed, "together", k)) for k in range(steps)) / steps
    engines, tokens = [cost()] * AGENTIC_GPUS, _fixed(TURNS * TURN_TOKENS)
    apart = 0.0
    for k in range(steps):
        work = EndlessPrompts(1, first=1000 * k)(EPISODES)
        out = SimSettings(engines, tokens, rewards=Turns(seed)).run(
            Round(work=work, stop=StopAtAll())
        )
        apart += out.seconds / steps
    rows = [
        row("rollout, together: s", ENV_S[0], together, fitted=True),
        row("rollout, each by itself: s", ENV_S[1], apart),
        row("rollout: speed-up", ENV_S[0] / ENV_S[1], together / apart, even=1),
    ]
    share = (AGENTIC_GPUS - AGENTIC_INFER) / AGENTIC_GPUS
    for name, (by_itself, beside) in AGENTIC.items():
        # solve the published ratio (together + train) / (apart + train) for `train`
        train = (together - by_itself * apart) / (by_itself - 1)
        made = async_rollout(
            [cost()] * AGENTIC_INFER,
            tokens,
            issue=EndlessPrompts(1),
            batch=EPISODES,
            alpha=2,
            train_s=_always(train / share),
            rewards=Turns(seed),
        )
        updates = _steady(made, 2, steps)
        seconds = sum(u.seconds for u in updates) / len(updates)
        everything = together + train
        rows += [
            row(f"{name}, by itself", by_itself, everything / (apart + train), fitted=True),
            row(f"{name}, by itself and beside training", beside, everything / seconds, even=1),
        ]
        rows[-1]["train_s"] = round(train, 1)
    return TableResult(
        "ROLL Flash: agentic, over all in turn",
        rows,
        [
            f"assumed: {EPISODES} episodes of {TURNS} turns of {TURN_TOKENS} tokens, latency "
            f"N{LATENCY_S}, {AGENTIC_GPUS} GPUs of which {AGENTIC_INFER} sample beside training, "
            "alpha 2; the seconds of training are fitted on the first figure of each task",
            "not simulated: environments that step together beside training (2.27, 1.68)",
        ],
    )


def _together(seed: int) -> float:
    """Return the seconds of a rollout in lockstep: in each turn, all episodes decode, then wait for
    the slowest environment."""
    dice = np.random.default_rng(seed)
    latency = np.maximum(dice.normal(*LATENCY_S, (TURNS, EPISODES)), 0).max(axis=1).sum()
    running = EPISODES // AGENTIC_GPUS
    decode = cost().decode_s(running, running * TURNS * TURN_TOKENS / 2, TURNS * TURN_TOKENS)
    return float(latency) + decode


def _fixed(length: int) -> Callable[[Request], int]:
    return lambda request: length


def _note() -> str:
    return (
        f"assumed: {PROMPTS} x {SAMPLES} responses, lengths as said at the top of roll_flash.py, "
        "8B on H800 by data sheet. The bound of every cell is beside it"
    )


TABLES: dict[str, Callable[[int, int], TableResult]] = {
    "scaling": scaling,
    "staleness": staleness,
    "splits": splits,
    "alphas": alphas,
    "propositions": propositions,
    "queue": queue,
    "replication": replication,
    "agentic": agentic,
}
