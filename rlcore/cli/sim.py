"""`python -m rlcore sim`: simulate training on a cluster, to compare settings before booking one.

python -m rlcore sim run --gpus 32 --tp 2 --gpu h100 --model 14b --lengths 16k
python -m rlcore sim splits --gpus 40 --tp 1 --gpu h800 --model 8b --alpha 2
python -m rlcore sim rollpacker --figure 11
python -m rlcore sim rollmux --experiment trace200
python -m rlcore sim rhymerl
python -m rlcore sim roll_flash staleness
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rlcore.cli import exits
from rlcore.config.schema import TailConfig
from rlcore.metrics.jsonl import write_atomic
from rlcore.sim import report, rhymerl, roll_flash, rollmux, rollpacker, splits, table, user
from rlcore.sim.cluster import SimRun, summarize
from rlcore.sim.cost import GPUS, MODELS
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json

DATA = Path(os.environ.get("RLCORE_DATA", "../shared/data"))


def main(argv: Sequence[str]) -> int:
    """Run one simulation. Return 2 if an argument is invalid, 1 on a failure."""
    p = argparse.ArgumentParser(
        prog="python -m rlcore sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    systems = p.add_subparsers(dest="system", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return systems.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")

    _add_run(add("run", "simulate steps on your cluster with your response lengths"))
    _add_splits(add("splits", "compare splits into sampling and training GPUs for --mode async"))
    _add_papers(add("rollpacker", "compare published and simulated results of RollPacker"))
    _add_rollmux(
        add("rollmux", "compare published and simulated results of RollMux (job multiplexing)")
    )
    _add_rhymerl(add("rhymerl", "simulate the savings of RhymeRL (history drafts and routing)"))
    _add_flash(add("roll_flash", "compare published and simulated results of ROLL Flash"))
    a = p.parse_args(argv)
    commands = {
        "run": _run,
        "splits": _splits,
        "rollpacker": _papers,
        "rollmux": _rollmux,
        "rhymerl": _rhymerl,
        "roll_flash": _flash,
    }
    return exits.guard(lambda: commands[a.system](a))


# ---- the user's own cluster


def _add_run(p: argparse.ArgumentParser) -> None:
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("--gpus", type=int, default=32, help="number of GPUs")
    p.add_argument("--tp", type=int, default=2, help="GPUs per engine")
    p.add_argument(
        "--max-tp", type=int, default=0, help="maximum GPUs per engine for the planner; 0: fixed"
    )
    p.add_argument("--gpu", default="h100", help=f"GPU: {', '.join(GPUS).lower()}")
    p.add_argument(
        "--model", default="14b", help=f"model: {', '.join(MODELS).lower()}, or a config.json"
    )
    p.add_argument(
        "--profile",
        type=Path,
        help="JSON file of `rlcore profile` with measured engine costs, instead of the data sheet",
    )
    p.add_argument("--mfu", type=float, default=0.35, help="model FLOPs utilization in training")
    p.add_argument(
        "--reference", action="store_true", help="add the log-probs of a reference model"
    )
    p.add_argument("--prompts", type=int, default=128, help="prompts per step")
    p.add_argument("--samples", type=int, default=8, help="responses per prompt")
    p.add_argument(
        "--lengths",
        default="16k",
        help="response lengths: 16k, 32k, or a file (rlcore/sim/README.md)",
    )
    p.add_argument(
        "--where", nargs="*", default=[], metavar="COLUMN=VALUE", help="rows of --lengths to use"
    )
    p.add_argument(
        "--schedule",
        choices=["all", "tail_batching"],
        default="tail_batching",
        help="policy that ends a rollout",
    )
    p.add_argument(
        "--eta-prompts",
        type=float,
        default=TailConfig.eta_prompts,
        help="prompts started in a short round, as a multiple of --prompts",
    )
    p.add_argument(
        "--eta-samples",
        type=float,
        default=TailConfig.eta_samples,
        help="responses started per prompt, as a multiple of --samples",
    )
    p.add_argument(
        "--stream",
        action="store_true",
        help="let half of the engines stop early and train (--mode stream)",
    )
    p.add_argument("--reward", choices=user.REWARDS, default="none", help="kind of reward")
    p.add_argument("--judge", choices=user.JUDGES, default="shared", help="placement of a judge")
    p.add_argument(
        "--baseline", choices=user.BASELINES, default="verl", help="system to compare with"
    )
    p.add_argument("--steps", type=int, default=50, help="number of simulated steps")
    p.add_argument(
        "--max-running", type=int, default=1024, help="maximum concurrent requests per engine"
    )
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--json", type=Path, help="JSON file for the results")
    p.add_argument(
        "--picture", type=Path, help="PNG file with the engines' activity in the first steps"
    )
    p.add_argument("--picture-steps", type=int, default=5, help="steps in --picture and --trace")
    p.add_argument("--trace", type=Path, help="trace file of the first steps for ui.perfetto.dev")


def _run(a: argparse.Namespace) -> int:
    for name in ("gpus", "tp", "prompts", "samples", "steps", "picture_steps", "max_running"):
        if getattr(a, name) < 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(a, name)}: must be at least 1")
    begin = time.monotonic()
    plan, notes = user.plan(a)
    plans = [plan]
    if a.baseline != "none":
        plans.insert(0, user.baseline(plan, a.baseline))
    arms = {p.name: list(SimRun(p).steps(a.steps)) for p in plans}
    sums = {name: summarize(steps) for name, steps in arms.items()}
    print("\n".join([*notes, "", *report.table(sums)]))
    print(f"\n{a.steps} steps, simulated in {time.monotonic() - begin:.0f} s")
    first = {name: steps[: a.picture_steps] for name, steps in arms.items()}
    if a.json:
        options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()}
        _write(
            a.json,
            {
                "options": options,
                "notes": notes,
                "arms": {name: asdict(s) for name, s in sums.items()},
                "speed_up": next(iter(sums.values())).seconds / sums[plan.name].seconds,
                "steps": {name: [_facts(s) for s in steps] for name, steps in arms.items()},
            },
        )
    if a.picture:
        title = f"{a.model} over {a.gpus} x {a.gpu}, {a.prompts} x {a.samples}, lengths {a.lengths}"
        report.gantt(first, a.picture, title)
        print(a.picture)
    if a.trace:
        a.trace.parent.mkdir(parents=True, exist_ok=True)
        report.trace(first, a.trace)
        print(a.trace)
    return 0


def _facts(step) -> dict[str, object]:
    o = step.outcome
    return {
        "kind": step.kind,
        "tp": step.tp,
        "seconds": step.seconds,
        "phases": step.phases,
        "idle": o.idle,
        "preemptions": o.preemptions,
        "longest": max(o.lengths),
        "streamed": len(o.streamed),
        "tokens": sum(o.lengths),
        "decoded": o.decoded,
    }


def _add_splits(p: argparse.ArgumentParser) -> None:
    _add_run(p)
    p.set_defaults(schedule="all", steps=4)
    p.add_argument("--alpha", type=float, default=2.0, help="maximum sample age in policy versions")


def _splits(a: argparse.Namespace) -> int:
    for name in ("gpus", "tp", "prompts", "samples", "steps", "max_running"):
        if getattr(a, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(a, name)}: must be at least 1")
    others = a.schedule != "all", a.stream, a.max_tp, a.reward != "none", a.picture, a.trace
    if a.alpha < 0 or any(others):
        raise ConfigError(
            "splits: --alpha must be at least 0, and --schedule, --stream, --max-tp, --reward, "
            "--picture and --trace work only with `sim run`"
        )
    plan, notes = user.plan(a)
    made = splits.table(plan, a.alpha, a.steps)
    print("\n".join([*notes, "", *table.show(made)]))
    if a.json:
        _write(a.json, {"what": made.title, "notes": [*notes, *made.notes], "rows": made.rows})
    return 0


# ---- reproductions of papers


def _add_papers(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "what",
        nargs="?",
        choices=[w for w in rollpacker.TABLES if not w[0].isdigit()],
        help="experiment that has no number in the paper",
    )
    p.add_argument("--figure", choices=["11", "10c"], help="figure of the paper")
    p.add_argument("--table", choices=["1", "2"], help="table of the paper")
    p.add_argument("--rounds", type=int, default=100, help="rounds simulated per table cell")
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument(
        "--picture", type=Path, help="PNG file that compares published and simulated values"
    )
    p.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="folder of recorded response lengths, for table `planner`",
    )
    p.add_argument("--json", type=Path, help="JSON file for the results")


def _papers(a: argparse.Namespace) -> int:
    asked = [w for w in (a.what, a.figure, a.table) if w]
    if len(asked) != 1:
        raise ConfigError(
            "rollpacker: give one of --figure 11, --figure 10c, --table 1, --table 2, planner, "
            "scaling"
        )
    if a.rounds < 1:
        raise ConfigError(f"--rounds {a.rounds}: must be at least 1")
    begin = time.monotonic()
    made = rollpacker.TABLES[asked[0]](a.rounds, a.seed, a.data)
    return _show(made, a, begin)


def _show(made: table.TableResult, a: argparse.Namespace, begin: float) -> int:
    """Print a table, and write it to --json and --picture if given."""
    print("\n".join(table.show(made)))
    print(f"\n{a.rounds} rounds a cell, seed {a.seed}, {time.monotonic() - begin:.0f} s")
    if a.json:
        head = {"what": made.title, "rounds": a.rounds, "seed": a.seed, "notes": made.notes}
        _write(a.json, head | {"summary": table.summary(made.rows), "rows": made.rows})
    if a.picture:
        report.bars(made.rows, a.picture, made.title)
        print(a.picture)
    return 0


def _add_seeds(p: argparse.ArgumentParser) -> None:
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="number of seeds from --seed on; a cell is their mean, with minimum, maximum and "
        "standard deviation",
    )


def _seeds(a: argparse.Namespace) -> range:
    if a.seeds < 1:
        raise ConfigError(f"--seeds {a.seeds}: must be at least 1")
    return range(a.seed, a.seed + a.seeds)


def _add_rollmux(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--experiment",
        choices=list(rollmux.EXPERIMENTS),
        required=True,
        help="experiment of the paper",
    )
    p.add_argument(
        "--rounds",
        type=int,
        help="number of repetitions of the experiment (rlcore/sim/README.md)",
    )
    _add_seeds(p)
    p.add_argument(
        "--picture",
        type=Path,
        help="PNG file that compares published and simulated values, or shows curves",
    )
    p.add_argument(
        "--timeline", type=Path, help="PNG of each node's jobs over time (--experiment micro)"
    )
    p.add_argument("--json", type=Path, help="JSON file for the results")


def _rollmux(a: argparse.Namespace) -> int:
    make, usual = rollmux.EXPERIMENTS[a.experiment]
    count = usual if a.rounds is None else a.rounds
    if count < 1:
        raise ConfigError(f"--rounds {count}: must be at least 1")
    if a.timeline and a.experiment != "micro":
        raise ConfigError(f"--timeline {a.timeline}: works only with --experiment micro")
    begin, seeds = time.monotonic(), _seeds(a)
    runs = [make(count, seed) for seed in seeds]
    found, made = runs[0], table.over_seeds([r.made for r in runs])
    print("\n".join(table.show(made)))
    print(f"\n{count} rounds, seeds {list(seeds)}, {time.monotonic() - begin:.0f} s")
    if a.json:
        head = {"what": made.title, "rounds": count, "seeds": list(seeds), "notes": made.notes}
        _write(a.json, head | {"summary": table.summary(made.rows), "rows": made.rows})
    if a.picture and found.lines:
        is_step = "hours" in found.axes  # cost per hour is a step function of time
        report.curves(
            found.lines, a.picture, made.title, found.axes, is_log=found.is_log, is_step=is_step
        )
        print(a.picture)
    elif a.picture:
        report.bars(made.rows, a.picture, made.title)
        print(a.picture)
    if a.timeline:
        assert found.happened is not None
        report.timeline(found.happened, a.timeline, made.title)
        print(a.timeline)
    return 0


def _add_rhymerl(p: argparse.ArgumentParser) -> None:
    p.add_argument("--steps", type=int, default=24, help="steps per compared setting")
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--json", type=Path, help="JSON file for the results")


def _rhymerl(a: argparse.Namespace) -> int:
    if a.steps < 4:
        raise ConfigError(
            f"--steps {a.steps}: must be at least 4, since the first third is a warm-up"
        )
    begin = time.monotonic()
    made = rhymerl.report(a.steps, a.seed, print)
    print(f"\n{a.steps} steps an arm, seed {a.seed}, {time.monotonic() - begin:.0f} s")
    if a.json:
        _write(a.json, {"what": "RhymeRL", "steps": a.steps, "seed": a.seed} | made)
    return 0


def _add_flash(p: argparse.ArgumentParser) -> None:
    p.add_argument("what", nargs="+", choices=list(roll_flash.TABLES), help="tables to simulate")
    p.add_argument("--rounds", type=int, default=8, help="policy updates per table cell")
    _add_seeds(p)
    p.add_argument("--picture", type=Path, help="PNG file of all tables in the --json file")
    p.add_argument(
        "--json", type=Path, help="JSON file for the tables; other tables in it are kept"
    )


def _flash(a: argparse.Namespace) -> int:
    if a.rounds < 1:
        raise ConfigError(f"--rounds {a.rounds}: must be at least 1")
    tables: dict[str, dict[str, object]] = {}
    if a.json and a.json.is_file():
        hint = "choose another --json, or remove it"
        tables = read_json(a.json, hint).get("tables", {})
        if not isinstance(tables, dict):
            raise ConfigError(f"{a.json}: has no tables; {hint}")
    broken, seeds = [], _seeds(a)
    for name in a.what:
        begin = time.monotonic()
        made = table.over_seeds([roll_flash.TABLES[name](a.rounds, seed) for seed in seeds])
        print("\n".join(table.show(made)))
        print(f"\n{a.rounds} rounds, seeds {list(seeds)}, {time.monotonic() - begin:.0f} s\n")
        head = {"what": made.title, "rounds": a.rounds, "seeds": list(seeds), "notes": made.notes}
        tables[name] = head | {"summary": table.summary(made.rows), "rows": made.rows}
        broken += roll_flash.broken(made.rows)
        if a.json:
            _write(a.json, {"what": "ROLL Flash", "tables": tables})
    if a.picture:
        report.flash(tables, a.picture)
        print(a.picture)
    if broken:
        print(f"this proposition of the paper does not hold: {'; '.join(broken)}", file=sys.stderr)
        return 1
    return 0


def _write(path: Path, what: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(what, indent=1) + "\n")
    print(path)
