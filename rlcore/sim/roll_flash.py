"""ROLL Flash's tables from the shipped controller and sample buffer: published against simulated.

arXiv:2510.11345, PAPERS.md D3 and D5. What the paper leaves open stands as a constant here, with
where it is from; cells that a constant is fitted on say so, and so do those that do not agree.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from rlcore.records import Prompt, Request, Sampling, Work, group_of
from rlcore.sched.place import LeastLoaded
from rlcore.sched.roles import Round
from rlcore.sched.stop import All, First
from rlcore.sim.cost import GPUS, MODELS, Cost, from_data_sheet
from rlcore.sim.flow import Flow
from rlcore.sim.phases import training_from_data_sheet
from rlcore.sim.rewards import Rewards
from rlcore.sim.table import Made, Row, row
from rlcore.sim.workload import GENERATORS, Generator
from rlcore.sim.world import World
from rlcore.utils.seed import derive

PROMPTS, SAMPLES = 256, 16
"""Of a step: the paper's rollout batch of 256 prompts; 16 responses each is ours."""
LENGTHS = "32k"
"""RollPacker's 32k generator (PAPERS.md A8), for want of the paper's own lengths: their longest is
more than 20 times the median, as the paper says of its own."""
MODEL, GPU, TP = MODELS["8B"], GPUS["H800"], 1
MAX_RUNNING = 256

SCALING = {16: None, 32: None, 64: None, 128: 2.24}
"""GPUs: published speed-up of asynchronous over Sync-Naive, Qwen3-8B-Base; Think has 2.13."""
GROWTH = 7.6
"""Published: throughput of asynchronous training over 8 times the GPUs."""
SPLIT = {"16 train, 24 infer": (16, 24, 2.0)}
"""Published: about 2x over Sync-Naive on the same 40."""
ALPHAS = (0, 1, 2, 4, 8)

QUEUE_S = {"batch": 125, "queue": 58, "queue, 16 more": 37}
"""8 prompts x 8 responses with dynamic filtering."""
KEPT = 0.5
"""Share of the prompts whose rewards differ, which the filter keeps. Ours: the paper has no number;
two batches of 58 s make its 125 s."""
QUEUE_REPLICAS = 8

REPLICATION_S = {(32, 16): (116, 89), (64, 16): (149, 81), (16, 64): (162, 83)}
"""(prompts, responses): seconds with the responses of a prompt on one worker, and anywhere. The
last is 16 x 32 in another source."""
REPLICATION_REPLICAS, REPLICATION_RUNNING = 16, 32
"""Ours: workers, and the requests that one decodes at a time."""


class Lengths:
    """Tokens of each response, those of a prompt drawn together."""

    def __init__(self, generator: Generator, samples: int, seed: int) -> None:
        self.generator, self.samples, self.seed = generator, samples, seed
        self._known: dict[str, list[int]] = {}

    def __call__(self, request: Request) -> int:
        group, _, k = request.id.rpartition(".")
        if group not in self._known:
            index = int(group[1:])
            self._known[group] = self.generator.lengths(index, self.samples, self.seed)
        return self._known[group][int(k)]


class Source:
    """Prompts without end."""

    def __init__(self, samples: int, prompt_tokens: int = 300) -> None:
        self._samples, self._issued = samples, 0
        self._tokens = np.zeros(prompt_tokens, np.int32)

    def __call__(self, count: int) -> list[Work]:
        first, self._issued = self._issued, self._issued + count
        return [
            Work(
                id=f"t{i}",
                prompt=Prompt(index=i, source="s", tokens=self._tokens),
                num_samples=self._samples,
                sampling=Sampling(max_tokens=1 << 20),
            )
            for i in range(first, self._issued)
        ]


def cost() -> Cost:
    """Of one replica, from the data sheet."""
    return from_data_sheet(MODEL, GPU, TP)


def learner(gpus: int) -> tuple[Callable[[Sequence[int]], float], float]:
    """Seconds of an update of samples of these lengths, and of a push."""
    training = training_from_data_sheet(MODEL, GPU, gpus)
    return lambda n: training.update_s(n) + training.logprobs_s(n), training.sync_s


def sync_naive(gpus: int, steps: int, seed: int) -> float:
    """Seconds of a step of all GPUs sampling, then training; states move to the host between."""
    lengths, source = Lengths(GENERATORS[LENGTHS], SAMPLES, seed), Source(SAMPLES)
    train_s, sync_s = learner(gpus)
    moved = training_from_data_sheet(MODEL, GPU, gpus).step_s
    total = 0.0
    for _ in range(steps):
        world = World([cost()] * gpus, lengths, max_running=MAX_RUNNING)
        out = world.run(Round(work=source(PROMPTS), stop=All()))
        used = [p + n for p, n, _ in out.samples()]
        total += out.seconds + train_s(used) + sync_s + moved
    return total / steps


