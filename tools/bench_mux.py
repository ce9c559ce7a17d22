"""Compare jobs that share two pools with the same jobs alone, on a machine with two cores.

    python tools/bench_mux.py --seed 0 --json tools/results/mux.json       # about 10 minutes, idle

Core 0 is the rollout pool, core 1 the train pool; every job is `recipes/mux_two_jobs.sh`, one rank
on each. First each job alone, then all of a mix at once with Redis and the arbiter:

    A+A      sampling takes as long as training
    D+D+E    2.5 times as long, twice, and 6 times as long

How long sampling takes is set by --debug.decode_floor_ms, from a short run without: an engine that
waits for its floor sleeps, as one on a GPU waits for memory, so that rollout nodes of a pool can be
one core. The mix D+D+E has two rollout nodes, one of E and one of both D. Profiles say what the
short run took and --margin.

Of each mix: the cost efficiency (what the work of the mix would have cost alone, by its share of
the nodes, over what it has cost; 1 is alone), its ceiling (permits without overhead, from the
phases alone), how much slower each job is than alone, how long nodes have nothing to do before and
after, and whether each learned the same, bit by bit. Steps before all jobs are there do not count,
nor those after the first has ended. The last row is how much slower a core computes while the other
one does, too: two cores of a virtual machine may be one of silicon, and then jobs that overlap are
slower for that alone. Warm starts are those of permits, the cold one that of the job. Finished runs
alone in --dir are read, not repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.cli import mux as cli  # noqa: E402
from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.metrics.plots import COLORS  # noqa: E402
from rlcore.metrics.sinks import read_metrics  # noqa: E402
from rlcore.mux import arbiter  # noqa: E402
from rlcore.mux.gate import PermitGate, Profile  # noqa: E402
from rlcore.rollout.transport import free_port  # noqa: E402
from rlcore.utils import env  # noqa: E402

RECIPE = "recipes/mux_two_jobs.sh"
SHAPES = {"A": 1.0, "D": 2.5, "E": 6.0}
"""Sampling over training, in time."""
MIXES = {"A+A": ("A", "A"), "D+D+E": ("E", "D", "D")}
"""In the order in which they join: what is packed where depends on it."""
ROLLOUT_NODES = {"A+A": 1, "D+D+E": 2}
ROLLOUT_NODE = {"A": "r0", "E": "r0", "D": "r1"}
"""Where a job samples; both are core 0."""
PUBLISHED = {"A+A": 1.82, "D+D+E": 1.90}
"""Throughput for equal money over jobs alone: RollMux, arXiv 2512.11306."""
LEARNED = ("actor/", "critic/", "response_length/", "rollout_corr/", "training/", "val-core/")
WARM_UP = 2
"""Steps of a job that are not timed."""
SWITCH_S = 0.1
JOIN_S = 300.0


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    shape: str
    seed: int
    floor_ms: float


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument(
        "--mixes", nargs="+", default=list(MIXES), choices=list(MIXES), help="mixes of jobs"
    )
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--steps", type=int, default=10, help="steps per job")
    p.add_argument(
        "--prompts",
        type=int,
        default=64,
        help="prompts per step, which set the length of the phases",
    )
    p.add_argument("--slo", type=float, default=2.3, help="value of --mux.slo")
    p.add_argument(
        "--margin",
        type=float,
        default=1.3,
        help="ratio of a profile's phase times to the measured ones",
    )
    p.add_argument(
        "--dir", type=Path, default=ROOT / "runs" / "bench_mux", help="folder of the runs"
    )
    p.add_argument("--json", type=Path, required=True, help="JSON file for the results")
    p.add_argument("--picture", type=Path, help="PNG file; default: beside the JSON file")
    p.add_argument("rest", nargs="*", help="further keys for every run, after --")
    a = p.parse_args(argv)
    least = WARM_UP + 4  # all jobs are at work for two steps of each, wherever in a round it begins
    if a.steps < least:
        p.error(f"--steps {a.steps}: at least {least}, the first {WARM_UP} are not timed")
    return a


# ---- runs


def start(a: argparse.Namespace, name: str, keys: list[str], **where: str) -> subprocess.Popen:
    """One job of the recipe, alone or in a cluster."""
    folder = a.dir / name
    folder.mkdir(parents=True, exist_ok=True)
    command = ["bash", str(ROOT / RECIPE), *keys, "--run.name", name, "--run.dir", str(a.dir)]
    command += ["--run.resume", "fresh", "--log.no_progress", "--checkpoint.no_at_end"]
    command += ["--checkpoint.no_export_hf", "--log.no_plot", *a.rest]
    model = {"MODEL_PATH": str(a.dir.parent / "models" / f"label-s{a.seed}")}  # of all jobs
    with open(a.dir / f"{name}.txt", "w") as screen:
        return subprocess.Popen(
            command,
            stdout=screen,
            stderr=subprocess.STDOUT,
            env={"PYTHON": sys.executable} | os.environ | model | where,
        )


def end(a: argparse.Namespace, name: str, process: subprocess.Popen) -> Path:
    """The folder of a run, when it is over; SystemExit where it failed."""
    if code := process.wait():
        raise SystemExit(f"{name} ended with {code}: {a.dir / f'{name}.txt'}")
    return a.dir / name


def keys_of(a: argparse.Namespace, job: Job) -> list[str]:
    words = ["--run.seed", str(job.seed), "--run.steps", str(a.steps)]
    words += ["--debug.decode_floor_ms", f"{job.floor_ms:.3f}"]
    words += ["--data.prompts_per_step", str(a.prompts)]
    words += [
        "--train.samples_per_update",
        str(4 * a.prompts),
        "--rollout.max_running_requests",
        "1024",
    ]
    return [*words, "--eval.every", "0", "--eval.no_at_start", "--eval.no_at_end"]


def alone(a: argparse.Namespace, name: str, keys: list[str]) -> Path:
    """A run with both pools to itself."""
    if not (a.dir / name / "summary.json").is_file():
        print(f"alone: {name}", flush=True)
        end(a, name, start(a, name, keys, ALONE="1"))
    return a.dir / name


def probe(a: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a training, and decode steps of a rollout."""
    job = Job("probe", "", a.seed, 0.0)
    keys = [*keys_of(a, job), "--run.steps", str(WARM_UP + 3)]
    rows = timed(alone(a, "probe", keys))
    return (
        statistics.median(train_s(r) for r in rows),
        statistics.median(r["sched/decode_steps"] for r in rows),
    )


