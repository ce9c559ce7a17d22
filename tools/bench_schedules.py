"""Compare the schedules all and tail_batching on the tiny task.

    python tools/bench_schedules.py --seeds 0 1 2 --json tools/results/schedules.json
    python tools/bench_schedules.py --decode-floor-ms 5 --json tools/results/schedules_floor.json

The same recipe (`grpo_tiny.sh`, two replicas, one update a rollout, the same samples a step) with

    all         every response is waited for
    tail        1.25 times the prompts and the responses (`--schedule tail_batching`)
    tail P      1.25 times the prompts alone: no bias to short answers
    tail stream  `tail`, and one replica trains early (`--mode stream`, where this tree has it)

and of each the seconds and decode steps of a step, the held-out accuracy after all steps, and after
the seconds that the quickest arm took for them. Evaluations are not counted as time. Decode steps
are those of both replicas together. In `tail stream` sampling contains what is trained beside it.

On a CPU a decode step takes longer the more requests it has, so what ends a round early saves less
than on a GPU, where it waits for memory: --decode-floor-ms makes every step last that long at
least. One run at a time, since they are timed; finished runs in --dir are read, not repeated.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.config.schema import SelectConfig  # noqa: E402
from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.metrics.plots import COLORS  # noqa: E402
from rlcore.metrics.sinks import accuracies, read_metrics  # noqa: E402
from rlcore.utils import env  # noqa: E402

ARMS: dict[str, tuple[str, ...]] = {
    "all": ("--schedule", "all"),
    "tail": ("--schedule", "tail_batching"),
    "tail P": ("--schedule", "tail_batching", "--tail.eta_samples", "1"),
}
if "stream" in get_args(get_type_hints(SelectConfig)["mode"]):
    ARMS["tail stream"] = ("--schedule", "tail_batching", "--mode", "stream")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument(
        "--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="settings to compare"
    )
    p.add_argument(
        "--seeds", "--seed", type=int, nargs="+", default=[0, 1, 2], help="seeds of the runs"
    )
    p.add_argument("--steps", type=int, default=100, help="steps per run")
    p.add_argument(
        "--decode-floor-ms", type=float, default=0.0, help="minimum milliseconds per decode step"
    )
    p.add_argument("--dir", type=Path, default=ROOT / "runs", help="folder of the runs")
    p.add_argument("--json", type=Path, required=True, help="JSON file for the results")
    p.add_argument("--picture", type=Path, help="PNG file; default: beside the JSON file")
    p.add_argument("rest", nargs="*", help="further keys for every run, after --")
    return p.parse_args(argv)


def run(a: argparse.Namespace, arm: str, seed: int) -> Path:
    """The folder of one run; it is made where it is not there."""
    name = f"schedule_{arm.replace(' ', '')}_{seed}_{a.steps}_{a.decode_floor_ms:g}"
    return train(a, name, "grpo_tiny.sh", [*ARMS[arm], "--train.samples_per_update", "0"], seed)


def train(a: argparse.Namespace, name: str, recipe: str, keys: Sequence[str], seed: int) -> Path:
    """The folder of the run `name` of a recipe on two processes; it is made where it is not there.
    SystemExit, naming the screen's file, where the recipe fails."""
    folder = a.dir / name
    if not (folder / "summary.json").is_file():
        command = ["bash", str(ROOT / "recipes" / recipe), *keys]
        command += ["--run.dir", str(a.dir), "--run.name", name, "--run.seed", str(seed)]
        command += ["--run.steps", str(a.steps)]
        command += ["--debug.decode_floor_ms", f"{a.decode_floor_ms:g}", *a.rest]
        print(" ".join(command), flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "screen.txt", "w") as screen:
            done = subprocess.run(
                command,
                stdout=screen,
                stderr=subprocess.STDOUT,
                env={"PYTHON": sys.executable} | os.environ | {"GPUS_PER_NODE": "2"},
            )
        if done.returncode:
            raise SystemExit(f"{name} exited with {done.returncode}; see {folder / 'screen.txt'}")
    return folder


def figures(folder: Path) -> dict[str, Any]:
    """Means over the steps of a run but the first, and its accuracies with the seconds before
    them."""
    rows = read_metrics(folder)
    steps = [row for row in rows if row.get("timing_s/gen") is not None]
    timed = steps[1:] or steps
    seconds, ends = 0.0, {0: 0.0}
    for row in steps:
        seconds += row["timing_s/step"]
        ends[row["step"]] = seconds

    def mean(name: str) -> float:
        return statistics.mean(row.get(name, 0.0) for row in timed)

    return {
        "step_s": mean("timing_s/step"),
        "gen_s": mean("timing_s/gen"),
        "decode_steps": mean("sched/decode_steps"),
        "decode_tokens": mean("sched/decode_tokens"),
        "length": mean("response_length/mean"),
        "surplus": mean("sched/surplus_tokens"),
        "length_shift": mean("sched/length_shift"),
        "long_share": mean("sched/long_round"),
        "samples": mean("training/trained_rows"),
        "seconds": seconds,
        "curve": [(ends[step], step, value) for step, value, _ in accuracies(rows)["label"]],
    }


