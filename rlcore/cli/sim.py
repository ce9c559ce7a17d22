"""`python -m rlcore sim`: simulate training on a cluster, to compare settings before booking one.

python -m rlcore sim run --gpus 32 --gpu h100 --model 14b --lengths 16k --schedule tail_batching
python -m rlcore sim splits --gpus 40 --gpu h800 --model 8b --alpha 2
python -m rlcore sim calibrate
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
from rlcore.metrics.jsonl import write_atomic
from rlcore.sim import (
    advise,
    calibrate,
    ladder,
    recorded,
    report,
    rhymerl,
    roll_flash,
    rollmux,
    rollpacker,
    splits,
    table,
    user,
)
from rlcore.sim.cluster import SimRun, simulate, summarize
from rlcore.sim.cost import ERROR, MODEL_FILES
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json
from rlcore.utils.gpus import GPUS

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
        return systems.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            allow_abbrev=False,  # --mode is a key of a run, not --model
        )

    _add_run(add("run", "simulate steps on your cluster with your response lengths"))
    _add_splits(add("splits", "compare splits into sampling and training GPUs for --mode async"))
    _add_papers(add("rollpacker", "compare published and simulated results of RollPacker"))
    _add_rollmux(
        add("rollmux", "compare published and simulated results of RollMux (job multiplexing)")
    )
    _add_rhymerl(add("rhymerl", "simulate the savings of RhymeRL (history drafts and routing)"))
    _add_flash(add("roll_flash", "compare published and simulated results of ROLL Flash"))
    _add_advise(add("advise", "search layouts, splits and systems, and say which keys to set"))
    _add_ladder(add("ladder", "what all systems give together, at five sizes"))
    _add_calibrate(add("calibrate", "fit the cost model on published seconds, and say its error"))
    a, keys = p.parse_known_args(argv)
    a = argparse.Namespace(**vars(a), keys=keys)
    if keys and a.system not in ("run", "splits", "advise"):
        p.error(f"unrecognized arguments: {' '.join(keys)}")
    commands = {
        "run": _run,
        "splits": _splits,
        "advise": _advise,
        "ladder": _ladder,
        "calibrate": _calibrate,
        "rollpacker": _papers,
        "rollmux": _rollmux,
        "rhymerl": _rhymerl,
        "roll_flash": _flash,
    }
    return exits.guard(lambda: commands[a.system](a))


# ---- the user's own cluster


def _add_run(p: argparse.ArgumentParser) -> None:
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.epilog = "All other keys are those of a run, such as --schedule tail_batching --rollout.tp 2."
    p.add_argument("--gpus", type=int, default=32, help="number of GPUs")
    p.add_argument("--gpu", default="h100", help=f"GPU: {', '.join(GPUS).lower()}")
    p.add_argument(
        "--model", default="14b", help=f"model: {', '.join(MODEL_FILES).lower()}, or a config.json"
    )
    p.add_argument(
        "--profile",
        type=Path,
        help="JSON file of `rlcore profile` with measured engine costs, instead of the cost model",
    )
    p.add_argument(
        "--lengths",
        default="16k",
        help="response lengths: 8k, 16k, 32k, or a file (rlcore/sim/README.md)",
    )
    p.add_argument(
        "--where", nargs="*", default=[], metavar="COLUMN=VALUE", help="rows of --lengths to use"
    )
    p.add_argument("--reward", choices=user.REWARDS, default="none", help="kind of reward")
    p.add_argument("--judge", choices=user.JUDGES, default="shared", help="placement of a judge")
    p.add_argument(
        "--baseline", choices=user.BASELINES, default="verl", help="system to compare with"
    )
    p.add_argument("--steps", type=int, default=50, help="number of simulated steps")
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--json", type=Path, help="JSON file for the results")
    p.add_argument(
        "--picture", type=Path, help="PNG file with the engines' activity in the first steps"
    )
    p.add_argument("--picture-steps", type=int, default=5, help="steps in --picture and --trace")
    p.add_argument("--trace", type=Path, help="trace file of the first steps for ui.perfetto.dev")


def _run(a: argparse.Namespace) -> int:
    for name in ("gpus", "steps", "picture_steps"):
        if getattr(a, name) < 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(a, name)}: must be at least 1")
    begin = time.monotonic()
    job, notes = user.job(a, a.keys)
    jobs = [job]
    if a.baseline != "none":
        jobs.insert(0, user.baseline(job, a.baseline))
    # an asynchronous job has no rounds, of which a picture could be drawn
    rounds = {j.name: j for j in jobs if j.cfg.select.mode != "async"}
    arms = {name: list(SimRun(j).steps(a.steps)) for name, j in rounds.items()}
    sums = {
        j.name: summarize(arms[j.name]) if j.name in arms else simulate(j, a.steps) for j in jobs
    }
    print("\n".join([*notes, "", *report.table(sums)]))
    print(f"\n{a.steps} steps, simulated in {time.monotonic() - begin:.0f} s; {error_bar()}")
    first = {name: steps[: a.picture_steps] for name, steps in arms.items()}
    if a.json:
        options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()}
        _write(
            a.json,
            {
                "options": options,
                "notes": notes,
                "arms": {name: asdict(s) for name, s in sums.items()},
                "speed_up": next(iter(sums.values())).seconds / sums[job.name].seconds,
                "error_bar": ERROR,
                "steps": {name: [_facts(s) for s in steps] for name, steps in arms.items()},
            },
        )
    if a.picture and first:
        report.gantt(first, a.picture, f"{a.model} over {a.gpus} x {a.gpu}, lengths {a.lengths}")
        print(a.picture)
    if a.trace and first:
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
        "prefill_tokens": o.stats["sched/prefill_tokens"],
        "cached_tokens": o.stats["sched/cached_tokens"],
    }


def _add_splits(p: argparse.ArgumentParser) -> None:
    _add_run(p)
    p.set_defaults(steps=4)
    p.add_argument("--alpha", type=float, default=2.0, help="maximum sample age in policy versions")


def _splits(a: argparse.Namespace) -> int:
    for name in ("gpus", "steps"):
        if getattr(a, name) < 1:
            raise ConfigError(f"--{name} {getattr(a, name)}: must be at least 1")
    if a.alpha < 0 or a.reward != "none" or a.picture or a.trace:
        raise ConfigError(
            "splits: --alpha must be at least 0, and --reward, --picture and --trace work only "
            "with `sim run`"
        )
    job, notes = user.job(a, a.keys)
    made = splits.table(job, a.alpha, a.steps)
    print("\n".join([*notes, "", *table.show(made)]))
    print(error_bar())
    if a.json:
        _write(a.json, {"what": made.title, "notes": [*notes, *made.notes], "rows": made.rows})
    return 0


def error_bar() -> str:
    """Return a sentence on how far off simulated seconds may be."""
    return f"seconds may be off by a factor of {ERROR} in both directions (`rlcore sim calibrate`)"


def _add_advise(p: argparse.ArgumentParser) -> None:
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.epilog = "All other keys are those of a run, such as --data.prompts_per_step 256."
    p.add_argument("model", nargs="?", default="", help="a model's name, or its config.json")
    p.add_argument("--run", type=Path, help="folder of a recorded run, instead of a model")
    p.add_argument("--last", type=int, default=0, help="last steps of --run to use; 0: all")
    p.add_argument("--gpus", type=int, default=8, help="number of GPUs")
    p.add_argument("--gpu", default="h100", help=f"GPU: {', '.join(GPUS).lower()}")
    p.add_argument("--lengths", default="16k", help="response lengths, as of `sim run`")
    p.add_argument(
        "--where", nargs="*", default=[], metavar="COLUMN=VALUE", help="rows of --lengths to use"
    )
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--json", type=Path, help="JSON file for the results")


def _advise(a: argparse.Namespace) -> int:
    if bool(a.model) == bool(a.run):
        raise ConfigError("advise: give either a model or --run DIR")
    if a.gpus < 1:
        raise ConfigError(f"--gpus {a.gpus}: must be at least 1")
    begin = time.monotonic()

    def say(what: str) -> None:
        print(f"  {what}", file=sys.stderr, flush=True)

    if a.run:
        found = recorded.read(a.run, a.last)
        job, notes, bar, drafts = found.job, found.notes, "", found.drafts
    else:
        job, noted = user.advised(a, a.keys, say)
        notes = tuple(noted)
        bar, drafts = f" (x/÷ {ERROR})", ladder.DRAFTS
    every = advise.search(job, say, drafts)
    plain = next(x for x in every if x.job.name == "synchronous")
    lines = [*notes, ""]
    for x in every:
        parts = ", ".join(f"{name} {gain:.2f}x" for name, gain in x.contributions.items())
        gain = plain.found.seconds / x.found.seconds
        told = f"{x.found.seconds:8.3g} s{bar} {gain:6.2f}x {x.samples_per_s:8.3g} samples/s"
        lines.append(f"{x.job.name:28} {told}  {parts}".rstrip())
    lines += ["", f"the best {advise.BEST}, as keys:"]
    for x in advise.best(every):
        room = "" if a.run else f", {advise.gigabytes(x.job):.0f} GB of a GPU"
        kind = "strictly on-policy" if x.is_on_policy else f"samples {x.found.age:.1f} versions old"
        lines += ["", f"{x.job.name}: {x.found.seconds:.3g} s a step{bar}, {kind}{room}"]
        lines.append(f"  {' '.join(x.keys) if a.run else advise.keys_of(x.job)}")
    print("\n".join(lines))
    print(f"\nsimulated in {time.monotonic() - begin:.0f} s{'' if a.run else '; ' + error_bar()}")
    if a.json:
        rows = [
            {
                "name": x.job.name,
                "keys": list(x.keys),
                "seconds": x.found.seconds,
                "speed_up": plain.found.seconds / x.found.seconds,
                "samples_per_s": x.samples_per_s,
                "age": x.found.age,
                "contributions": x.contributions,
            }
            for x in every
        ]
        _write(a.json, {"notes": list(notes), "rows": rows})
    return 0


def _add_ladder(p: argparse.ArgumentParser) -> None:
    names = [size.name for size in ladder.SIZES]
    p.add_argument("--sizes", nargs="*", default=names, choices=names, help="sizes to simulate")
    p.add_argument("--seeds", type=int, default=3, help="number of seeds")
    p.add_argument("--json", type=Path, help="JSON file for the results")
    p.add_argument("--picture", type=Path, help="PNG file of the ladder")


def _ladder(a: argparse.Namespace) -> int:
    if a.seeds < 1:
        raise ConfigError(f"--seeds {a.seeds}: must be at least 1")
    begin = time.monotonic()

    def say(what: str) -> None:
        print(f"{what}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

    sizes = [size for size in ladder.SIZES if size.name in a.sizes]
    made = ladder.table(range(a.seeds), say, sizes)
    print("\n".join(table.show(made)))
    print(f"\n{time.monotonic() - begin:.0f} s; {error_bar()}")
    if a.json:
        _write(
            a.json, {"what": made.title, "seeds": a.seeds, "notes": made.notes, "rows": made.rows}
        )
    if a.picture:
        report.ladder(made.rows, a.picture, made.title)
        print(a.picture)
    return 0


def _add_calibrate(p: argparse.ArgumentParser) -> None:
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--json", type=Path, help="JSON file for the results")
    p.add_argument("--picture", type=Path, help="PNG file of published and simulated seconds")


def _calibrate(a: argparse.Namespace) -> int:
    begin = time.monotonic()
    made, constants = calibrate.table(a.seed, print)
    print("\n".join(table.show(made)))
    print(f"\nseed {a.seed}, {time.monotonic() - begin:.0f} s")
    if a.json:
        head = {"what": made.title, "seed": a.seed, "constants": constants, "notes": made.notes}
        _write(a.json, head | {"rows": made.rows})
    if a.picture:
        report.bars(made.rows, a.picture, made.title)
        print(a.picture)
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
            "rollpacker: give one of --figure 11, --figure 10c, --table 1, --table 2, "
            + ", ".join(what for what in rollpacker.TABLES if not what[0].isdigit())
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
    p.add_argument("--rounds", type=int, default=8, help="steps per table cell")
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--picture", type=Path, help="PNG file of the table")
    p.add_argument("--json", type=Path, help="JSON file for the results")


def _rhymerl(a: argparse.Namespace) -> int:
    if a.rounds < 1:
        raise ConfigError(f"--rounds {a.rounds}: must be at least 1")
    begin = time.monotonic()
    return _show(rhymerl.table(a.rounds, a.seed), a, begin)


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