def together(a: argparse.Namespace, mix: str, jobs: list[Job], train: float) -> dict[str, Any]:
    """All jobs of a mix in one cluster; the arbiter's status when all had their places. Each is
    started when the one before has its own, and nobody begins before the last one is there."""
    up = ["--rollout-pool", str(ROLLOUT_NODES[mix]), "--train-pool", "1"]
    up += ["--rollout-switch-s", str(SWITCH_S), "--train-switch-s", str(SWITCH_S)]
    folder = a.dir / f"cluster_{mix}"
    if cli.main(["up", *up, "--port", str(free_port()), "--dir", str(folder)]):
        raise SystemExit(f"no cluster: {folder}")
    url = cli._url(json.loads((folder / "mux.json").read_text()))
    running: dict[str, subprocess.Popen] = {}
    print(f"together: {', '.join(j.name for j in jobs)}", flush=True)
    nothing = Profile(rollout_s=1e-3, train_s=1e-3, slo=1e6)
    holder = PermitGate(url, "holder", nothing, pools={"all": ("rollout", "train")}, lease_s=60)
    try:
        holder.enter("all")
        for job in jobs:
            profile = a.dir / f"{job.name}.json"
            worst = {"rollout_s": a.margin * SHAPES[job.shape] * train, "train_s": a.margin * train}
            profile.write_text(json.dumps(worst))
            keys = [*keys_of(a, job), "--mux.profile", str(profile), "--mux.slo", str(a.slo)]
            name = f"{job.name}_mux"
            node = {"RLCORE_ROLLOUT_NODE": ROLLOUT_NODE[job.shape]}
            running[name] = start(a, name, keys, MUX_URL=url, **node)
            await_place(url, name, running[name], a)
        found = arbiter.status(url)
        holder.leave("all", 0.0)
        holder.close()
        for name, process in running.items():
            end(a, name, process)
    finally:
        holder.close()
        for process in running.values():
            process.terminate()
            process.wait()
        cli.main(["down", "--dir", str(folder)])
    return found


def await_place(url: str, name: str, process: subprocess.Popen, a: argparse.Namespace) -> None:
    """Until the job is in a group; SystemExit where it is not."""
    limit = time.monotonic() + JOIN_S
    while time.monotonic() < limit and process.poll() is None:
        groups = arbiter.status(url)["groups"]
        if any(j["job"] == name for g in groups for j in g["jobs"]):
            return
        time.sleep(0.2)
    others = [o["why"] for o in arbiter.status(url)["others"]]
    raise SystemExit(f"{name} was not placed: {others or a.dir / f'{name}.txt'}")


CROWD = """
import os, sys, time, numpy as np
os.sched_setaffinity(0, [int(sys.argv[1])])
x, n = np.ones((256, 256), np.float32), 0
begin = time.perf_counter()
while time.perf_counter() < begin + float(sys.argv[2]):
    x @ x
    n += 1
print(n / (time.perf_counter() - begin))
"""


