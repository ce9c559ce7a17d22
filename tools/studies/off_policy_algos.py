"""The tiny task with samples of another policy: which algorithms still raise held-out accuracy?

    python tools/studies/off_policy_algos.py --seeds 0 --jobs 2 --json tools/results/off_policy.json
    python tools/studies/off_policy_algos.py --arms grpo cispo --seeds 0 1 2 3 4 --json FILE

Every arm is trained under every condition, `recipes/algo_tiny.sh` with the keys of both. Writes a
table, one JSON file and one picture. Runs stay in `--dir`, and a finished run is read, not
repeated, so that seeds can be added; `--earlier FILE` adds the rows of an earlier call. With
several seeds the table has the mean difference from grpo under the same condition and seeds.

An arm is an algorithm with its rollout correction: `ARMS`. A condition is what sampled:
`CONDITIONS`. With alpha 4 and 8 one process samples and another one trains, and nearly all tokens
are as old as allowed. int3 rounds the sampler's weights to three bits.

Accuracy is that of the trained weights in full precision, at temperature 1 on 1,024 prompts.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from exp_tis import full_precision, nan_mean, none  # noqa: E402
from seeds_algos import one, warm_start  # noqa: E402

BYPASS = ["--algo.bypass_mode"]
ARMS: dict[str, tuple[str, list[str]]] = {
    "grpo": ("grpo", []),
    "grpo, no correction": ("grpo", ["--algo.rollout_is", "none"]),
    "grpo, bypass_mode": ("grpo", BYPASS),
    "grpo, sequence mask": ("grpo", ["--algo.off_policy_mask_threshold", "0.5"]),
    "decoupled_ppo": ("decoupled_ppo", []),
    "gspo": ("gspo", []),
    "cispo": ("cispo", []),
    "sapo": ("sapo", []),
    "topr": ("topr", []),
    "kimi15": ("kimi15", []),
    "kl_cov": ("kl_cov", []),
    "gpg": ("gpg", []),
    "dppo, bypass_mode": ("dppo", BYPASS),
    "vespo, bypass_mode": ("vespo", BYPASS),
}
"""By name: `--algo`, and further keys."""
SPLIT = ["--mode", "async", "--cluster.rollout_ranks", "1", "--async.alpha"]
CONDITIONS: dict[str, tuple[int, list[str]]] = {
    "on-policy": (1, []),
    "alpha 4": (2, [*SPLIT, "4"]),
    "alpha 8": (2, [*SPLIT, "8"]),
    "int3": (1, ["--rollout.quantize", "int3"]),
}
"""By name: processes, keys."""
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73")

SIZES = ["--data.prompts_per_step", "16", "--train.samples_per_update", "64", "--eval.every", "25",
         "--checkpoint.every", "0"]  # fmt: skip
PROMPTS = 1024
LAST = 20  # steps at the end of a run that staleness and gap are means over
STALENESS = "training/off_policy/token_staleness/mean"
K3 = "rollout_corr/k3_kl"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, metavar="ARM")
    p.add_argument("--conditions", nargs="+", default=list(CONDITIONS), choices=CONDITIONS)
    p.add_argument("--seeds", "--seed", type=int, nargs="+", default=[0])
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--jobs", type=int, default=1, help="runs at a time")
    p.add_argument("--dir", type=Path, default=ROOT / "runs")
    p.add_argument("--earlier", type=Path, help="JSON file whose rows are added")
    p.add_argument("--json", type=Path, required=True, help="table and picture go beside it")
    a = p.parse_args()
    for seed in a.seeds:  # the warm start of a seed is made once, before runs share it
        warm_start(a.dir, seed)
    todo = [(arm, c, seed) for seed in a.seeds for c in a.conditions for arm in a.arms]
    with ThreadPoolExecutor(a.jobs) as pool:
        rows = list(pool.map(lambda each: row(a.dir, *each, a.steps), todo))
    if a.earlier is not None:
        before = json.loads(a.earlier.read_text())["rows"]
        new = {r["name"] for r in rows}
        rows = [*(r for r in before if r["name"] not in new), *rows]
    cells = over_seeds(rows)
    a.json.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(json.dumps({"cells": cells, "rows": rows}), parse_constant=none)
    a.json.write_text(json.dumps(found, indent=1) + "\n")
    text = table(cells, rows)
    a.json.with_suffix(".md").write_text(text)
    print("\n" + text)
    draw(cells, a.json.with_suffix(".png"))
    return 0


def row(folder: Path, arm: str, condition: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: accuracy of its weights, and how far its samples were from its policy."""
    from rlcore.metrics.sinks import read_metrics

    algo, keys = ARMS[arm]
    processes, where = CONDITIONS[condition]
    run = folder / one(folder, algo, seed, steps, [*SIZES, *where, *keys], processes)["run"]
    metrics = read_metrics(run)[-LAST:]
    start = full_precision(folder / f"models/label-s{seed}")
    end = full_precision(run / "hf")
    return {
        "name": f"{arm}, {condition}, seed {seed}",
        "value": end,
        "unit": "held-out accuracy of the trained weights in full precision",
        "baseline": start,
        "ratio": end / start,
        "arm": arm,
        "condition": condition,
        "seed": seed,
        "steps": steps,
        "staleness": mean_of(metrics, STALENESS),
        "k3": mean_of(metrics, K3),
        "run": run.name,
    }


