"""RollPacker's tables from the shipped controller and policies: published against simulated."""

import statistics
from collections.abc import Callable, Iterator

import numpy as np

from rlcore.records import Prompt, Request, Sampling, group_of
from rlcore.sched.source import EpochOrder
from rlcore.sched.tail_batching import TailBatching
from rlcore.sim.cost import Cost
from rlcore.sim.published import (
    FIGURE_11,
    FIGURE_11_ARMS,
    FIGURE_11_SECONDS,
    PROMPTS,
    SAMPLES,
)
from rlcore.sim.workload import GENERATORS
from rlcore.sim.world import Outcome, World
from rlcore.utils.seed import derive

REPLICAS = 16
"""14B over 32 GPUs, TP 2."""
SEVERAL = ("8k", "16k", "32k")


def rows_in_order() -> Callable[[int], list[tuple[int, int]]]:
    """An endless data set."""
    at = 0

    def next_rows(n: int) -> list[tuple[int, int]]:
        nonlocal at
        at += n
        return [(0, row) for row in range(at - n, at)]

    return next_rows


def make_prompt(row: int, num_tokens: int) -> Prompt:
    return Prompt(index=row, source="sim", tokens=np.broadcast_to(np.int32(0), num_tokens))


def rounds(
    column: str, eta_prompts: float, eta_samples: float, count: int, seed: int
) -> Iterator[Outcome]:
    """Rounds of one arm of figure 11."""
    setting = FIGURE_11[column]
    generator = GENERATORS[setting.generator]

    def prompt_of(row: int) -> Prompt:
        return make_prompt(row, generator.prompt_tokens)

    next_rows = rows_in_order()
    if eta_prompts == eta_samples == 1:
        source: EpochOrder | TailBatching = EpochOrder(
            lambda n: [prompt_of(row) for _, row in next_rows(n)], PROMPTS, SAMPLES
        )
    else:
        source = TailBatching(
            next_rows,
            prompt_of,
            num_prompts=PROMPTS,
            num_samples=SAMPLES,
            eta_prompts=eta_prompts,
            eta_samples=eta_samples,
        )
    drawn: dict[str, np.ndarray] = {}
    rows: dict[str, tuple[int, int]] = {}

    def length(request: Request) -> int:
        group = group_of(request.id)
        if group not in drawn:
            row, n = rows[group]
            drawn[group] = generator.lengths(row, n, derive(seed, group))
        return int(drawn[group][int(request.id.rpartition(".")[2])])

    world = World([Cost(step_s=setting.step_s)] * REPLICAS, length)
    for _ in range(count):
        todo = source.next_round(Sampling())
        drawn.clear()
        rows.update({w.id: (w.prompt.index, w.num_samples) for w in todo.work})
        outcome = world.run(todo)
        source.settle(outcome.kept, outcome.dropped)
        yield outcome


def figure_11(count: int = 100, seed: int = 0) -> list[dict[str, object]]:
    """A row per cell: ratio of the mean seconds of a round to those of the baseline."""
    out: list[dict[str, object]] = []
    for column, setting in FIGURE_11.items():
        seconds = {}
        for arm, etas in FIGURE_11_ARMS.items():
            outcomes = list(rounds(column, *etas, count, seed))
            seconds[arm] = statistics.mean(o.seconds for o in outcomes)
            published = FIGURE_11_SECONDS[arm][SEVERAL.index(column)]
            ratio, ours = published / setting.baseline_s, seconds[arm] / seconds["baseline"]
            kept = sum(sum(o.lengths) for o in outcomes)
            out.append(
                {
                    "cell": f"figure 11, {column}, {arm}",
                    "published": round(ratio, 3),
                    "simulated": round(ours, 3),
                    "error": round(ours - ratio, 3),
                    "fitted": True,
                    "seconds": round(seconds[arm], 1),
                    "published_seconds": published,
                    "long_share": sum(o.kind == "long" for o in outcomes) / count,
                    "trained_share": round(kept / sum(o.decoded for o in outcomes), 3),
                }
            )
    return out