def crowding(seconds: float = 4.0) -> float:
    """How much slower core 0 computes while core 1 does, too."""

    def loop(core: int, seconds: float) -> subprocess.Popen:
        command = [sys.executable, "-c", CROWD, str(core), str(seconds)]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=one_thread)

    alone = float(loop(0, seconds).communicate()[0])
    other = loop(1, 3 * seconds)
    time.sleep(seconds / 2)
    beside = float(loop(0, seconds).communicate()[0])
    other.communicate()
    return alone / beside


# ---- figures


def timed(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run that count."""
    return [r for r in read_metrics(folder) if r["step"] > WARM_UP and "timing_s/step" in r]


def rollout_s(row: dict[str, Any]) -> float:
    return row["timing_s/gen"] + row.get("timing_s/reward", 0.0)


def train_s(row: dict[str, Any]) -> float:
    return row["timing_s/step"] - rollout_s(row) - row.get("timing_s/wait_permit", 0.0)


def permits(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "permits.jsonl").read_text().splitlines()]


def learned(folder: Path) -> list[dict[str, float]]:
    """What a run has learned, step by step."""
    return [{k: v for k, v in r.items() if k.startswith(LEARNED)} for r in read_metrics(folder)]


def same_steps(ours: Path, theirs: Path) -> int:
    """Steps that are equal in every figure, bit by bit."""
    return sum(a == b for a, b in zip(learned(ours), learned(theirs), strict=False))


def overlaps(folders: list[Path], phases: tuple[str, ...]) -> int:
    """How often two jobs were in such phases, which are on one node, at a time."""
    spans = sorted(
        (r["granted"], r["left"]) for f in folders for r in permits(f) if r["phase"] in phases
    )
    return sum(b[0] < a[1] for a, b in zip(spans, spans[1:], strict=False))


def window(folders: list[Path]) -> tuple[float, float]:
    """From the moment on that all jobs are in their timed steps, until the first is at its end."""
    begins, ends = [], []
    for folder in folders:
        rollouts = [r for r in permits(folder) if r["phase"] == "rollout"]
        begins.append(rollouts[WARM_UP]["asked"])
        ends.append(rollouts[-1]["asked"])
    return max(begins), min(ends)


def period_s(folder: Path, begin: float, end: float) -> float:
    """Seconds of an iteration within the window."""
    asked = [r["asked"] for r in permits(folder) if r["phase"] == "rollout"]
    inside = [t for t in asked if begin <= t <= end]
    if len(inside) < 2:
        raise SystemExit(f"{folder}: {len(inside)} steps while all jobs ran; raise --steps")
    return (inside[-1] - inside[0]) / (len(inside) - 1)


def busy_s(folders: list[Path], phase: str, begin: float, end: float) -> float:
    """Seconds of a phase within the window, all jobs together, without loads and stores."""
    return sum(
        max(0.0, min(r["ended"], end) - max(r["began"], begin))
        for folder in folders
        for r in permits(folder)
        if r["phase"] == phase
    )


def figures(
    mix: str, jobs: list[Job], solo: dict[str, Path], a: argparse.Namespace, status: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rows of one mix."""
    rows: list[dict[str, Any]] = []

    def row(name: str, value: float, unit: str, baseline: float, **more: Any) -> None:
        ratio = value / baseline if baseline else None
        rows.append(
            {"name": f"{mix}: {name}", "value": value, "unit": unit, "baseline": baseline}
            | {"ratio": ratio, **more}
        )

    folders = [a.dir / f"{j.name}_mux" for j in jobs]
    used = {pool: n["used"] for pool, n in status["nodes"].items()}
    begin, end = window(folders)
    mean = {
        j.name: {
            "rollout": statistics.mean(rollout_s(r) for r in timed(solo[j.name])),
            "train": statistics.mean(train_s(r) for r in timed(solo[j.name])),
        }
        for j in jobs
    }
    alone_s = {name: sum(m.values()) for name, m in mean.items()}
    with_others = {
        j.name: period_s(folder, begin, end) for j, folder in zip(jobs, folders, strict=True)
    }
    nodes = sum(used.values())
    worth = sum(2 * alone_s[n] / with_others[n] for n in alone_s) / nodes
    least = max(
        *alone_s.values(),
        sum(m["train"] for m in mean.values()),
        sum(m["rollout"] for m in mean.values()) / used["rollout"],
    )
    ceiling = sum(2 * alone_s[n] / least for n in alone_s) / nodes
    row("cost efficiency", worth, "x", ceiling, published=PUBLISHED[mix], nodes=used)
    for j in jobs:
        row(f"iteration of {j.name}", with_others[j.name], "s", alone_s[j.name], least=least)
    row("iteration against permits at no cost", max(with_others.values()) / least, "x", 1.0)
    for pool in ("rollout", "train"):
        before = statistics.mean(1 - mean[n][pool] / alone_s[n] for n in alone_s)
        after = 1 - busy_s(folders, pool, begin, end) / ((end - begin) * used[pool])
        row(f"idle {pool} nodes", after, "share", before)
    for j, folder in zip(jobs, folders, strict=True):
        row(f"equal steps of {j.name}", same_steps(folder, solo[j.name]), "steps", a.steps)
    row(
        "overlaps on the train node",
        overlaps(folders, ("start", "train", "save_checkpoint")),
        "permits",
        0,
    )
    for pool in ("rollout", "train"):
        starts = [r[f"mux/load_s/{pool}"] for folder in folders for r in timed(folder)]
        cold = statistics.median(
            r["ended"] - r["began"] for f in folders for r in permits(f) if r["phase"] == "start"
        )
        row(f"warm start of {pool}", statistics.median(starts), "s", cold)
        size = max(r[f"mux/resident_gb/{pool}"] for f in folders for r in timed(f))
        host = max(r[f"perf/{pool}_node_gb"] for f in folders for r in timed(f))
        row(f"loaded for {pool}", size, "GB", host)
    return rows


def draw(a: argparse.Namespace, mixes: dict[str, list[Job]], rows: list[dict], path: Path) -> None:
    """Who was where when, a line a job and pool; what it was worth."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2.6 * len(mixes) + 0.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(mixes), 2, width_ratios=(5, 1), squeeze=False)
    for (mix, jobs), (lanes, bars) in zip(mixes.items(), grid, strict=True):
        folders = [a.dir / f"{j.name}_mux" for j in jobs]
        begin, end = window(folders)
        for i, folder in enumerate(folders):
            for r in permits(folder):
                if (
                    r["phase"] not in ("rollout", "train")
                    or r["left"] < begin
                    or r["granted"] > end
                ):
                    continue
                y = 0 if r["phase"] == "train" else 1 + i
                lanes.barh(
                    y, r["ended"] - r["began"], left=r["began"] - begin, color=COLORS[i], height=0.8
                )
                for left, right in (("granted", "began"), ("ended", "left")):
                    lanes.barh(y, r[right] - r[left], left=r[left] - begin, color="#bbbbbb")
        names = [f"{j.name} samples" for j in jobs]
        lanes.set_yticks(range(len(jobs) + 1), ["train node", *names])
        lanes.set(title=f"{mix}: permits (grey: load and store)", xlim=(0, end - begin))
        lanes.set_xlabel("seconds")
        (worth,) = [r for r in rows if r["name"] == f"{mix}: cost efficiency"]
        values = {"alone": 1.0, "here": worth["value"], "ceiling": worth["baseline"]}
        values["paper"] = worth["published"]
        for i, value in enumerate(values.values()):
            bars.bar(i, value, color=COLORS[i])
            bars.text(i, value, f"{value:.2f}", ha="center", va="bottom")
        bars.set_xticks(range(len(values)), list(values), rotation=20)
        bars.set(title="cost efficiency")
        bars.margins(y=0.15)
        for axes in (lanes, bars):
            axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(path)


def main(argv: list[str] | None = None) -> int:
    a = parse(argv)
    a.dir /= f"seed{a.seed}_prompts{a.prompts}_steps{a.steps}"  # of equal runs alone
    a.dir.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    crowded = crowding()
    train, decodes = probe(a)
    rows, mixes = [], {}
    for mix in a.mixes:
        jobs = [
            Job(f"{shape.lower()}{i}", shape, a.seed + i, 1000 * SHAPES[shape] * train / decodes)
            for i, shape in enumerate(MIXES[mix])
        ]
        solo = {j.name: alone(a, f"{j.name}_alone", keys_of(a, j)) for j in jobs}
        status = together(a, mix, jobs, train)
        mixes[mix] = jobs
        rows += figures(mix, jobs, solo, a, status)
    name = "seconds of core 0 while core 1 computes, too"
    rows.append({"name": name, "value": crowded, "unit": "x", "baseline": 1.0, "ratio": crowded})
    width = max(len(r["name"]) for r in rows)
    for r in rows:
        ratio = "" if r["ratio"] is None else f"{r['ratio']:9.3f}x"
        print(f"{r['name']:{width}} {r['value']:10.4g} {r['unit']:6} {r['baseline']:10.4g}{ratio}")
    settings = {"seed": a.seed, "steps": a.steps, "slo": a.slo, "margin": a.margin}
    settings |= {"prompts": a.prompts, "train_s": train, "decode_steps": decodes, "load": load}
    text = {"what": __doc__.splitlines()[0], "settings": settings, "machine": env.report()}
    a.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(a.json, json.dumps(text | {"rows": rows}, indent=1) + "\n")
    print(a.json)
    draw(a, mixes, rows, a.picture or a.json.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
