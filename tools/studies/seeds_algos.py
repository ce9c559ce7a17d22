"""The tiny task over algorithms and seeds: does each raise held-out accuracy?

    python tools/studies/seeds_algos.py --seeds 0 1 2 --jobs 2 --json tools/results/seeds_algos.json

For every algorithm and seed `recipes/algo_tiny.sh --algo NAME`, one process each, `--jobs` at a
time. Writes one table, one JSON file and one picture; runs stay in `--dir`, and a run that is
finished already is read, not repeated.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

ALGOS = ("grpo", "dapo", "ppo", "gspo", "cispo", "topr", "decoupled_ppo")


def main() -> int:
    """Exit code 1 where an algorithm did not raise the accuracy of a seed."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--algos", nargs="+", default=list(ALGOS))
    p.add_argument("--seeds", "--seed", type=int, nargs="+", default=[0, 1, 2])
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--jobs", type=int, default=1, help="runs at a time, one process each")
    p.add_argument("--dir", type=Path, default=ROOT / "runs")
    p.add_argument("--json", type=Path, required=True)
    p.add_argument("--picture", type=Path, help="default: beside the JSON file")
    p.add_argument("rest", nargs="*", help="after --: further keys for every run")
    a = p.parse_args()
    for seed in a.seeds:  # the warm start of a seed is made once, before runs share it
        warm_start(a.dir, seed)
    pairs = [(algo, seed) for seed in a.seeds for algo in a.algos]
    with ThreadPoolExecutor(a.jobs) as pool:
        rows = list(pool.map(lambda pair: one(a.dir, *pair, a.steps, a.rest), pairs))
    report(rows, a.json)
    draw(a.dir, rows, a.picture or a.json.with_suffix(".png"))
    return int(any(r["end"] <= r["start"] for r in rows))


def warm_start(folder: Path, seed: int) -> None:
    """The start model of a seed, where it is not there yet."""
    out = folder / f"models/label-s{seed}"
    if not (out / "model.safetensors").is_file():
        command = [sys.executable, "-m", "rlcore", "tiny", "--seed", str(seed), "--out", str(out)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def one(
    folder: Path, algo: str, seed: int, steps: int, keys: list[str], processes: int = 1
) -> dict[str, Any]:
    """One run; its accuracies and how long it took."""
    name = f"algo_{algo}_{seed}_{steps}"
    run = folder / (f"{name}_{zlib.crc32(' '.join(keys).encode()):08x}" if keys else name)
    if not (run / "summary.json").is_file():
        command = ["bash", str(ROOT / "recipes/algo_tiny.sh"), "--algo", algo]
        command += ["--run.dir", str(folder), "--run.name", run.name, "--run.seed", str(seed)]
        command += ["--run.steps", str(steps), *keys]
        print(" ".join(command), flush=True)
        start = time.monotonic()
        run.mkdir(parents=True, exist_ok=True)
        with open(run / "screen.txt", "w") as screen:
            subprocess.run(
                command,
                check=True,
                stdout=screen,
                stderr=subprocess.STDOUT,
                env=os.environ | {"GPUS_PER_NODE": str(processes)},
            )
        (run / "wall_s").write_text(f"{time.monotonic() - start:.1f}")
    s = json.loads((run / "summary.json").read_text())
    return {
        "name": f"{algo} seed {seed}",
        "value": s["val/accuracy_end"],
        "unit": "held-out accuracy",
        "baseline": s["val/accuracy_start"],
        "ratio": s["val/accuracy_end"] / max(s["val/accuracy_start"], 1e-9),
        "algo": algo,
        "seed": seed,
        "start": s["val/accuracy_start"],
        "end": s["val/accuracy_end"],
        "steps": s["steps"],
        "wall_s": float(took.read_text()) if (took := run / "wall_s").is_file() else math.nan,
        "run": run.name,
    }


def report(rows: list[dict[str, Any]], path: Path) -> None:
    """Print the table and write it."""
    seeds = sorted({r["seed"] for r in rows})
    heads = "".join(f"  seed {s}".ljust(18) for s in seeds)
    print(f"\n{'algorithm':15}{heads}  mean end         mean rise  s a run")
    for algo in dict.fromkeys(r["algo"] for r in rows):
        own = {r["seed"]: r for r in rows if r["algo"] == algo}
        ends = [r["end"] for r in own.values()]
        rises = [r["end"] - r["start"] for r in own.values()]
        error = statistics.stdev(ends) / math.sqrt(len(ends)) if len(ends) > 1 else math.nan
        cells = "".join(f"  {own[s]['start']:.3f} -> {own[s]['end']:.3f}".ljust(18) for s in seeds)
        wall = statistics.mean(r["wall_s"] for r in own.values())
        print(
            f"{algo:15}{cells}  {statistics.mean(ends):.3f} +- {error:.3f}"
            f"   {statistics.mean(rises):+.3f}     {wall:.0f}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def draw(folder: Path, rows: list[dict[str, Any]], path: Path) -> None:
    """Held-out accuracy over steps: one panel for each algorithm, one line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from rlcore.metrics.sinks import accuracies, read_metrics

    names = list(dict.fromkeys(r["algo"] for r in rows))
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(3.2 * columns, 2.8 * lines), dpi=110, sharey=True, squeeze=False
    )
    colours = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"]
    seeds = sorted({r["seed"] for r in rows})
    for axes, name in zip(grid.flat, names, strict=False):
        for r in (r for r in rows if r["algo"] == name):
            points = accuracies(read_metrics(folder / r["run"]))["label"]
            colour = colours[seeds.index(r["seed"]) % len(colours)]
            xs, ys = [p[0] for p in points], [p[1] for p in points]
            axes.plot(xs, ys, color=colour, marker="o", ms=3, label=f"seed {r['seed']}")
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.25)
    for axes in list(grid.flat)[len(names) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("held-out accuracy")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    grid[0][0].legend(loc="lower right", fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    print(path)


if __name__ == "__main__":
    sys.exit(main())