def flow(train: int, infer: int, alpha: float, seed: int) -> Flow:
    """Asynchronous training with so many GPUs for either."""
    train_s, sync_s = learner(train)
    return Flow(
        [cost()] * infer,
        Lengths(GENERATORS[LENGTHS], SAMPLES, seed),
        issue=Source(SAMPLES),
        batch=PROMPTS,
        alpha=alpha,
        train_s=train_s,
        sync_s=sync_s,
        max_running=MAX_RUNNING,
    )


def step_s(train: int, infer: int, alpha: float, steps: int, seed: int) -> float:
    """Seconds of an update, past the first ones, which fill the buffer."""
    made = flow(train, infer, alpha, seed)
    made.run(math.ceil(alpha) + 1)
    return sum(u.seconds for u in made.run(steps)) / steps


def best_share(gpus: int, seed: int) -> int:
    """GPUs that train by Proposition 2, beta* = E mu_t / (mu_g + E mu_t), in whole eighths of a
    node's: mu are the seconds of one sample on one GPU."""
    source, lengths = Source(SAMPLES), Lengths(GENERATORS[LENGTHS], SAMPLES, seed)
    out = World([cost()] * gpus, lengths, max_running=MAX_RUNNING).run(
        Round(work=source(PROMPTS), stop=All())
    )
    generate = out.seconds * (1 - out.idle) * gpus
    trained = learner(1)[0]([p + n for p, n, _ in out.samples()])
    unit = max(gpus // 16, 1)
    share = round(gpus * trained / (generate + trained) / unit) * unit
    return min(max(share, unit), gpus - unit)


# ---- tables


def scaling(steps: int, seed: int) -> Made:
    """Speed-up over Sync-Naive by GPUs, alpha 2."""
    rows: list[Row] = []
    speed = {}
    for gpus, told in SCALING.items():
        train = best_share(gpus, seed)
        ours, naive = step_s(train, gpus - train, 2, steps, seed), sync_naive(gpus, 3, seed)
        speed[gpus] = 1 / ours
        rows.append(
            row(
                f"{gpus} GPUs, {train} train",
                told,
                naive / ours,
                async_s=round(ours, 1),
                sync_s=round(naive, 1),
                note="" if told is not None else "not published by number",
            )
        )
    first, last = min(speed), max(speed)
    rows.append(row(f"throughput, {last} against {first} GPUs", GROWTH, speed[last] / speed[first]))
    return Made("ROLL Flash: asynchronous over Sync-Naive, alpha 2", rows, [_lengths_note()])


def staleness(steps: int, seed: int) -> Made:
    """16 + 24 GPUs: speed-up over Sync-Naive on 40 by alpha."""
    rows: list[Row] = []
    for name, (train, infer, told) in SPLIT.items():
        naive = sync_naive(train + infer, 3, seed)
        for alpha in ALPHAS:
            ours = step_s(train, infer, alpha, steps, seed)
            published = told if alpha == 2 else None
            note = "" if alpha == 2 else "not published by number; the paper's knee is at 2"
            rows.append(row(f"{name}, alpha {alpha}", published, naive / ours, note=note))
    return Made("ROLL Flash: staleness on 40 GPUs", rows, [_lengths_note()])


def splits(steps: int, seed: int) -> Made:
    """40 GPUs: seconds of an update for every split, alpha 2, and the one of Proposition 2."""
    rows: list[Row] = []
    best = best_share(40, seed)
    for train in range(4, 40, 4):
        ours = step_s(train, 40 - train, 2, steps, seed)
        note = "nearest to beta*" if abs(train - best) <= 2 else ""
        rows.append(row(f"{train} train, {40 - train} infer: s", None, ours, note=note))
    return Made("ROLL Flash: every split of 40 GPUs, alpha 2", rows, [f"beta* says {best}"])


def propositions(steps: int, seed: int) -> Made:
    """PAPERS.md D3: simulated seconds of an update, and the bounds, which must not be below."""
    rows: list[Row] = []
    for train, infer in ((8, 32), (16, 24), (24, 16)):
        for alpha in ALPHAS:
            made = flow(train, infer, alpha, seed)
            made.run(math.ceil(alpha) + 1)
            updates = made.run(steps)
            found = sum(u.seconds for u in updates) / steps
            bound = bound_2(made, [n for u in updates for n in u.lengths], train, infer, alpha)
            rows.append(
                row(f"{train}+{infer}, alpha {alpha}: bound, s", bound, found, holds=found <= bound)
            )
    good = sum(bool(r["holds"]) for r in rows)
    title = "ROLL Flash: Proposition 2 (published: the bound; simulated: below it)"
    return Made(title, rows, [f"holds in {good} of {len(rows)} cases"])


def bound_2(made: Flow, lengths: Sequence[int], train: int, infer: int, alpha: float) -> float:
    """max(N E mu_t / (beta K), N mu_g / ((1 - beta) K) + L_g / (alpha + 1)), and a push. A worker
    is a place in a replica's batch at full load, so mu_g is of such a place."""
    c, full = cost(), MAX_RUNNING
    mean = sum(lengths) / len(lengths)
    each = c.decode_s(full, full * (300 + mean / 2), 1)  # a step of a full batch
    samples = PROMPTS * SAMPLES
    decode = samples * mean * each / (infer * full)
    longest = max(lengths) * each
    prefill = samples * 300 * c.prefill_s / infer
    train_s, sync_s = learner(train)
    trained = train_s([300 + n for n in lengths]) * samples / len(lengths)
    again = (1 + alpha) * samples * mean * c.prefill_s / infer  # caches are made anew
    return max(trained, decode + prefill + again + longest / (alpha + 1)) + sync_s


def queue(steps: int, seed: int) -> Made:
    """8 x 8 with dynamic filtering: seconds until 8 groups are kept, against batches."""
    found: dict[str, list[float]] = {name: [] for name in QUEUE_S}
    for k in range(steps):
        lengths = Lengths(GENERATORS["16k"], 8, derive(seed, "queue", k) % 2**31)
        found["batch"].append(_in_batches(lengths, seed + k))
        for name, more in (("queue", 0), ("queue, 16 more", 16)):
            found[name].append(_in_a_queue(lengths, seed + k, more))
    mean = {name: sum(values) / len(values) for name, values in found.items()}
    rows = [
        row(
            f"{name}: ratio to batch",
            QUEUE_S[name] / QUEUE_S["batch"],
            mean[name] / mean["batch"],
            seconds=round(mean[name], 1),
        )
        for name in QUEUE_S
        if name != "batch"
    ]
    return Made(
        "ROLL Flash: queue scheduling, 8 x 8",
        rows,
        [f"assumed: the filter keeps {KEPT:.0%} of the prompts, {QUEUE_REPLICAS} replicas"],
    )


def _keeps(group: str, seed: int) -> bool:
    return derive(seed, "kept", group) / 2**63 < KEPT


class _Filter(Rewards):
    """Scores of a group are equal where the filter drops it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def score(self, request: Request, length: int, seconds: float) -> float:
        differs = _keeps(group_of(request.id), self._seed)
        return float(differs and request.id.endswith(".0"))


def _in_batches(lengths: Lengths, seed: int) -> float:
    """Whole batches until 8 groups are kept: all responses of one are waited for."""
    source, kept, seconds = Source(8), 0, 0.0
    while kept < 8:
        work = source(8)
        out = World([cost()] * QUEUE_REPLICAS, lengths).run(Round(work=work, stop=All()))
        seconds += out.seconds
        kept += sum(_keeps(w.id, seed) for w in work)
    return seconds


def _in_a_queue(lengths: Lengths, seed: int, more: int) -> float:
    """A prompt is started in the place of each that is dropped; `more` run besides."""
    source = Source(8)
    work = source(8 + more)
    stop = First({"s": 8}, {w.id: "s" for w in work}, lambda domain: _another(source))
    world = World([cost()] * QUEUE_REPLICAS, lengths, rewards=_Filter(seed))
    return world.run(Round(work=work, stop=stop)).seconds


def _another(source: Source) -> Work:
    return source(1)[0]


def replication(steps: int, seed: int) -> Made:
    """The responses of a prompt on one replica, against anywhere."""
    rows: list[Row] = []
    for (prompts, samples), (one, anywhere) in REPLICATION_S.items():
        seconds = {False: 0.0, True: 0.0}
        for k in range(steps):
            generator = GENERATORS["16k"]
            lengths = Lengths(generator, samples, derive(seed, "replication", k) % 2**31)
            for spread in seconds:
                world = World(
                    [cost()] * REPLICATION_REPLICAS,
                    lengths,
                    max_running=REPLICATION_RUNNING,
                    place=lambda spread=spread: LeastLoaded(
                        REPLICATION_RUNNING if spread else 1 << 30, spread=spread
                    ),
                )
                work = Source(samples)(prompts)
                seconds[spread] += world.run(Round(work=work, stop=All())).seconds / steps
        rows.append(
            row(
                f"{prompts} x {samples}: speed-up",
                one / anywhere,
                seconds[False] / seconds[True],
                seconds=[round(s, 1) for s in seconds.values()],
            )
        )
    return Made(
        "ROLL Flash: prompt replication",
        rows,
        [
            f"assumed: {REPLICATION_REPLICAS} replicas of {REPLICATION_RUNNING} places, lengths of "
            "RollPacker's 16k generator"
        ],
    )


def _lengths_note() -> str:
    return (
        f"assumed: {PROMPTS} x {SAMPLES} responses, lengths of RollPacker's {LENGTHS} generator, "
        "8B on H800 by data sheet; nothing is fitted"
    )


TABLES: dict[str, Callable[[int, int], Made]] = {
    "scaling": scaling,
    "staleness": staleness,
    "splits": splits,
    "propositions": propositions,
    "queue": queue,
    "replication": replication,
}
