"""Check that memory, file handles and speed stay constant in long runs of the tiny task.

    python tools/soak.py --steps 500 --json tools/results/soak.json      # half an hour, two cores
    python tools/soak.py --steps 20 --modes sync

Each mode is a run of two processes with checkpoints and evaluations. Every second the whole tree of
processes is looked at; the first two fifths of the steps are the warm-up, in which allocators grow
(`--steps 1600 --modes async`: until step 200). Of the rest:

    memory     slope in MB per 100 steps of what all processes hold for themselves (USS) and of
               /dev/shm, by least squares
    handles    the same of open files and sockets, of threads, and of processes
    speed      tokens sampled per second of sampling, the last fifth of the steps over the second

Memory and handles are flat where the slope over all steps adds less than GROWTH of what was there;
the exit code is 1 where they are not. Speed is told, not judged: answers grow longer as the model
learns, and what else runs on the machine counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.metrics.sinks import read_metrics  # noqa: E402
from rlcore.utils import env  # noqa: E402

EVERY = "--checkpoint.every", "25", "--eval.every", "25", "--eval.no_at_start"
ONE_UPDATE = "--train.samples_per_update", "0"
MODES: dict[str, tuple[str, ...]] = {
    "sync": ("async_tiny.sh", "--mode", "sync"),
    "colocated": ("grpo_tiny.sh",),
    "stream": ("grpo_tiny.sh", "--mode", "stream", *ONE_UPDATE),
    "async": ("async_tiny.sh",),
    "tail": ("grpo_tiny.sh", "--schedule", "tail_batching"),
}
"""Recipe and keys."""
UNITS = {"memory": "MB", "shm": "MB", "files": "", "threads": "", "processes": ""}
GROWTH = {"memory": 0.05, "shm": 0.05, "files": 0.02, "threads": 0.02, "processes": 0.02}
"""Share of the mean that the slope may add over all steps."""
SLACK = {"memory": 50.0, "shm": 50.0, "files": 2.0, "threads": 2.0, "processes": 1.0}
"""What a mean near nothing may gain."""
LIMIT_S = 4 * 3600.0

Look = dict[str, float]
"""Of one moment: `step` and what UNITS names."""


def look(root: psutil.Process, step: int) -> Look:
    """The tree of processes now."""
    found = dict.fromkeys(UNITS, 0.0)
    for process in [root, *root.children(recursive=True)]:
        try:
            with process.oneshot():
                found["memory"] += process.memory_full_info().uss / 1e6
                found["files"] += process.num_fds()
                found["threads"] += process.num_threads()
                found["processes"] += 1
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended while it was looked at
    found["shm"] = (psutil.disk_usage("/dev/shm").used) / 1e6  # noqa: S108 - it is only measured
    return found | {"step": step}


def run(folder: Path, mode: str, steps: int, seed: int) -> list[Look]:
    """A run of `mode`, looked at every second. SystemExit where it fails."""
    recipe, *keys = MODES[mode]
    name = f"soak_{mode}_{steps}"
    command = ["bash", str(ROOT / "recipes" / recipe), *keys, *EVERY, "--run.dir", str(folder)]
    command += ["--run.name", name, "--run.steps", str(steps), "--run.seed", str(seed)]
    command += ["--run.resume", "fresh"]
    folder.mkdir(parents=True, exist_ok=True)
    screen, looks = folder / f"{name}.txt", []
    with open(screen, "w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"PYTHON": sys.executable} | os.environ | {"GPUS_PER_NODE": "2"},
        )
        try:
            end, tree = time.monotonic() + LIMIT_S, psutil.Process(process.pid)
            while process.poll() is None and time.monotonic() < end:
                step = steps_done(folder / name / "metrics.jsonl")
                if step:
                    looks.append(look(tree, step))
                time.sleep(1.0)
        finally:
            process.terminate()
            process.wait(60)
    if process.returncode:
        raise SystemExit(f"{name} exited with {process.returncode}; see {screen}")
    return looks


def steps_done(metrics: Path) -> int:
    """As the file's last whole line has it; 0 before the first."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 64_000))
        lines = file.read().splitlines(keepends=True)
    for line in reversed(lines):
        if line.endswith(b"\n") and line.startswith(b'{"step"'):
            return int(json.loads(line)["step"])
    return 0


def slopes(looks: Sequence[Look], steps: int) -> dict[str, tuple[float, float, bool]]:
    """Of each figure after the warm-up and before the last step, behind which processes end: its
    mean, its slope per 100 steps, whether that is flat. ValueError where there is too little to
    see."""
    late = [found for found in looks if 2 * steps / 5 < found["step"] < steps]
    if len({found["step"] for found in late}) < 3:
        raise ValueError(f"{len(late)} samples in the last steps of {steps}; raise --steps")
    out = {}
    for name in UNITS:
        values = [found[name] for found in late]
        line = statistics.linear_regression([found["step"] for found in late], values)
        mean = statistics.mean(values)
        allowed = max(GROWTH[name] * mean, SLACK[name])
        out[name] = mean, 100 * line.slope, line.slope * steps < allowed
    return out


def speed(rows: Sequence[Mapping[str, Any]]) -> float:
    """Tokens sampled per second, in the last fifth of the steps over the second fifth."""
    timed = [r["perf/gen_tokens_per_s"] for r in rows if r.get("perf/gen_tokens_per_s")]
    fifth = max(1, len(timed) // 5)
    return statistics.median(timed[-fifth:]) / statistics.median(timed[fifth : 2 * fifth])


def rows_of(mode: str, looks: Sequence[Look], steps: int, ratio: float) -> list[dict[str, Any]]:
    rows = []
    for name, (mean, slope, is_flat) in slopes(looks, steps).items():
        unit = f"{UNITS[name]} per 100 steps".strip()
        row = {"name": f"{mode}: {name}", "value": slope, "unit": unit, "baseline": mean}
        rows.append(row | {"ratio": slope * steps / 100 / mean if mean else 0.0, "flat": is_flat})
    rows.append(
        {"name": f"{mode}: speed", "value": ratio, "unit": "x", "baseline": 1, "ratio": ratio}
    )
    return rows


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=int, default=500, help="steps per run")
    p.add_argument(
        "--modes", nargs="+", default=list(MODES), choices=list(MODES), help="modes to test"
    )
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--dir", type=Path, default=ROOT / "runs" / "soak", help="folder of the runs")
    p.add_argument("--json", type=Path, help="JSON file for the results")
    a = p.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for mode in a.modes:
        looks = run(a.dir, mode, a.steps, a.seed)
        made = read_metrics(a.dir / f"soak_{mode}_{a.steps}")
        rows += rows_of(mode, looks, a.steps, speed(made))
        for row in rows[-len(UNITS) - 1 :]:
            verdict = {True: "flat", False: "GROWS", None: ""}[row.get("flat")]
            print(
                f"{row['name']:22} {row['value']:+10.2f} {row['unit']:18} of "
                f"{row['baseline']:10.1f}  {verdict}",
                flush=True,
            )
        if a.json:  # after each mode: what ends the next one does not take this one along
            about = {"machine": env.report(), "steps": a.steps, "load": os.getloadavg()[0]}
            write_atomic(a.json, json.dumps(about | {"rows": rows}, indent=1, default=str) + "\n")
    return 1 if any(row.get("flat") is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
