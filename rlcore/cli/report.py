"""`python -m rlcore report RUN`: write a report of a run, with a plot and all numbers.

    bash recipes/grpo_7b_1node.sh ... --report DIR     # check, train, evaluate, and this command
    rlcore report runs/NAME --out DIR                  # of a run that was started otherwise

DIR gets report.md to paste, report.json with every number, and curve.png. `--report` leaves these
files in DIR, and the report reads them: command.txt, stages.tsv (seconds of each stage),
preflight.json, before.json and after.json (`rlcore eval` of the start model and of the newest
checkpoint). Without the two evaluations the report has the first and the last one of the run.
Versions and GPUs are those of the machine that writes the report.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore import __version__
from rlcore.cli import exits
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json, read_text

if TYPE_CHECKING:  # importing torch would slow down the command line
    from rlcore.config.schema import Config

UNKNOWN = "not measured"
IN_USE = "memory/device_gb/"
"""Metrics of rank 0 by phase."""
PEAKS = {
    "allocated_gb": "perf/max_memory_allocated_gb",
    "reserved_gb": "perf/max_memory_reserved_gb",
}
"""Metrics of the largest GPU memory of a run, by key of report.json."""


def main(argv: Sequence[str]) -> int:
    """Write the report. Return 0 if it was written, 2 if the run cannot be read, 1 on a failure."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rlcore report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder; default: RUN/report")
    args = parser.parse_args(list(argv))
    from rlcore.metrics import plots
    from rlcore.metrics.jsonl import dumps, write_atomic

    out = args.out or args.run / "report"
    found = collect(args.run, out)
    plots.curve(args.run, out / "curve.png")
    write_atomic(out / "report.json", json.dumps(json.loads(dumps(found)), indent=1) + "\n")
    write_atomic(out / "report.md", "\n".join(page(found)) + "\n")
    for name in ("report.md", "report.json", "curve.png"):
        print(out / name)
    return 0


def collect(run: Path, out: Path) -> dict[str, Any]:
    """Return all contents of the report as plain data; None is what was not measured.

    Raises:
        ConfigError: the folder has no run that has evaluated or trained, or a file is damaged.
    """
    from rlcore.cli import dry_run, settings
    from rlcore.config import resolve
    from rlcore.metrics import screen, sinks
    from rlcore.utils import env

    saved = read_json(run / "config.json")
    chosen = {f"select.{name}": value for name, value in saved.pop("select").items() if value}
    cfg = settings.parse(resolve.words(chosen | saved))
    rows = sinks.read_metrics(run)
    summary = sinks.summarise(rows)
    before, after = _evaluations(rows, cfg.eval.samples_per_prompt, out)
    both = [{"step": i, **found["metrics"]} for i, found in enumerate((before, after)) if found]
    processes = len(list((run / "logs").glob("rank*.log")))
    return {
        "run": run.name,
        "command": _text(out / "command.txt"),
        "settings": dry_run.changed(cfg),
        "seed": cfg.run.seed,
        "evaluation_samples": cfg.eval.samples_per_prompt,
        "steps": {"done": summary["steps"], "of": cfg.run.steps},
        "processes": processes,
        "version": __version__,
        "machine": env.report(),
        "stages": _stages(out),
        "before": before,
        "after": after,
        "changes": {
            name: {
                "before": start,
                "after": end,
                "std_err": error,
                "exceeds_two_std_err": abs(end - start) > 2 * error,
            }
            for name, (start, end, error) in screen.changes(sinks.summarise(both)).items()
        },
        "memory": _memory(cfg, rows, processes),
        "summary": summary,
        "preflight": json.loads(_text(out / "preflight.json") or "null"),
    }


def _text(file: Path) -> str | None:
    """Return the text of a file of `--report`; None if there is no such file."""
    return read_text(file).strip() if file.exists() else None


