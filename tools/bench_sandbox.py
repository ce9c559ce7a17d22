"""What a program costs in the sandbox, against an interpreter of its own for each.

    .venv/bin/python tools/bench_sandbox.py --json OUT          # about a minute

A tiny program (`print(1)`) and a tiny function with three asserts, `--programs` times, one after
the other: in the sandbox with namespaces, in the fallback, as `subprocess.run([python, "-I", "-c",
...])` without any protection, and the same inside bubblewrap. Rows: name, value (programs/s), unit,
baseline (the plain subprocess), ratio.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.sandbox import walls  # noqa: E402
from rlcore.sandbox.box import Sandbox  # noqa: E402

SCRIPT = "print(1)"
PROGRAM = "def f(x):\n    return x * x\n"
TESTS = [f"assert f({i}) == {i * i}" for i in range(3)]
ROUNDS = 5
BARE = ("--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--programs", type=int, default=100)
    p.add_argument("--seed", type=int, default=0, help="there is nothing random here")
    p.add_argument("--json", type=Path, metavar="FILE")
    a = p.parse_args()
    grade = walls.grade()
    print(grade.sentence, file=sys.stderr)
    python = walls.interpreters()[0]
    both = "\n".join([PROGRAM, *TESTS])
    plain = {"script": SCRIPT, "tests": both}
    speeds: dict[str, float] = {}
    for name, source in plain.items():
        command = [python, "-I", "-c", source]
        speeds[f"subprocess, {name}"] = speed(lambda c=command: _run(c), a.programs // 10)
    if grade.isolated:
        command = ["bwrap", *BARE, "--", python, "-I", "-c", SCRIPT]
        speeds["bubblewrap for each, script"] = speed(lambda: _run(command), a.programs // 10)
    for isolated in [True, False] if grade.isolated else [False]:
        kind = "namespaces" if isolated else "fallback"
        with Sandbox(isolated) as box:
            speeds[f"{kind}, script"] = speed(lambda b=box: b.run(SCRIPT, _deadline()), a.programs)
            speeds[f"{kind}, tests"] = speed(
                lambda b=box: b.test(PROGRAM, TESTS, _deadline()), a.programs
            )
    out = []
    for name, value in speeds.items():
        base = speeds["subprocess, " + name.rpartition(", ")[2]]
        out.append(row(name, value, base))
        print(json.dumps(out[-1]))
    if a.json:
        write_atomic(a.json, json.dumps(out, indent=1) + "\n")


def speed(act: Callable[[], Any], count: int) -> float:
    """Calls per second: the best of some rounds, as other jobs can only slow it down."""
    act()
    best = 0.0
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(max(1, count // ROUNDS)):
            act()
        best = max(best, max(1, count // ROUNDS) / (time.perf_counter() - begin))
    return best


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _deadline() -> Callable[[], float]:
    end = time.monotonic() + 60
    return lambda: end


def row(name: str, value: float, base: float) -> dict[str, Any]:
    """A line of the result."""
    return {
        "name": name,
        "value": round(value, 2),
        "unit": "programs/s",
        "baseline": round(base, 2),
        "ratio": round(value / base, 2),
    }


if __name__ == "__main__":
    main()
