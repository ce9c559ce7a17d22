"""`python -m rlcore sim ...`: what a cluster would do, before one is booked."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlcore.metrics.jsonl import write_atomic
from rlcore.sim import rollpacker


def main(argv: Sequence[str]) -> int:
    """Exit code 2 on a bad argument."""
    p = argparse.ArgumentParser(prog="python -m rlcore sim", description=__doc__)
    systems = p.add_subparsers(dest="system", required=True)
    one = systems.add_parser("rollpacker", help="RollPacker's tables: published against simulated")
    one.add_argument("--figure", choices=["11"], required=True)
    one.add_argument("--rounds", type=int, default=100, help="of every cell")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--json", type=Path)
    a = p.parse_args(argv)
    if a.rounds < 1:
        print(f"--rounds {a.rounds}: must be at least 1", file=sys.stderr)
        return 2
    start = time.monotonic()
    rows = rollpacker.figure_11(a.rounds, a.seed)
    print("\n".join(table(rows)))
    print(f"\n{a.rounds} rounds a cell, {time.monotonic() - start:.0f} s")
    if a.json:
        a.json.parent.mkdir(parents=True, exist_ok=True)
        head = {"what": "RollPacker, figure 11", "rounds": a.rounds, "seed": a.seed}
        write_atomic(a.json, json.dumps(head | {"rows": rows}, indent=1) + "\n")
        print(a.json)
    return 0


def table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Published against simulated, a line a cell."""
    lines = [f"{'cell':30}{'published':>11}{'simulated':>11}{'error':>9}  constants"]
    for r in rows:
        kind = "fitted on this column" if r["fitted"] else "predicted"
        lines.append(
            f"{r['cell']:30}{r['published']:11.3f}{r['simulated']:11.3f}{r['error']:+9.3f}  {kind}"
        )
    return lines
