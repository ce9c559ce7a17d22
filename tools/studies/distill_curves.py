#!/usr/bin/env python
"""Compare held-out accuracy by sampled tokens of runs, such as distillation beside GRPO.

    bash recipes/grpo_tiny.sh --run.name teacher-s0 --eval.every 10
    bash recipes/distill_tiny.sh --eval.every 10
    bash recipes/distill_tiny.sh --algo gkd --teacher.top_k 12 --run.name gkd --eval.every 10
    python tools/studies/distill_curves.py runs/teacher-s0 runs/distill_tiny runs/gkd \
      --json FILE --plot FILE

The first run is the one that gave the teacher. For each run it prints the tokens that were sampled
until the accuracy has closed a share of the gap between start and end of the first run, and their
ratio. Sampled tokens are mean response length times samples of a step; evaluations do not count.
"""

import argparse
import json
from pathlib import Path
from typing import Any

SHARES = (0.5, 0.9)


def curve(folder: Path) -> list[tuple[float, float]]:
    """Return (sampled tokens, accuracy) at every evaluation of a run."""
    settings = json.loads((folder / "config.json").read_text())
    samples = settings["data"]["prompts_per_step"] * settings["rollout"]["samples_per_prompt"]
    tokens, found = 0.0, []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        tokens += samples * row.get("response_length/mean", 0.0)
        for name, value in row.items():
            if name.startswith("val-core/") and "/acc/mean@" in name:
                found.append((tokens, value))
    return found


def tokens_to(points: list[tuple[float, float]], accuracy: float) -> float | None:
    """Return the tokens at the first evaluation that reaches an accuracy; None if none does."""
    return next((tokens for tokens, value in points if value >= accuracy), None)


def main() -> None:
    """Print the table; write JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs; the teacher's first")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--plot", type=Path, help="PNG file")
    args = parser.parse_args()
    curves = {folder.name: curve(folder) for folder in args.runs}
    first = next(iter(curves.values()))
    start, end = first[0][1], first[-1][1]
    print(f"start {start:.3f}, teacher {end:.3f}")
    rows = []
    for name, points in curves.items():
        best = max(value for _, value in points)
        row = {"run": name, "last": points[-1][1], "best": best, "tokens": points[-1][0]}
        for share in SHARES:
            wanted = start + share * (end - start)
            needed, usual = tokens_to(points, wanted), tokens_to(first, wanted)
            row[f"tokens to {share:.0%}"] = needed
            row[f"ratio at {share:.0%}"] = usual / needed if needed and usual else None
        rows.append(row)
        shown = {k: f"{v:,.3g}" if isinstance(v, float) else v for k, v in row.items()}
        print("  ".join(f"{k} {v}" for k, v in shown.items()))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "curves": curves}, indent=1) + "\n")
    if args.plot:
        plot(curves, end, args.plot)


def plot(curves: dict[str, list[tuple[float, float]]], teacher: float, path: Path) -> None:
    """Draw accuracy by sampled tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2))
    for name, points in curves.items():
        axes.plot([t / 1e3 for t, _ in points], [a for _, a in points], marker=".", label=name)
    axes.axhline(teacher, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("sampled tokens, thousands")
    axes.set_ylabel("held-out accuracy")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
