"""Measure the controller's time per event, against an empty event loop, and its memory.

    python tools/bench_controller.py --seed 0 --json tools/results/controller.json

The shipped controller with tail batching over virtual replicas, 2,050 live requests on 128 of them:
every replica reports lengths and counters in every interval, says which response has ended, and
brings its reward later; requests are aborted as groups fill up. An event is `handle` and a `tick`
(the deadlines), which a run has once for all events that wait: an upper bound. The empty loop takes
the same events in the same order and does nothing.

Rows: name, value, unit, baseline (the empty loop), ratio. Times are the clock's: other processes on
the same core show in the high percentiles.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from rlcore.config.schema import TailConfig  # noqa: E402
from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.records import (  # noqa: E402
    Abort,
    Aborted,
    AnyCommand,
    AnyEvent,
    Finished,
    LengthReport,
    Prompt,
    Ready,
    Rewarded,
    RewardResult,
    Sampling,
    Stats,
    Submit,
)
from rlcore.rollout.controller import Controller  # noqa: E402
from rlcore.sched.router import LeastLoaded  # noqa: E402
from rlcore.sched.tail_batching import TailBatching  # noqa: E402
from rlcore.utils import env  # noqa: E402

AIM_US = 20.0
"""Of the median event."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--replicas", type=int, default=128, help="number of engines")
    p.add_argument(
        "--prompts", type=int, default=164, help="prompts per step; 1.25 times as many are started"
    )
    p.add_argument(
        "--samples",
        type=int,
        default=8,
        help="responses per prompt; 1.25 times as many are started",
    )
    p.add_argument("--median", type=int, default=600, help="median tokens per response")
    p.add_argument("--interval", type=int, default=40, help="tokens between two reports")
    p.add_argument("--rounds", type=int, default=5, help="number of rounds")
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--json", type=Path, help="JSON file for the results")
    return p.parse_args(argv)


