"""Hold the advice from a recorded run against what then is measured.

    python tools/bench_advise.py --json tools/results/advise.json

The tiny recipe on two processes, whose decode steps last at least --decode-floor-ms, with weights
that stay as they are (a learning rate of 1e-12), so that all arms have the same lengths. A
synchronous run is recorded, `rlcore sim advise --run` predicts the gain of every system from its
logs alone, and then each of the arms is run and timed:

    tail, drafts, tail + drafts, async 1, async 2

A row is an arm: seconds of a step and gain over the recorded run, predicted and measured, and the
error of the gain. One run at a time, since they are timed; finished runs in --dir are read, not
repeated. The first epoch is not counted, since it has no history.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench_schedules import train  # noqa: E402

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.metrics.sinks import read_metrics  # noqa: E402
from rlcore.sim import advise, recorded  # noqa: E402
from rlcore.utils import env  # noqa: E402

ASYNC = ("--mode", "async", "--cluster.rollout_ranks", "1", "--async.alpha")
ARMS: dict[str, tuple[str, ...]] = {
    "tail": ("--schedule", "tail_batching"),
    "drafts": ("--rollout.draft", "history"),
    "tail + drafts": ("--schedule", "tail_batching", "--rollout.draft", "history"),
    "async 1": (*ASYNC, "1"),
    "async 2": (*ASYNC, "2"),
}
PROMPTS = 64
"""Prompts of the task: two steps of the recipe are an epoch, also of tail batching nearly so."""
SAME = (
    *("--data.num_prompts", str(PROMPTS), "--log.rollouts", "-1", "--train.lr", "1e-12"),
    *("--train.min_lr", "1e-13", "--train.samples_per_update", "0"),
    *("--rollout.routing", "response"),
    *("--eval.every", "0", "--eval.no_at_start", "--eval.no_at_end"),
)  # fmt: skip
SKIPPED = 4
"""Steps at the start of a run that are not counted."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="arms to run")
    p.add_argument("--seed", type=int, default=0, help="seed of all runs")
    p.add_argument("--steps", type=int, default=24, help="steps of a run")
    p.add_argument(
        "--decode-floor-ms", type=float, default=20.0, help="minimum milliseconds of a decode step"
    )
    p.add_argument("--dir", type=Path, default=ROOT / "runs", help="folder of the runs")
    p.add_argument("--json", type=Path, required=True, help="JSON file for the results")
    a = p.parse_args(argv)
    a.rest = list(SAME)
    return a


def step_s(folder: Path) -> float:
    """Mean seconds of the counted steps of a run."""
    rows = [row for row in read_metrics(folder) if row.get("timing_s/step") is not None]
    return statistics.mean(row["timing_s/step"] for row in rows[SKIPPED:])


def main(argv: Sequence[str] | None = None) -> int:
    a = parse(argv)
    name = f"advise_{{}}_{a.seed}_{a.steps}_{a.decode_floor_ms:g}"
    base = train(a, name.format("all"), "grpo_tiny.sh", ("--schedule", "all"), a.seed)
    found = recorded.read(base, a.steps - SKIPPED)
    print("\n".join(found.notes))
    advice = {x.job.name: x for x in advise.search(found.job, print, found.drafts)}
    plain, measured = advice["synchronous"].found.seconds, step_s(base)
    rows: list[dict[str, Any]] = []
    print(f"{'':16}{'predicted':>18}{'measured':>18}{'error':>8}")
    for arm in a.arms:
        keys = ARMS[arm]
        folder = train(a, name.format(arm.replace(" ", "")), "grpo_tiny.sh", keys, a.seed)
        seconds, told = step_s(folder), advice[arm].found.seconds
        gains = plain / told, measured / seconds
        rows.append(
            {
                "arm": arm,
                "predicted_s": told,
                "measured_s": seconds,
                "predicted_gain": gains[0],
                "measured_gain": gains[1],
                "error": gains[0] / gains[1] - 1,
            }
        )
        print(
            f"{arm:16}{told:8.3f} s {gains[0]:5.2f}x {seconds:9.3f} s {gains[1]:5.2f}x"
            f"{gains[0] / gains[1] - 1:+8.1%}"
        )
    head = {"recorded_s": measured, "simulated_s": plain, "notes": list(found.notes)}
    write_atomic(
        a.json, json.dumps(head | {"machine": env.report(), "rows": rows}, indent=1) + "\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
