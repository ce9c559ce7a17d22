"""Measure the time of a program in the sandbox, against one interpreter per program.

    .venv/bin/python tools/bench_sandbox.py --json OUT          # about a minute

A tiny program (`print(1)`) and a tiny function with three asserts, `--programs` times, one after
the other: in the sandbox with namespaces, in the fallback, as `subprocess.run([python, "-I", "-c",
...])` without any protection, and the same inside bubblewrap. Rows: name, value, unit, baseline
(the plain subprocess), ratio (how many times better): programs/s by the clock, the best of five
rounds, and milliseconds of CPU for a program, ours and theirs together, on which other jobs weigh
less; bubblewrap does not say what its child took.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.sandbox import isolation  # noqa: E402
from rlcore.sandbox.box import Sandbox  # noqa: E402

SCRIPT = "print(1)"
PROGRAM = "def f(x):\n    return x * x\n"
TESTS = [f"assert f({i}) == {i * i}" for i in range(3)]
ROUNDS = 5
BARE = ("--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--programs", type=int, default=100, help="number of programs")
    p.add_argument("--seed", type=int, default=0, help="unused: nothing is random here")
    p.add_argument("--json", type=Path, metavar="FILE", help="JSON file for the results")
    a = p.parse_args()
    grade = isolation.grade()
    print(grade.sentence, file=sys.stderr)
    python = isolation.interpreters()[0]
    both = "\n".join([PROGRAM, *TESTS])
    plain = {"script": SCRIPT, "tests": both}
    speeds: dict[str, tuple[float, float]] = {}
    for name, source in plain.items():
        command = [python, "-I", "-c", source]
        speeds[f"subprocess, {name}"] = cost(lambda c=command: _run(c), a.programs // 10)
    if grade.name != "fallback":
        command = ["bwrap", *BARE, "--", python, "-I", "-c", SCRIPT]
        speeds["bubblewrap for each, script"] = cost(lambda: _run(command), a.programs // 10)
    here = isolation.GRADES.index(grade.name)
    for kind in reversed(isolation.GRADES[: here + 1]):
        with Sandbox(kind) as box:
            for what, act in (
                ("script", lambda b=box: b.run(SCRIPT, _deadline())),
                ("tests", lambda b=box: b.test(PROGRAM, TESTS, _deadline())),
            ):
                speeds[f"{kind}, {what}"] = cost(act, a.programs, box.pid)
    out = []
    for name, (per_s, cpu_ms) in speeds.items():
        base = speeds["subprocess, " + name.rpartition(", ")[2]]
        out.append(row(name, per_s, "programs/s", base[0], per_s / base[0]))
        if not name.startswith("bubblewrap"):
            out.append(row(f"{name}, CPU", cpu_ms, "ms", base[1], base[1] / cpu_ms))
    for line in out:
        print(json.dumps(line))
    if a.json:
        write_atomic(a.json, json.dumps(out, indent=1) + "\n")


def cost(act: Callable[[], Any], count: int, box: int = 0) -> tuple[float, float]:
    """Calls per second, in the best of some rounds, and milliseconds of CPU for a call. `box` is
    the process that holds a sandbox."""
    act()
    best, before = 0.0, _cpu_s(box)
    each = max(1, count // ROUNDS)
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(each):
            act()
        best = max(best, each / (time.perf_counter() - begin))
    return best, (_cpu_s(box) - before) / (each * ROUNDS) * 1000


def _cpu_s(box: int) -> float:
    """Of this process, the children that it has waited for, and a sandbox with all it has ended."""
    total = sum(os.times()[:4])
    for process in [psutil.Process(box), *psutil.Process(box).children(True)] if box else []:
        total += sum(process.cpu_times()[:4])
    return total


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _deadline() -> Callable[[], float]:
    end = time.monotonic() + 60
    return lambda: end


def row(name: str, value: float, unit: str, base: float, ratio: float) -> dict[str, Any]:
    """A line of the result."""
    rounded = {"value": round(value, 2), "unit": unit, "baseline": round(base, 2)}
    return {"name": name, **rounded, "ratio": round(ratio, 2)}


if __name__ == "__main__":
    main()