@dataclass
class Timed:
    """Seconds of every event, by its kind."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    ticks: list[float] = field(default_factory=list)
    """What of them `tick` took."""
    live: int = 0
    """Most requests at a time."""

    def all(self) -> list[float]:
        return [s for values in self.seconds.values() for s in values]


Handle = Callable[[AnyEvent], list[AnyCommand]]


def source(a: argparse.Namespace) -> TailBatching:
    """Prompts without an end."""
    numbers = iter(range(1 << 60))
    tokens = np.arange(64, dtype=np.int32)
    return TailBatching(
        lambda n: [(0, next(numbers)) for _ in range(n)],
        lambda row: Prompt(index=row, dataset="bench", tokens=tokens),
        num_prompts=a.prompts,
        num_samples=a.samples,
        eta_prompts=TailConfig.eta_prompts,
        eta_samples=TailConfig.eta_samples,
    )


def controller(a: argparse.Namespace, stop: Any) -> Controller:
    place = LeastLoaded(sys.maxsize)
    return Controller(ranks=range(a.replicas), place=place, stop=stop, deadline_s=1e9)


def play(a: argparse.Namespace, handle: Handle, die: random.Random, end: int = 1 << 60):
    """Virtual replicas: yields every event after it was handled, until `handle` ends the round or
    `end` intervals are over. A response has a length, log-normal as in long reasoning; its reward
    comes in a later interval."""
    length: dict[str, int] = {}
    have: list[dict[str, int]] = [{} for _ in range(a.replicas)]
    scored: list[tuple[int, str]] = []

    def tell(event: AnyEvent) -> Iterator[AnyEvent]:
        aborted = []
        for command in handle(event):
            if isinstance(command, Submit):
                for request in command.requests:
                    length[request.id] = max(1, int(die.lognormvariate(0.0, 0.9) * a.median))
                    have[command.rank][request.id] = 0
            elif isinstance(command, Abort):
                for id in command.ids:
                    if (n := have[command.rank].pop(id, None)) is not None:
                        aborted.append(Aborted(rank=command.rank, id=id, num_tokens=n))
        yield event
        for each in aborted:
            yield from tell(each)

    for rank in range(a.replicas):
        yield from tell(Ready(rank=rank))
    interval = 0
    while interval < end and (any(have) or scored):
        interval += 1
        waiting, scored = scored, []
        for rank, id in waiting:
            if die.random() < 0.5:
                scored.append((rank, id))
                continue
            yield from tell(Rewarded(rank=rank, id=id, result=RewardResult(score=die.random())))
        for rank, live in enumerate(have):
            if not live:
                continue
            for id in live:
                live[id] += a.interval
            ended = [id for id in live if live[id] >= length[id]]
            for id in ended:
                del live[id]
                yield from tell(Finished(rank=rank, id=id, num_tokens=length[id], finish="stop"))
                scored.append((rank, id))
            yield from tell(LengthReport(rank=rank, ids=tuple(live), lengths=tuple(live.values())))
            yield from tell(Stats(rank=rank, decode_steps=a.interval, decode_tokens=len(live)))


def one_round(a: argparse.Namespace, prompts: TailBatching, die: random.Random, timed: Timed):
    """Times a round; its events."""
    todo = prompts.next_round(Sampling(max_tokens=1 << 20))
    c = controller(a, todo.stop)
    begin = time.process_time_ns()
    c.start(todo.work, 0.0)
    timed.seconds.setdefault("start", []).append((time.process_time_ns() - begin) / 1e9)
    timed.live = max(timed.live, len([r for g in c.groups.values() for r in g.requests]))

    def handle(event: AnyEvent) -> list[AnyCommand]:
        begin = time.perf_counter_ns()
        commands = c.handle(event, 1.0)
        handled = time.perf_counter_ns()
        commands += c.tick(1.0)
        end = time.perf_counter_ns()
        kind = "end of round" if c.done else type(event).__name__.lower()
        timed.seconds.setdefault(kind, []).append((end - begin) / 1e9)
        timed.ticks.append((end - handled) / 1e9)
        return commands

    events = []
    for event in play(a, handle, die):
        events.append(event)
        if c.done:
            break
    assert c.kept is not None and len(c.kept) == a.prompts, c.kept
    prompts.settle(c.kept, c.dropped)
    return events


def empty(events: Sequence[AnyEvent], timed: Timed) -> None:
    """The same events in a loop that does nothing with them."""

    def nothing(event: AnyEvent, now: float) -> list[AnyCommand]:
        return []

    def tick(now: float) -> list[AnyCommand]:
        return []

    for event in events:
        begin = time.perf_counter_ns()
        commands = nothing(event, 1.0)
        commands += tick(1.0)
        spent = (time.perf_counter_ns() - begin) / 1e9
        timed.seconds.setdefault(type(event).__name__.lower(), []).append(spent)


def memory(a: argparse.Namespace) -> int:
    """Bytes that a controller holds in the middle of a round, prompts and commands apart."""
    todo = source(a).next_round(Sampling(max_tokens=1 << 20))
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    c = controller(a, todo.stop)
    c.start(todo.work, 0.0)
    for _ in play(a, lambda event: c.handle(event, 1.0), random.Random(a.seed), end=3):
        pass
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return held


def rows_of(timed: Timed, loop: Timed, num_bytes: int) -> list[dict[str, Any]]:
    rows = []

    def add(name: str, value: float, unit: str, baseline: float | None = None) -> None:
        ratio = value / baseline if baseline else None
        rows.append(
            {"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio}
        )

    start = timed.seconds.pop("start")
    ours, theirs = timed.all(), loop.all()
    for name, figure in (("p50", 0.5), ("p99", 0.99)):
        add(f"event {name}", 1e6 * at(ours, figure), "us", 1e6 * at(theirs, figure))
    add("event mean", 1e6 * statistics.mean(ours), "us", 1e6 * statistics.mean(theirs))
    add("of that tick p50", 1e6 * at(timed.ticks, 0.5), "us")
    for kind, values in timed.seconds.items():
        same = loop.seconds.get(kind, theirs)
        add(f"{kind} p50", 1e6 * at(values, 0.5), "us", 1e6 * at(same, 0.5))
        add(f"{kind} p99", 1e6 * at(values, 0.99), "us", 1e6 * at(same, 0.99))
    add("start of a round", 1e3 * statistics.median(start), "ms")
    add("memory of the controller", num_bytes / 2**20, "MiB")
    add("memory by request", num_bytes / timed.live, "bytes")
    add("events", float(len(ours)), "")
    add("live requests", float(timed.live), "")
    return rows


def at(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main(argv: list[str] | None = None) -> int:
    a = parse(argv)
    timed, loop, die, prompts = Timed(), Timed(), random.Random(a.seed), source(a)
    gc.disable()  # as no round makes cycles, and the pauses would be the events' of this file
    for _ in range(a.rounds):
        empty(one_round(a, prompts, die, timed), loop)
    gc.enable()
    rows = rows_of(timed, loop, memory(a))
    for row in rows:
        beside = f"{row['baseline']:10.3f} {row['ratio']:8.1f}x" if row["ratio"] else ""
        print(f"{row['name']:26}{row['value']:12.3f} {row['unit']:6}{beside}")
    median = rows[0]["value"]
    print(
        f"median event: {median:.1f} us, aim {AIM_US:g}: {'met' if median <= AIM_US else 'NOT met'}"
    )
    if a.json:
        settings = {k: v for k, v in vars(a).items() if k != "json"}
        text = {"what": __doc__.splitlines()[0], "settings": settings, "machine": env.report()}
        a.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(a.json, json.dumps(text | {"rows": rows}, indent=1) + "\n")
        print(a.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
