"""The tiny task over seeds, with its control: does GRPO raise held-out accuracy, and is it the
rewards?

    python tools/studies/seeds_tiny.py --seeds 0 1 2 3 4 --json tools/results/seeds_tiny.json

For every seed: `recipes/grpo_tiny.sh` (warm start included where it is not cached), and the same
run with shuffled rewards. Writes one table, one JSON file and one picture; runs stay in `--dir`. A
run that is finished already is read, not repeated.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

ARMS = {"grpo": [], "shuffled": ["--debug.shuffle_rewards"]}


def main() -> int:
    """Exit code 1 where a run failed."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--seeds", "--seed", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    p.add_argument("--dir", type=Path, default=ROOT / "runs")
    p.add_argument("--json", type=Path, required=True)
    p.add_argument("--picture", type=Path, help="default: beside the JSON file")
    p.add_argument("--control-seeds", type=int, nargs="*", help="default: all seeds")
    p.add_argument("rest", nargs="*", help="after --: further keys for every run")
    a = p.parse_args()
    controls = a.seeds if a.control_seeds is None else a.control_seeds
    rows = []
    for seed in a.seeds:
        for arm, keys in ARMS.items():
            if arm == "grpo" or seed in controls:
                rows.append(one(a.dir, seed, arm, [*keys, *a.rest]))
                report(rows, a.json)
    draw(a.dir, rows, a.picture or a.json.with_suffix(".png"))
    return 0


def one(folder: Path, seed: int, arm: str, keys: list[str]) -> dict[str, Any]:
    """One run; its accuracies and how long it took."""
    name = f"seeds_{arm}_{seed}"
    run = folder / name
    if not (run / "summary.json").is_file():
        command = ["bash", str(ROOT / "recipes/grpo_tiny.sh"), "--run.dir", str(folder)]
        command += ["--run.seed", str(seed), "--run.name", name, *keys]
        print(" ".join(command), flush=True)
        start = time.monotonic()
        subprocess.run(command, check=True)
        (run / "wall_s").write_text(f"{time.monotonic() - start:.1f}")
    s = json.loads((run / "summary.json").read_text())
    warm = json.loads((folder / f"models/label-s{seed}/warm_start.json").read_text())
    return {
        "seed": seed,
        "arm": arm,
        "probe": warm["probe_accuracy"],
        "start": s["val/accuracy_start"],
        "end": s["val/accuracy_end"],
        "steps": s["steps"],
        "wall_s": float((run / "wall_s").read_text()),
    }


def report(rows: list[dict[str, Any]], path: Path) -> None:
    """Print the table so far and write it."""
    n = 1024
    print("\nseed  arm       probe  start  end    rise    wall s")
    for r in rows:
        rise = r["end"] - r["start"]
        print(
            f"{r['seed']:<5} {r['arm']:9} {r['probe']:.3f}  {r['start']:.3f}  {r['end']:.3f}  "
            f"{rise:+.3f}  {r['wall_s']:.0f}"
        )
    out: dict[str, Any] = {"rows": rows}
    for arm in ARMS:
        ends = [r["end"] for r in rows if r["arm"] == arm]
        if ends:
            spread = statistics.stdev(ends) / math.sqrt(len(ends)) if len(ends) > 1 else math.nan
            out[arm] = {"mean_end": statistics.mean(ends), "std_err": spread}
            print(f"mean end, {arm}: {out[arm]['mean_end']:.3f} +- {spread:.3f} over seeds")
    ends = {(r["seed"], r["arm"]): r["end"] for r in rows}
    pairs = [
        ends[s, "grpo"] - ends[s, "shuffled"]
        for s, arm in ends
        if arm == "shuffled" and (s, "grpo") in ends
    ]
    if pairs:
        mean = statistics.mean(pairs)
        error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
        sampling = math.sqrt(2 * 0.25 / n / len(pairs))
        out["difference"] = {"mean": mean, "std_err_seeds": error, "std_err_sampling": sampling}
        print(f"grpo - shuffled: {mean:+.3f} +- {error:.3f} over {len(pairs)} seeds\n", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(out, indent=1) + "\n")


def draw(folder: Path, rows: list[dict[str, Any]], path: Path) -> None:
    """Held-out accuracy over steps, one line a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from rlcore.metrics.sinks import accuracies, read_metrics

    colours = {"grpo": "#0072b2", "shuffled": "#999999"}
    labels = {"grpo": "GRPO", "shuffled": "control: rewards shuffled"}
    figure, axes = plt.subplots(figsize=(9, 5.5), dpi=110)
    seen: set[str] = set()
    for r in rows:
        points = accuracies(read_metrics(folder / f"seeds_{r['arm']}_{r['seed']}"))["label"]
        axes.plot(
            [step for step, _, _ in points],
            [accuracy for _, accuracy, _ in points],
            color=colours[r["arm"]],
            alpha=0.85,
            label=None if r["arm"] in seen else labels[r["arm"]],
        )
        seen.add(r["arm"])
    axes.set_xlabel("step (256 samples, two updates)")
    axes.set_ylabel("held-out accuracy, 1,024 prompts, sampled at T = 1")
    axes.set_title(
        f"Tiny task, seeds {', '.join(str(s) for s in sorted({r['seed'] for r in rows}))}"
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="center right", frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    print(path)


if __name__ == "__main__":
    sys.exit(main())