def _evaluations(
    rows: Sequence[Mapping[str, Any]], num_samples: int, out: Path
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the evaluations before and after training, as in eval.json, from the files of
    `--report`; if one is missing, those of the run itself, of `num_samples` per prompt."""
    files = out / "before.json", out / "after.json"
    if all(file.exists() for file in files):
        return read_json(files[0]), read_json(files[1])
    own = [
        {"model": f"step {row['step']}", "samples_per_prompt": num_samples, "metrics": scores}
        for row in rows
        if (scores := {k: v for k, v in row.items() if k.startswith(("val-core/", "val-aux/"))})
    ]
    from_start = len(own) > 1 and own[0]["model"] == "step 0"
    return (own[0], own[-1]) if from_start else (None, None)


def _stages(out: Path) -> dict[str, Any] | None:
    """Return how often `--report` was started, and the seconds of each stage over all starts."""
    text = _text(out / "stages.tsv")
    if text is None:
        return None
    lines = [line.split("\t") for line in text.splitlines()]
    seconds: dict[str, float] = {}
    for stage, value in lines:
        seconds[stage] = seconds.get(stage, 0.0) + float(value)
    return {"starts": [stage for stage, _ in lines].count("preflight"), "seconds": seconds}


def _memory(cfg: "Config", rows: Sequence[Mapping[str, Any]], world: int) -> dict[str, Any]:
    """Return the GPU memory in GB: by phase the plan of the dry run and what was in use as the
    phase began, and the peaks of the run."""
    from rlcore.cli import dry_run, inputs
    from rlcore.cli.builders.model import with_layers
    from rlcore.trainer import memory

    planned: dict[str, float] = {}
    most = dry_run.gpu_gb(cfg) or dry_run.GPU_GB
    try:
        hf = with_layers(cfg, dry_run.model_of(cfg.model.path)[0])
        beside, _ = dry_run.judges(cfg, inputs.Findings(elsewhere=False))
        for plan in memory.plans(cfg, hf, world, gpu_bytes=most * memory.GB, beside=beside):
            for phase in plan.phases:
                planned[phase] = max(planned.get(phase, 0.0), plan.total(phase) / memory.GB)
        plan_of = f"The plan is of the rank that needs most, for {most:g} GB"
        plan_of += dry_run.gpu_source(cfg)
    except ConfigError as error:
        plan_of = f"There is no plan: {error}"
    in_use = _highest(rows, IN_USE)
    return {
        "plan_of": plan_of,
        "phases": {
            phase: {"planned_gb": planned.get(phase), "in_use_gb": in_use.get(phase)}
            for phase in planned | in_use
        },
        "peak": {key: _highest(rows, metric).get("") for key, metric in PEAKS.items()},
    }


def _highest(rows: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, float]:
    """Return the highest value of each metric with the prefix, by the rest of its name."""
    found: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(prefix):
                rest = name.removeprefix(prefix)
                found[rest] = max(found.get(rest, -math.inf), value)
    return found


def page(found: Mapping[str, Any]) -> list[str]:
    """Return the lines of report.md."""
    from rlcore.metrics import screen
    from rlcore.utils import env

    steps, stages, memory = found["steps"], found["stages"], found["memory"]
    sentences = [describe_change(name, **change) for name, change in found["changes"].items()]
    sentences = sentences or [f"Held-out accuracy before and after training: {UNKNOWN}."]
    if steps["done"] < steps["of"]:
        sentences.append(f"The run has ended after step {steps['done']} of {steps['of']}.")
    wall = UNKNOWN
    if stages:
        times = [f"{stage} {value:.0f} s" for stage, value in stages["seconds"].items()]
        wall = f"{sum(stages['seconds'].values()):.0f} s ({', '.join(times)})"
        wall += f" in {stages['starts']} starts" if stages["starts"] > 1 else ""
    facts = (
        ("steps", f"{steps['done']} of {steps['of']}"),
        ("processes", found["processes"]),
        ("seed", found["seed"]),
        ("wall time", wall),
        ("rlcore", found["version"]),
    )
    without_accuracy = {k: v for k, v in found["summary"].items() if not k.startswith("val/")}
    phases = [
        (phase, _gb(gb["planned_gb"]), _gb(gb["in_use_gb"]))
        for phase, gb in memory["phases"].items()
    ]
    return [
        f"# Report of {found['run']}",
        "",
        *sentences,
        "",
        "![curves of the run](curve.png)",
        "",
        "The curves are of the run itself. Samples of each prompt in its evaluations: "
        f"{found['evaluation_samples']}.",
        "",
        *_code([found["command"] or "command: not recorded"]),
        *_table(("fact", "value"), facts),
        "## Held-out accuracy",
        "",
        *_accuracy(found["before"], found["after"]),
        "## Time and throughput",
        "",
        *_code(screen.final_table(without_accuracy)[1:]),
        "## GPU memory",
        "",
        f"{memory['plan_of']}. The other column is the memory in use on the GPU of rank 0 as the "
        "phase begins, the highest of all steps (measured with --train.offload). "
        f"Peak of all ranks: {_gb(memory['peak']['allocated_gb'])} in tensors, "
        f"{_gb(memory['peak']['reserved_gb'])} reserved by torch.",
        "",
        *_table(("phase", "plan", "in use"), phases),
        "## Machine and versions",
        "",
        *_code(env.describe(found["machine"])),
        "## Settings that differ from the defaults",
        "",
        *_code(f"--{key} {value}" for key, value in found["settings"].items()),
        "## Preflight",
        "",
        *_preflight(found["preflight"]),
    ]


def describe_change(
    name: str, *, before: float, after: float, std_err: float, exceeds_two_std_err: bool
) -> str:
    """Return the sentences on the change of a data set's accuracy. `std_err`: of the change, as if
    both evaluations were independent."""
    said = f"Held-out accuracy of {name}: {before:.3f} before, {after:.3f} after training. "
    if math.isnan(std_err):
        return f"{said}The standard error of the change of {after - before:+.3f} is not known."
    verb = "exceeds" if exceeds_two_std_err else "does not exceed"
    return (
        f"{said}The change of {after - before:+.3f} +- {std_err:.3f} {verb} two standard errors "
        f"({2 * std_err:.3f})."
    )


def _accuracy(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[str]:
    """Return the scores of two evaluations beside each other."""
    from rlcore.metrics.screen import evaluation_rows

    if before is None or after is None:
        return [f"{UNKNOWN}: the run has no evaluation before and after training.", ""]
    models = f"Before: {before['model']}, after: {after['model']}."
    counts = f"Samples of each prompt: {after['samples_per_prompt']}. +- is one standard error."
    ends = {row[:2]: row for row in evaluation_rows(after["metrics"])}
    rows = [
        (name, score, value, ends[name, score][2] if (name, score) in ends else UNKNOWN, prompts)
        for name, score, value, prompts in evaluation_rows(before["metrics"])
    ]
    return [
        f"{models} {counts}",
        "",
        *_table(("data set", "score", "before", "after", "prompts"), rows),
    ]


def _preflight(results: Sequence[Mapping[str, Any]] | None) -> list[str]:
    if results is None:
        return [f"{UNKNOWN}: the run was not started with --report."]
    counts = Counter(result["state"] for result in results)
    rows = [
        f"{result['state']}  {result['check']:9}  {result['text']}"
        for result in results
        if result["state"] != "PASS"
    ]
    total = ", ".join(f"{count} {state}" for state, count in counts.items())
    return [f"{total}.", "", *_code(rows)] if rows else [f"{total}."]


def _gb(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f} GB"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines] + [""]


def _code(lines: Iterable[str]) -> list[str]:
    return [f"    {line}".rstrip() for line in lines] + [""]
