"""Measure the step time with rewards that overlap the rollout, against rewards after it.

    .venv/bin/python tools/bench_reward_overlap.py --json OUT       # eight idle minutes

Runs of the whole program on the tiny task (random weights, one rank, engine and reward child in
processes of their own). A decode step has a floor, as on a memory-bound GPU, and responses end at
different times. The reward waits: its time over all samples of a step is `ratio` times the rollout
time, measured first with a reward that takes none. Without overlap (--debug.reward_barrier) it
starts when the engine has nothing left to decode.

Rows: name, value (seconds per step with overlap, median), unit, baseline (without), ratio (baseline
/ value), bound (what would be saved if all of the shorter one were hidden), cpu_s and
baseline_cpu_s (of the whole runs: on a busy machine, whether both had the same work).
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from tests.runs import arguments, tiny_model  # noqa: E402

PROMPTS, SAMPLES = 8, 8
DEADLINE_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=[0.2, 0.5, 1.0, 2.0],
        help="ratios of reward time to rollout time",
    )
    parser.add_argument("--steps", type=int, default=5, help="steps per run")
    parser.add_argument(
        "--floor-ms", type=float, default=20.0, help="minimum milliseconds per decode step"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file for the results")
    a = parser.parse_args()
    out = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model(folder / "model")
        plain = step(folder, model, a, "plain", 0.0, barrier=False)
        rollout_s, rest_s = plain["gen"], plain["step"] - plain["gen"]
        print(f"rollout {rollout_s:.2f} s, step {plain['step']:.2f} s, with a reward of no time")
        for ratio in a.ratios:
            wait_s = ratio * rollout_s / (PROMPTS * SAMPLES)
            found = [
                step(folder, model, a, f"r{ratio:g}{barrier:d}", wait_s, barrier=barrier)
                for barrier in (False, True)
            ]
            times = [f["step"] for f in found]
            reward_s = ratio * rollout_s
            bound = (rollout_s + reward_s + rest_s) / (max(rollout_s, reward_s) + rest_s)
            out.append(
                {
                    "name": f"step_reward_{ratio:g}",
                    "value": times[0],
                    "unit": "s",
                    "baseline": times[1],
                    "ratio": times[1] / times[0],
                    "bound": bound,
                    "cpu_s": found[0]["cpu"],
                    "baseline_cpu_s": found[1]["cpu"],
                }
            )
            print(
                f"reward {ratio:g} x rollout: {times[0]:.2f} s with overlap, {times[1]:.2f} s "
                f"without, ratio {times[1] / times[0]:.2f} (bound {bound:.2f})",
                flush=True,
            )
    if a.json:
        write_atomic(a.json, json.dumps(out, indent=1) + "\n")


def step(
    folder: Path,
    model: Path,
    a: argparse.Namespace,
    name: str,
    wait_s: float,
    *,
    barrier: bool,
) -> dict[str, float]:
    """Medians over the steps of one run after the first: `step` and `gen`, in seconds; `cpu`: of
    the whole run."""
    words: list[object] = ["--reward", "rewards_wait.score", "--reward.wait_s", wait_s]
    words += ["--run.steps", a.steps, "--run.seed", a.seed, "--rollout.process", "child"]
    words += ["--data.prompts_per_step", PROMPTS, "--rollout.samples_per_prompt", SAMPLES]
    words += ["--rollout.max_running_requests", 16, "--rollout.max_tokens", 48]
    words += ["--debug.decode_floor_ms", a.floor_ms, "--reward.timeout_s", 60]
    words += ["--checkpoint.no_at_end", "--checkpoint.no_export_hf", "--eval.no_at_start"]
    words += ["--eval.no_at_end", "--log.no_progress"]
    words += ["--debug.reward_barrier"] if barrier else []
    path = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    before_s = children_s()
    done = subprocess.run(
        [sys.executable, "-m", "rlcore", "train", *arguments(model, folder, name, *words)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
    )
    if done.returncode:
        raise SystemExit(f"run {name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "timing_s/step" in row][1:]
    medians = {k: statistics.median(r[f"timing_s/{k}"] for r in rows) for k in ("step", "gen")}
    return medians | {"cpu": children_s() - before_s}


def children_s() -> float:
    """CPU time of all ended children and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