def mean_of(metrics: Sequence[dict[str, Any]], name: str) -> float:
    """Mean over the steps that have this metric; NaN if none has it."""
    import numpy as np

    return nan_mean(np.array([m.get(name, math.nan) for m in metrics], float))


def over_seeds(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every arm and condition the mean accuracy and its standard error: over seeds, or of the
    1,024 prompts where there is one seed. `paired` is the mean difference from the same arm and
    seeds on-policy, `beside_grpo` that from the arm grpo under the same condition and seeds, each
    with its standard error."""
    plain = {(r["condition"], r["seed"]): r["value"] for r in rows if r["arm"] == "grpo"}
    cells = []
    for arm in dict.fromkeys(r["arm"] for r in rows):
        ends = {(r["condition"], r["seed"]): r["value"] for r in rows if r["arm"] == arm}
        for condition in dict.fromkeys(c for c, _ in ends):
            seeds = [s for c, s in ends if c == condition]
            values = [ends[condition, s] for s in seeds]
            pairs = [
                ends[condition, s] - ends["on-policy", s] for s in seeds if ("on-policy", s) in ends
            ]
            apart = [
                ends[condition, s] - plain[condition, s] for s in seeds if (condition, s) in plain
            ]
            of_prompts = [math.sqrt(v * (1 - v) / PROMPTS) for v in values]
            cells.append(
                {
                    "arm": arm,
                    "condition": condition,
                    "num_seeds": len(seeds),
                    "accuracy": statistics.mean(values),
                    "std_err": error(values, of_prompts[0]),
                    "paired": statistics.mean(pairs) if pairs else math.nan,
                    "paired_std_err": error(pairs, math.sqrt(2) * of_prompts[0]),
                    "beside_grpo": statistics.mean(apart) if apart else math.nan,
                    "beside_grpo_std_err": error(apart, math.sqrt(2) * of_prompts[0]),
                }
            )
    return cells


def error(values: Sequence[float], of_one: float) -> float:
    """Standard error of the mean over seeds; `of_one` where there is one."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else of_one


def table(cells: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for every arm, a column for every condition."""
    conditions = list(dict.fromkeys(c["condition"] for c in cells))
    lines = [
        "| algorithm | " + " | ".join(conditions) + " |",
        "| --- |" + " --- |" * len(conditions),
    ]
    for arm in dict.fromkeys(c["arm"] for c in cells):
        own = {c["condition"]: c for c in cells if c["arm"] == arm}
        texts = [accuracy(own[c]) for c in conditions]
        lines.append(f"| {arm} | " + " | ".join(texts) + " |")
    starts = {r["seed"]: r["baseline"] for r in rows}
    start = ", ".join(f"{value:.3f} (seed {seed})" for seed, value in sorted(starts.items()))
    lines += ["", f"Start: {start}. Means of the last {LAST} steps over arms:", ""]
    for c in conditions:
        own = [r for r in rows if r["condition"] == c]
        age, k3 = (
            [r[key] for r in own if r[key] is not None and math.isfinite(r[key])]
            for key in ("staleness", "k3")
        )
        lines.append(
            f"- {c}: staleness {statistics.mean(age) if age else 0:.2f} versions, "
            f"k3 {min(k3):.1e} to {max(k3):.1e}"
        )
    return "\n".join(lines) + "\n"


def accuracy(cell: dict[str, Any]) -> str:
    """Accuracy of one seed; of several seeds also the difference from grpo."""
    text = f"{cell['accuracy']:.3f} +- {cell['std_err']:.3f}"
    if cell["num_seeds"] == 1:
        return text
    apart, std_err = cell["beside_grpo"], cell["beside_grpo_std_err"]
    return f"{text} ({apart:+.3f} +- {std_err:.3f}; {cell['num_seeds']} seeds)"


def draw(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy with its standard error: a line for every arm, a colour for every condition."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = list(dict.fromkeys(c["arm"] for c in cells))
    conditions = list(dict.fromkeys(c["condition"] for c in cells))
    figure, axes = plt.subplots(figsize=(8, 1 + 0.42 * len(arms)), dpi=110)
    for i, condition in enumerate(conditions):
        own = [c for c in cells if c["condition"] == condition]
        ys = [arms.index(c["arm"]) + 0.16 * (i - (len(conditions) - 1) / 2) for c in own]
        axes.errorbar(
            [c["accuracy"] for c in own],
            ys,
            xerr=[c["std_err"] for c in own],
            fmt="o",
            ms=4,
            lw=1.2,
            color=COLOURS[list(CONDITIONS).index(condition)],
            label=f"{condition}, {own[0]['num_seeds']} seed{'s' * (own[0]['num_seeds'] > 1)}",
        )
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.set_xlabel("held-out accuracy after training, full precision")
    axes.set_title("bars: one standard error", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=len(conditions), frameon=False
    )
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    print(path)


if __name__ == "__main__":
    sys.exit(main())
