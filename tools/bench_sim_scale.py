"""Measure the simulator by the size of the cluster: seconds, memory, and time of an event.

    python tools/bench_sim_scale.py --json tools/results/sim_scale.json

One synchronous step and one short round of tail batching of a 7B on 100 to 10,000 GPUs, 100 prompts
a GPU with one response each, so a million prompts on the largest cluster. An event is one that the
controller handles: a response has ended, a reward has come, a request is aborted. Its time is that
of controller, router, stop policy, engines and queue of events together, and should not depend on
the number of GPUs. Each size runs in a process of its own, whose memory is its peak.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.metrics.plots import COLORS  # noqa: E402
from rlcore.sim.cluster import SimRun  # noqa: E402
from rlcore.sim.cost import hf_named  # noqa: E402
from rlcore.sim.job import SimJob, config  # noqa: E402
from rlcore.sim.workload import GENERATORS  # noqa: E402
from rlcore.utils import env  # noqa: E402
from rlcore.utils.gpus import GPUS  # noqa: E402

SIZES = (100, 300, 1000, 3000, 10_000)
PROMPTS = 100
"""Prompts of a step for each GPU."""
SCHEDULES = ("all", "tail_batching")


def measure(gpus: int, schedule: str, seed: int) -> dict[str, Any]:
    """Simulate one step and return its figures."""
    lengths = GENERATORS["8k"]
    cfg = config(
        *("--run.seed", str(seed), "--schedule", schedule),
        *("--data.prompts_per_step", str(PROMPTS * gpus), "--rollout.samples_per_prompt", "1"),
        *("--algo.adv_estimator", "reinforce_plus_plus"),
        *("--rollout.max_tokens", str(lengths.cap), "--rollout.routing", "response"),
    )
    job = SimJob(
        name=schedule, cfg=cfg, hf=hf_named("7B"), gpu=GPUS["H100"], gpus=gpus, workload=lengths
    )
    begin = time.monotonic()
    (step,) = SimRun(job).steps(1)
    seconds = time.monotonic() - begin
    return {
        "gpus": gpus,
        "schedule": schedule,
        "prompts": PROMPTS * gpus,
        "events": step.outcome.events,
        "seconds": seconds,
        "event_us": 1e6 * seconds / step.outcome.events,
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "simulated_s": step.seconds,
    }


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the time of an event and the seconds of a simulation by the number of GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for schedule, colour in zip(SCHEDULES, COLORS, strict=False):
        own = [r for r in rows if r["schedule"] == schedule]
        for axes, name in ((left, "event_us"), (right, "seconds")):
            axes.plot(
                [r["gpus"] for r in own],
                [r[name] for r in own],
                color=colour,
                marker="o",
                label=schedule,
            )
    left.set_title("microseconds of an event", loc="left", fontsize=10)
    right.set_title("seconds of a simulated step", loc="left", fontsize=10)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("GPUs")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of GPUs")
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--json", type=Path, required=True, help="JSON file; the picture is beside it")
    p.add_argument("--one", nargs=2, metavar=("GPUS", "SCHEDULE"), help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    if a.one:
        print(json.dumps(measure(int(a.one[0]), a.one[1], a.seed)))
        return 0
    rows = []
    for schedule in SCHEDULES:
        for gpus in a.sizes:
            command = [sys.executable, __file__, "--seed", str(a.seed), "--json", str(a.json)]
            command += ["--one", str(gpus), schedule]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            r = rows[-1]
            print(
                f"{schedule:14}{gpus:7} GPUs {r['prompts']:9} prompts {r['events']:9} events "
                f"{r['event_us']:6.1f} us {r['seconds']:7.1f} s {r['memory_gb']:5.1f} GB",
                flush=True,
            )
    write_atomic(a.json, json.dumps({"machine": env.report(), "rows": rows}, indent=1) + "\n")
    draw(rows, a.json.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
