"""Measure the speed of --rollout.draft on the tiny task over several epochs.

    python tools/bench_histospec.py --json tools/results/histospec.json
    python tools/bench_histospec.py --decode-floor-ms 5 --json tools/results/histospec_floor.json

The same recipe (`grpo_tiny.sh`, one process, so few prompts that they come again) with

    none, ngram, history, history_reward   as --rollout.draft has them, with the gate
    ... always        the same without the gate: drafts at every step and of any batch
    fixed 8           history, drafts of 8 tokens instead of the window that adapts
    3 epochs          history of the last three epochs (the default, --paper takes one)

The primary figure is what a request gains in one forward (1 without drafts) where the batch has 1
to 7 requests, which is the tail of a round, and over all batches; then acceptance, tokens a second
and the gate's decisions by epoch. Samples are the same in all arms, but for ties within rounding.

--engine sglang is the same with SGLang. Its attention on a CPU goes request by request, so forwards
and tokens of a forward are what can be read off there, not seconds.

On a CPU a forward takes longer the more tokens it has, so a full batch may lose by drafts, and the
gate says so; --decode-floor-ms makes every forward last as long whatever it holds, as on a GPU that
waits for memory. One run at a time, since they are timed; finished runs in --dir are read.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.metrics.plots import COLORS  # noqa: E402
from rlcore.metrics.sinks import read_metrics  # noqa: E402
from rlcore.utils import env  # noqa: E402

ARMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "ngram": ("--rollout.draft", "ngram"),
    "history": ("--rollout.draft", "history"),
    "history_reward": ("--rollout.draft", "history_reward"),
    "ngram always": ("--rollout.draft", "ngram", "--draft.no_adaptive"),
    "history always": ("--rollout.draft", "history", "--draft.no_adaptive"),
    "history_reward always": ("--rollout.draft", "history_reward", "--draft.no_adaptive"),
    "fixed 8": (
        *("--rollout.draft", "history", "--draft.no_adaptive"),
        *("--draft.initial_length", "8", "--draft.max_length", "8", "--draft.length_growth", "0"),
    ),
    "3 epochs": (
        "--rollout.draft",
        "history",
        "--draft.no_adaptive",
        "--draft.history_epochs",
        "3",
    ),
}
PAPER = (
    *("--draft.min_match", "3", "--draft.max_match", "7"),
    *("--draft.max_spec_factor", "0", "--draft.history_epochs", "1"),
)
"""What the paper has and our defaults have otherwise."""
TAIL = (1, 2, 4)
"""Batches of 1 to 7 requests."""
UNITS = {
    "tokens_per_row_tail": "tokens",
    "tokens_per_row": "tokens",
    "forwards": "decode steps",
    "gen_tokens_per_s": "tokens/s",
    "step_s": "s",
    "acceptance": "",
    "accept_len": "tokens",
    "speculated": "",
    "gate": "",
    "gate_tail": "",
    "reward": "",
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="settings to compare"
    )
    p.add_argument("--seeds", "--seed", type=int, nargs="+", default=[0], help="seeds of the runs")
    p.add_argument("--epochs", type=int, default=7, help="number of epochs")
    p.add_argument("--prompts", type=int, default=64, help="prompts of the task, 32 per step")
    p.add_argument(
        "--paper",
        action="store_true",
        help="use the paper's draft settings instead of the defaults",
    )
    p.add_argument("--engine", choices=("torch", "sglang"), default="torch", help="rollout engine")
    p.add_argument(
        "--decode-floor-ms", type=float, default=0.0, help="minimum milliseconds per decode step"
    )
    p.add_argument("--dir", type=Path, default=ROOT / "runs", help="folder of the runs")
    p.add_argument("--json", type=Path, required=True, help="JSON file for the results")
    p.add_argument("--picture", type=Path, help="PNG file; default: beside the JSON file")
    p.add_argument("rest", nargs="*", help="further keys for every run, after --")
    a = p.parse_args(argv)
    if a.prompts % 32 or a.prompts < 32:
        p.error(f"--prompts {a.prompts}: must be a multiple of the 32 of a step")
    if a.engine == "sglang" and a.decode_floor_ms:
        p.error("--decode-floor-ms: works only with --engine torch; omit it or change the engine")
    if a.epochs < 2:
        p.error(f"--epochs {a.epochs}: must be at least 2, since the first epoch has no history")
    return a


def run(a: argparse.Namespace, arm: str, seed: int) -> Path:
    """The folder of one run; it is made where it is not there."""
    name = f"histospec_{arm.replace(' ', '')}_{seed}_{a.epochs}x{a.prompts}_{a.decode_floor_ms:g}"
    name += "_paper" * a.paper + "_sglang" * (a.engine == "sglang")
    folder = a.dir / name
    if (folder / "summary.json").is_file():
        return folder
    steps = a.epochs * a.prompts // 32
    command = ["bash", str(ROOT / "recipes/grpo_tiny.sh")]
    command += [*(PAPER if a.paper and ARMS[arm] else ()), *ARMS[arm]]
    command += ["--run.dir", str(a.dir), "--run.name", name, "--run.seed", str(seed)]
    command += ["--run.steps", str(steps), "--data.num_prompts", str(a.prompts)]
    command += ["--eval.every", "0", "--eval.no_at_start", "--eval.no_at_end"]
    command += ["--checkpoint.no_at_end", "--checkpoint.no_export_hf"]
    command += ["--rollout.engine", a.engine]
    if a.engine == "sglang" and ARMS[arm]:
        command += ["--draft.verify_tokens", "9"]  # drafts of 8, as the arm of that name wants
    command += ["--debug.decode_floor_ms", f"{a.decode_floor_ms:g}", *a.rest]
    print(" ".join(command), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "screen.txt", "w") as screen:
        done = subprocess.run(
            command,
            stdout=screen,
            stderr=subprocess.STDOUT,
            env={"PYTHON": sys.executable} | os.environ | {"GPUS_PER_NODE": "1"},
        )
    if done.returncode:
        raise SystemExit(f"{name} exited with {done.returncode}; see {folder / 'screen.txt'}")
    return folder


def figures(rows: list[dict[str, Any]], per_epoch: int) -> list[dict[str, float]]:
    """Of every epoch: sums over its steps, then ratios. Without drafts a request gains one token in
    a forward."""
    steps = [row for row in rows if row.get("timing_s/gen") is not None]
    return [of_epoch(steps[i : i + per_epoch]) for i in range(0, len(steps), per_epoch)]


def of_epoch(steps: list[dict[str, Any]]) -> dict[str, float]:
    def total(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in steps)

    def weighed(name: str, sizes: tuple[int, ...]) -> float | None:
        """Mean of `name/<batch>` over the requests in decode steps of these batches."""
        pairs = [
            (row[f"spec/rows/{n}"], row[f"{name}/{n}"])
            for row in steps
            for n in sizes
            if row.get(f"spec/rows/{n}")
        ]
        count = sum(n for n, _ in pairs)
        return sum(n * x for n, x in pairs) / count if count else None

    drafts = any(row.get("spec/gate") is not None for row in steps)
    everything = tuple(2**i for i in range(12))
    drafted, decoded = total("spec/drafted_tokens"), total("sched/decode_tokens")
    accepted = sum(
        (row.get("spec/speculated_tokens") or 0.0) * row["sched/decode_tokens"] for row in steps
    )
    gains = [row["spec/mean_accept_len"] for row in steps if row.get("spec/mean_accept_len")]
    return {
        "tokens_per_row": weighed("spec/tokens_per_row", everything) if drafts else 1.0,
        "tokens_per_row_tail": weighed("spec/tokens_per_row", TAIL) if drafts else 1.0,
        "forwards": total("sched/decode_steps") / len(steps),
        "gen_tokens_per_s": decoded / total("timing_s/gen"),
        "step_s": total("timing_s/step") / len(steps),
        "acceptance": accepted / drafted if drafted else None,
        "accept_len": statistics.mean(gains) if gains else None,
        "speculated": accepted / decoded,
        "gate": total("spec/gate") / len(steps),
        "gate_tail": weighed("spec/gate", TAIL) if drafts else 0.0,
        "reward": total("critic/score/mean") / len(steps),
    }


def rows_of(found: dict[tuple[str, int], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """A row per arm, figure and epoch, and one for the epochs that have a history; means over
    seeds, against the first arm."""
    arms = list(dict.fromkeys(arm for arm, _ in found))
    seeds = list(dict.fromkeys(seed for _, seed in found))
    epochs = range(len(found[arms[0], seeds[0]]))
    rows = []
    for name, unit in UNITS.items():
        for arm in arms:
            for label, which in [*((str(e + 1), [e]) for e in epochs), ("2 on", epochs[1:])]:

                def mean(of: str, name: str = name, which: Any = which) -> float | None:
                    values = [found[of, s][e][name] for s in seeds for e in which]
                    values = [v for v in values if v is not None]
                    return statistics.mean(values) if values else None

                value, baseline = mean(arm), mean(arms[0])
                rows.append(
                    {
                        "name": f"{arm}: {name}, epoch {label}",
                        "arm": arm,
                        "figure": name,
                        "epoch": label,
                        "value": value,
                        "unit": unit,
                        "baseline": baseline,
                        "ratio": value / baseline if value is not None and baseline else None,
                    }
                )
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Epochs with a history, arms down, figures across."""
    lines = [f"{'epochs with a history':22}" + "".join(f"{n[:17]:>18}" for n in UNITS)]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells = {r["figure"]: r["value"] for r in rows if r["arm"] == arm and r["epoch"] == "2 on"}
        shown = ["-" if cells[n] is None else f"{cells[n]:.3f}" for n in UNITS]
        lines.append(f"{arm:22}" + "".join(f"{x:>18}" for x in shown))
    return lines


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Four figures by epoch, a line an arm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 4.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    wanted = {
        "tokens_per_row_tail": "tokens of a request in a forward, batches of 1 to 7",
        "tokens_per_row": "the same, all batches",
        "gen_tokens_per_s": "tokens a second while sampling",
        "acceptance": "share of drafted tokens that were right",
        "gate": "share of decode steps with drafts on",
    }
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    colors = [*COLORS, *("#444444", "#999999", "#ccaa00", "#00aaaa")]
    for axes, (name, what) in zip(figure.subplots(1, len(wanted)), wanted.items(), strict=True):
        for arm, color in zip(arms, colors, strict=False):
            points = [
                (int(r["epoch"]), r["value"])
                for r in rows
                if r["arm"] == arm and r["figure"] == name and r["epoch"] != "2 on"
            ]
            points = [p for p in points if p[1] is not None]
            style = "--" if "always" in arm or arm in ("fixed 8", "3 epochs") else "-"
            if points:
                axes.plot(*zip(*points, strict=True), style, color=color, label=arm, linewidth=1.4)
        axes.set(title=what, xlabel="epoch")
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.axes[0].legend(frameon=False, fontsize=7)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(path)


def main(argv: list[str] | None = None) -> int:
    a = parse(argv)
    load = os.getloadavg()[0]
    found = {
        (arm, seed): figures(read_metrics(run(a, arm, seed)), a.prompts // 32)
        for seed in a.seeds
        for arm in a.arms
    }
    rows = rows_of(found)
    print("\n".join(["", *table(rows), ""]))
    head = {
        "seeds": a.seeds,
        "epochs": a.epochs,
        "prompts": a.prompts,
        "decode_floor_ms": a.decode_floor_ms,
        "paper": a.paper,
        "engine": a.engine,
        "load_before": load,
    }
    text = {"what": __doc__.splitlines()[0], "settings": head, "machine": env.report()}
    a.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(a.json, json.dumps(text | {"rows": rows}, indent=1) + "\n")
    print(a.json)
    floor = f", every step at least {a.decode_floor_ms:g} ms" if a.decode_floor_ms else ""
    what = f"{a.prompts} prompts x 8, {a.epochs} epochs"
    title = f"tiny task, {what}, {a.engine} engine, 2 CPU cores{floor}"
    draw(rows, a.picture or a.json.with_suffix(".png"), title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