def at_time(curve: list[tuple[float, int, float]], seconds: float) -> float:
    """The accuracy of a curve at a time, straight between two evaluations."""
    before = curve[0]
    for point in curve:
        if point[0] >= seconds:
            span = point[0] - before[0]
            part = (seconds - before[0]) / span if span else 0.0
            return before[2] + part * (point[2] - before[2])
        before = point
    return before[2]


UNITS = {
    "step_s": "s",
    "gen_s": "s",
    "decode_steps": "decode steps",
    "decode_tokens": "tokens",
    "end": "accuracy",
    "end_equal_time": "accuracy",
    "length": "tokens",
    "surplus": "",
    "length_shift": "",
    "long_share": "",
}


def rows_of(
    found: dict[tuple[str, int], dict[str, Any]], units: dict[str, str] = UNITS
) -> list[dict[str, Any]]:
    """A row per arm and figure, means over seeds, against the first arm."""
    rows = []
    arms = list(dict.fromkeys(arm for arm, _ in found))
    seeds = list(dict.fromkeys(seed for _, seed in found))
    for seed in seeds:
        least = min(found[arm, seed]["seconds"] for arm in arms)
        for arm in arms:
            own = found[arm, seed]
            own["end"] = own["curve"][-1][2]
            own["end_equal_time"] = at_time(own["curve"], least)
    for name, unit in units.items():
        for arm in arms:
            values = [found[arm, seed][name] for seed in seeds]
            base = [found[arms[0], seed][name] for seed in seeds]
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
            value, baseline = statistics.mean(values), statistics.mean(base)
            rows.append(
                {
                    "name": f"{arm}: {name}",
                    "arm": arm,
                    "figure": name,
                    "value": value,
                    "unit": unit,
                    "std_err": error,
                    "baseline": baseline,
                    "ratio": value / baseline if baseline else None,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    lines = [f"{'':18}" + "".join(f"{arm:>26}" for arm in arms)]
    for name in dict.fromkeys(row["figure"] for row in rows):
        cells = []
        for arm in arms:
            (row,) = [r for r in rows if r["arm"] == arm and r["figure"] == name]
            error = f" +- {row['std_err']:.3g}" if row["std_err"] is not None else ""
            ratio = f" ({row['ratio']:.2f}x)" if row["ratio"] is not None else ""
            cells.append(f"{row['value']:.4g}{error}{ratio}".rjust(26))
        lines.append(f"{name:18}" + "".join(cells))
    return lines


def draw(found: dict[tuple[str, int], dict[str, Any]], rows: list[dict[str, Any]], path: Path):
    """Accuracy over steps and over seconds, a line a seed; seconds of a step by arm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    steps, seconds, bars, decodes = figure.subplots(1, 4, width_ratios=(4, 4, 3, 3))
    arms = list(dict.fromkeys(arm for arm, _ in found))
    for (arm, _), own in found.items():
        color = COLORS[arms.index(arm)]
        times, numbers, values = zip(*own["curve"], strict=True)
        for axes, along in ((steps, numbers), (seconds, times)):
            axes.plot(along, values, color=color, linewidth=1.4, marker="o", markersize=3)
    for arm, color in zip(arms, COLORS, strict=False):
        seconds.plot([], [], color=color, label=arm)
    steps.set(xlabel="step", ylabel="held-out accuracy", title="after equal steps")
    seconds.set(xlabel="seconds of training", title="after equal time")
    seconds.legend(frameon=False, loc="best")
    steps.xaxis.get_major_locator().set_params(integer=True)
    for i, arm in enumerate(arms):
        value = {r["figure"]: r["value"] for r in rows if r["arm"] == arm}
        rest = value["step_s"] - value["gen_s"]
        bars.bar(i, value["gen_s"], color=COLORS[i])
        bars.bar(i, rest, bottom=value["gen_s"], color=COLORS[i], alpha=0.4)
        bars.text(i, value["step_s"], f"{value['step_s']:.2f} s", ha="center", va="bottom")
        decodes.bar(i, value["decode_steps"], color=COLORS[i])
        decodes.text(
            i, value["decode_steps"], f"{value['decode_steps']:.0f}", ha="center", va="bottom"
        )
    bars.set(ylabel="seconds", title="a step: sampling (full), rest (pale)")
    decodes.set(title="decode steps of a step")
    for axes in (bars, decodes):
        axes.set_xticks(range(len(arms)), arms, rotation=20 if len(arms) > 3 else 0)
        axes.margins(y=0.1)
    for axes in (steps, seconds, bars, decodes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(path)


def main(argv: list[str] | None = None) -> int:
    a = parse(argv)
    found = {(arm, seed): figures(run(a, arm, seed)) for seed in a.seeds for arm in a.arms}
    rows = rows_of(found)
    print("\n".join(["", *table(rows), ""]))
    head = {"seeds": a.seeds, "steps": a.steps, "decode_floor_ms": a.decode_floor_ms}
    text = {"what": __doc__.splitlines()[0], "settings": head, "machine": env.report()}
    a.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(a.json, json.dumps(text | {"rows": rows}, indent=1) + "\n")
    print(a.json)
    draw(found, rows, a.picture or a.json.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
