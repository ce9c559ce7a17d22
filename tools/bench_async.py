"""Compare asynchronous with synchronous training on the tiny task.

    python tools/bench_async.py --json tools/results/async.json

The same recipe (`async_tiny.sh`), the same samples a step, with

    colocated   both processes sample, then both train (`--mode sync`): what most users run
    separate    one process samples, one trains, and the two take turns
    alpha A     the same two at once; samples are at most A policy versions old (`--mode async`)

and of each: steps an hour, how long either process waits for the other, the age of samples, the
held-out accuracy after all steps (equal samples), and after the seconds that the quickest arm took
for them. Evaluations are not counted as time.

Two processes need two cores. A decode step of a CPU costs arithmetic that the other process would
like to have, and the training of this task is short: --decode-floor-ms makes a decode step last at
least so long, as on a GPU, where it waits for memory; the process sleeps meanwhile. A floor does
not know the batch: two samplers with half of the responses each take as long per step as one with
all, as on a GPU that waits for its weights. The figures with a floor say what overlap gives, not
what this machine is worth. One run at a time, since they are timed; finished runs in --dir are
read, not repeated.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_schedules import figures, rows_of, table, train  # noqa: E402

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.metrics.plots import COLORS  # noqa: E402
from rlcore.metrics.sinks import read_metrics  # noqa: E402
from rlcore.utils import env  # noqa: E402

UNITS = {
    "steps_per_hour": "steps/h",
    "step_s": "s",
    "trainer_idle": "share",
    "rollout_idle": "share",
    "age_mean": "versions",
    "age_max": "versions",
    "stale_tokens": "tokens",
    "end": "accuracy",
    "end_equal_time": "accuracy",
}
METRICS = {
    "trainer_idle": "sched/trainer_idle",
    "rollout_idle": "sched/rollout_idle",
    "age_mean": "training/off_policy/token_staleness/mean",
    "stale_tokens": "async/stale_tokens",
}
OLDEST = "training/off_policy/trajectory_staleness_worst/max"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument(
        "--alphas", type=float, nargs="+", default=[1, 2, 4], help="values of --async.alpha"
    )
    p.add_argument(
        "--update",
        choices=["recompute", "in_place"],
        default="recompute",
        help="value of --async.weight_update",
    )
    p.add_argument(
        "--seeds", "--seed", type=int, nargs="+", default=[0, 1, 2], help="seeds of the runs"
    )
    p.add_argument("--steps", type=int, default=40, help="steps per run")
    p.add_argument(
        "--decode-floor-ms", type=float, default=10.0, help="minimum milliseconds per decode step"
    )
    p.add_argument("--dir", type=Path, default=ROOT / "runs", help="folder of the runs")
    p.add_argument("--json", type=Path, required=True, help="JSON file for the results")
    p.add_argument("--picture", type=Path, help="PNG file; default: beside the JSON file")
    p.add_argument("rest", nargs="*", help="further keys for every run, after --")
    return p.parse_args(argv)


def arms(a: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Settings by name; the first is what the others stand beside."""
    sync = ("--mode", "sync")
    found = {"colocated": (*sync, "--cluster.rollout_ranks", "0"), "separate": sync}
    for alpha in a.alphas:
        words = ("--async.alpha", f"{alpha:g}", "--async.weight_update", a.update)
        found[f"alpha {alpha:g}"] = words
    return found


def run(a: argparse.Namespace, arm: str, words: tuple[str, ...], seed: int) -> Path:
    """The folder of one run; it is made where it is not there."""
    update = "" if a.update == "recompute" else "_in_place"
    name = f"async_{arm.replace(' ', '')}{update}_{seed}_{a.steps}_{a.decode_floor_ms:g}"
    return train(a, name, "async_tiny.sh", words, seed)


def figures_of(folder: Path) -> dict[str, Any]:
    """Those of `bench_schedules.figures`, and how long who waited for whom."""
    steps = [row for row in read_metrics(folder) if row.get("timing_s/gen") is not None]
    timed = steps[1:] or steps
    own = figures(folder)
    own |= {n: statistics.mean(r.get(m, 0.0) for r in timed) for n, m in METRICS.items()}
    own["age_max"] = max(row.get(OLDEST, 0.0) for row in steps)
    own["steps_per_hour"] = 3600 / own["step_s"]
    return own


def draw(found: dict[tuple[str, int], dict[str, Any]], rows: list[dict[str, Any]], path: Path):
    """Accuracy over steps and over seconds, a line a seed; steps an hour and idle shares by arm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    steps, seconds, speed, idle = figure.subplots(1, 4, width_ratios=(4, 4, 3, 3))
    names = list(dict.fromkeys(arm for arm, _ in found))
    for (arm, _), own in found.items():
        color = COLORS[names.index(arm) % len(COLORS)]
        times, numbers, values = zip(*own["curve"], strict=True)
        for axes, along in ((steps, numbers), (seconds, times)):
            axes.plot(along, values, color=color, linewidth=1.4, marker="o", markersize=3)
    for i, arm in enumerate(names):
        color = COLORS[i % len(COLORS)]
        value = {r["figure"]: r["value"] for r in rows if r["arm"] == arm}
        seconds.plot([], [], color=color, label=arm)
        speed.bar(i, value["steps_per_hour"], color=color)
        idle.bar(i - 0.2, value["trainer_idle"], 0.38, color=color)
        idle.bar(i + 0.2, value["rollout_idle"], 0.38, color=color, alpha=0.45)
    steps.set(xlabel="step", ylabel="held-out accuracy", title="after equal samples")
    seconds.set(xlabel="seconds of training", title="after equal time")
    seconds.legend(frameon=False, loc="best")
    steps.xaxis.get_major_locator().set_params(integer=True)
    speed.set(title="steps an hour")
    idle.set(title="idle: trainer (full), sampler (pale)", ylim=(0, 1))
    for axes in (speed, idle):
        axes.set_xticks(range(len(names)), names, rotation=30)
    for axes in (steps, seconds, speed, idle):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(path)


def main(argv: list[str] | None = None) -> int:
    a = parse(argv)
    settings = arms(a)
    found = {
        (arm, seed): figures_of(run(a, arm, words, seed))
        for seed in a.seeds
        for arm, words in settings.items()
    }
    rows = rows_of(found, UNITS)
    print("\n".join(["", *table(rows), ""]))
    head = {"seeds": a.seeds, "steps": a.steps, "decode_floor_ms": a.decode_floor_ms}
    head |= {"update": a.update, "load": os.getloadavg()[0]}
    text = {"what": __doc__.splitlines()[0], "settings": head, "machine": env.report()}
    a.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(a.json, json.dumps(text | {"rows": rows}, indent=1) + "\n")
    print(a.json)
    draw(found, rows, a.picture or a.json.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
