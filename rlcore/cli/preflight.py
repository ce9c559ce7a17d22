"""`python -m rlcore preflight`: check machines, network, data and reward before a run.

    bash recipes/grpo_7b.sh --preflight                    # with the keys of a recipe
    torchrun ... -m rlcore preflight [any key of rlcore train] [--json [FILE]]

Every rank checks its machine, and one table shows all nodes. Exit code 1: a check has failed.
--json prints the table as JSON; --json FILE prints it as text and also writes JSON to the file.
"""

import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rlcore.cli import exits
from rlcore.cli.checks import CheckResult

if TYPE_CHECKING:  # importing torch would slow down --help
    from torch.distributed import TCPStore

    from rlcore.cli.checks.ranks import Place
    from rlcore.config.schema import Config

REPORT_S = 30.0
"""Seconds to wait for the reports of ranks that have joined, and for the table."""
LEAVE_S = 5.0
"""Seconds for which rank 0, which may host the store, waits for the other ranks to read it."""


class Report(msgspec.Struct, frozen=True):
    """Results of one rank."""

    rank: int
    node: int
    host: str
    machine: list[CheckResult]
    """Results about the rank's machine and its connection to the others."""
    run: list[CheckResult]
    """Results about the run as a whole, from rank 0."""


def main(argv: Sequence[str]) -> int:
    """Print the table of all checks. Return 1 if a check has failed, 2 if the keys are invalid."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    from rlcore.cli import settings

    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    as_json, words = _output(argv)
    cfg = settings.parse(words)
    from rlcore.cli.checks import ranks

    place = ranks.Place.here()
    report = of_rank(cfg, place)
    if place.size == 1:
        return show([report], as_json)
    store, connected = ranks.connect(cfg, place)
    report.machine.append(connected)
    if store is None:
        return show([report], as_json) if place.local_rank == 0 else 1
    return of_all(cfg, place, store, report, as_json)


def _output(argv: Sequence[str]) -> tuple[bool | Path, list[str]]:
    """Return whether to print JSON or the file to write JSON to, and the words without --json."""
    if "--json" not in argv:
        return False, list(argv)
    i = argv.index("--json")
    if argv[i + 1 : i + 2] and not argv[i + 1].startswith("--"):
        return Path(argv[i + 1]), [*argv[:i], *argv[i + 2 :]]
    return True, [*argv[:i], *argv[i + 1 :]]


def of_rank(cfg: "Config", place: "Place") -> Report:
    """Make the checks that need no other rank. The first rank of a node checks its machine, and
    rank 0 the run."""
    from rlcore.cli.builders.model import with_downloads
    from rlcore.cli.checks import machine, task
    from rlcore.cli.explain import world_size

    report = Report(place.rank, place.node, socket.gethostname(), [], [])
    try:
        report.machine.extend([machine.driver(), machine.gpus()])
        cfg = with_downloads(cfg, weights=False)
        if place.local_rank == 0:
            report.machine.extend(machine.check(cfg))
        if place.rank == 0:
            alone = place.size == 1
            world = world_size() if alone else place.size
            per_node = int(os.environ.get("GPUS_PER_NODE", 1)) if alone else place.local_size
            report.run.extend(task.check(cfg, world, per_node))
    except Exception as error:  # the other ranks wait for this one's report
        text = exits.sentence(error, exits.keep(error))
        report.machine.append(CheckResult("preflight", "FAIL", text))
    return report


def of_all(
    cfg: "Config", place: "Place", store: "TCPStore", report: Report, as_json: bool | Path
) -> int:
    """Make the checks between ranks, and let one rank print the table. Return the exit code, the
    same on all ranks that have joined."""
    from torch.distributed import PrefixStore

    from rlcore.cli.checks import ranks
    from rlcore.utils.timed_store import TimedStore

    run, restart = (
        os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT")
    )
    prefix = f"preflight/{run}/{restart}"
    keys = TimedStore(PrefixStore(prefix, store), cfg.cluster.timeout_s)
    keys.set(f"before/{place.rank}", msgspec.json.encode(report).decode())
    checked = ranks.check(cfg, place, store, prefix)
    report.machine.extend(checked.results)
    keys.set(f"after/{place.rank}", msgspec.json.encode(report).decode())
    came = [rank for rank in range(place.size) if keys.check([f"before/{rank}"])]
    if place.rank == came[0]:
        ranks.wait_for(keys, "after", came, REPORT_S if checked.has_met else 0)
        found = []
        for rank in came:
            name = next(n for n in ("after", "before") if keys.check([f"{n}/{rank}"]))
            found.append(msgspec.json.decode(keys.get(f"{name}/{rank}"), type=Report))
        code = show(found, as_json)
        keys.set(f"code/{came[0]}", str(code))
        ranks.wait_for(keys, "left", came[1:], LEAVE_S)
    else:
        has_code = not ranks.wait_for(keys, "code", came[:1], 2 * REPORT_S)
        code = int(keys.get(f"code/{came[0]}")) if has_code else 1
        keys.set(f"left/{place.rank}", "")
    if checked.is_stuck:
        sys.stdout.flush()
        os._exit(code)
    return code


def show(reports: Sequence[Report], as_json: bool | Path) -> int:
    """Print the results, as JSON if `as_json` is true. If it is a file, write JSON to the file.
    Return the exit code."""
    as_data = json.dumps(table(reports), indent=1)
    print(as_data if as_json is True else "\n".join(lines(reports)), flush=True)
    if isinstance(as_json, Path):
        as_json.write_text(as_data + "\n")
    return int(any(result.state == "FAIL" for result, _ in merged(reports)))


def merged(reports: Sequence[Report]) -> list[tuple[CheckResult, list[Report]]]:
    """Return each different result with the reports that have it, results of machines first."""
    found: dict[CheckResult, list[Report]] = {}
    for part in ("machine", "run"):
        for report in reports:
            for result in getattr(report, part):
                found.setdefault(result, []).append(report)
    return list(found.items())


def table(reports: Sequence[Report]) -> list[dict]:
    """Return the results as plain data."""
    return [
        msgspec.to_builtins(result)
        | {"hosts": sorted({r.host for r in where}), "ranks": [r.rank for r in where]}
        for result, where in merged(reports)
    ]


def lines(reports: Sequence[Report]) -> list[str]:
    """Return the results as text: those of all nodes, of single nodes, and of the run. A result
    names its ranks if other ranks of the node have another one."""
    nodes, rows = {r.node: r.host for r in reports}, merged(reports)
    of_run = {result for report in reports for result in report.run}
    ran: dict[tuple[str, int], set[int]] = {}  # ranks that have made a check, by check and node
    for result, where in rows:
        for r in where:
            ran.setdefault((result.check, r.node), set()).add(r.rank)
    sections: dict[str, list[str]] = {"all nodes": []}
    sections |= {f"node {node} ({host})": [] for node, host in sorted(nodes.items())}
    sections["run"] = []
    for result, where in rows:
        line = f"  {result.state}  {result.check:9}  {result.text}"
        here = {n: {r.rank for r in where if r.node == n} for n in sorted({r.node for r in where})}
        some = {n for n, found in here.items() if found < ran[result.check, n]}
        if result in of_run:
            sections["run"].append(line)
        elif len(nodes) > 1 and here.keys() == nodes.keys() and not some:
            sections["all nodes"].append(line)
        else:
            for node, found in here.items():
                which = f" (rank {', '.join(map(str, sorted(found)))})" if node in some else ""
                sections[f"node {node} ({nodes[node]})"].append(line + which)
    counts = Counter(result.state for result, _ in rows)
    total = ", ".join(f"{counts[state]} {state}" for state in ("FAIL", "WARN", "PASS", "SKIP"))
    shown = [line for name, some in sections.items() if some for line in (f"{name}:", *some)]
    return [*shown, f"preflight: {total}"]
