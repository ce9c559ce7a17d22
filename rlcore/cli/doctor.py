"""`python -m rlcore doctor RUN`: tell why a run hangs or has exited, from its flight records."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.cli import exits
from rlcore.utils.files import read_json

EVENTS = 6
"""Number of most recent events shown per rank."""
_DAMAGES = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
ERRORS = 5
"""Maximum number of errors shown, one per rank."""


def main(argv: Sequence[str]) -> int:
    """Print why the run hangs or has exited, and the code positions of ranks that may be the cause.
    With `--stacks`, print all threads of all ranks. Return 2 if the folder does not exist."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="rlcore doctor", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument(
        "--stacks", action="store_true", help="print the stacks of all threads of all ranks"
    )
    args = parser.parse_args(argv)
    if not args.run.is_dir():
        print(
            f"rlcore doctor {args.run}: no such folder; give the folder of a run", file=sys.stderr
        )
        return 2
    print("\n".join(examine(args.run, args.stacks)))
    return 0


def examine(run: Path, stacks: bool = False) -> list[str]:
    """Return the diagnosis of a run as lines."""
    from rlcore.utils import verdict
    from rlcore.utils.flight_recorder import FOLDER
    from rlcore.utils.health import VERDICT

    lines, records = _state(run), verdict.read(run)
    if not records:
        none = "no flight record: no rank raised an alarm, or all ranks were killed at once"
        return [*lines, none, *_errors(run)]
    suspects: list[int] = []
    file = run / FOLDER / VERDICT
    if file.exists():
        try:
            told = read_json(file)
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told["time"]))
            suspects = list(told["suspects"])
            lines += [f"alarm of {when}", "", *map(str, told["lines"][:-1])]
        except _DAMAGES as error:
            lines.append(f"{file} is damaged ({error})")
    shown = sorted(records, key=lambda r: (r not in suspects, r))
    for rank in shown if stacks else shown[:4]:
        try:
            lines += ["", *_of_rank(records[rank], stacks)]
        except _DAMAGES as error:
            lines += ["", f"the flight record of rank {rank} is damaged ({error})"]
    if not stacks:
        lines += ["", "--stacks shows all threads of all ranks and their child processes"]
    return [*lines, *_errors(run)]


def _of_rank(record: Mapping[str, Any], stacks: bool) -> list[str]:
    seconds = record["time"] - record["since"]
    lines = [
        f"rank {record['rank']} (process {record['pid']} on {record['host']}, "
        f"{record['memory_gb']:.1f} GB): phase {record['phase'] or 'none'} of step "
        f"{record['step']} for {seconds:.0f} s; {record['reason']}",
        f"  at {record['where']}",
    ]
    last = record["collectives"].get("last", [])
    if last:
        lines.append(f"  last collective: {last[-1]}")
    for when, text in record["events"][-EVENTS:]:
        lines.append(f"  {when - record['time']:+8.1f} s  {text}")
    if not stacks:
        return lines
    for name, stack in (record["stacks"] | record.get("children", {})).items():
        lines += [f"  -- {name}", *(f"  {line}" for line in stack.splitlines())]
    return lines


def _state(run: Path) -> list[str]:
    """Return a line with the run's last step and the seconds since then."""
    from rlcore.metrics.sinks import METRICS, SUMMARY, read_metrics

    rows = read_metrics(run)
    if not rows:
        return [f"{run}: no step is complete"]
    ago = time.time() - (run / METRICS).stat().st_mtime
    is_done, last = (run / SUMMARY).exists(), rows[-1]["step"]
    end = "finished" if is_done else "not finished"
    return [f"{run}: {end}; last step {last}, {ago:.0f} s ago", *([] if is_done else _way_on(run))]


def _way_on(run: Path) -> list[str]:
    """Return from where the same command would go on with a run that has ended early."""
    from rlcore.trainer import resume, seal

    found = resume.found(run)
    whole = [path for path in found if not seal.look(path)[0]]
    if not found:
        return ["if it has ended: it has no checkpoint, and the same command starts anew"]
    if not whole:
        said = f"none of its {len(found)} checkpoints is complete; --run.resume fresh starts anew"
        return [f"if it has ended: {said}"]
    step = int(whole[0].name.removeprefix("step_"))
    return [f"if it has ended: with --run.resume auto, the default, it goes on after step {step}"]


def _errors(run: Path) -> list[str]:
    """Return a line with the most recent error of each rank's log."""
    found = []
    for log in sorted((run / "logs").glob("rank*.log")):
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if " ERROR " in line]
        found += [f"{log.stem}: {line}" for line in errors[-1:]]
    return ["", "last error of each rank's log", *found[:ERRORS]] if found else []
