"""Run a hostile program of tests/hostile*.py, and see what it has done."""

import os
import time
from pathlib import Path

from rlcore.sandbox import confine
from rlcore.sandbox.box import ProgramLimits, ProgramOutcome, Sandbox
from tests import hostile, hostile_kernel
from tests.hostile import Script

SCRIPTS = [*hostile.SCRIPTS, *hostile_kernel.SCRIPTS]
LIMITS = ProgramLimits()
_LONG_S = 60.0


def skipped(script: Script, grade: str) -> str:
    """Return why a program is not tried with this grade, or ""."""
    if grade == "fallback" and script.walls_only:
        return "needs namespaces"
    if grade == "fallback" and script.needs_landlock and not confine.landlock_version():
        return "needs Landlock"
    return ""


def attack(script: Script, sandbox: Sandbox, checkpoint: Path) -> tuple[str, ProgramOutcome]:
    """Run the program. Return what it should not have been able to do, "" if nothing, and the
    outcome."""
    source = f"CHECKPOINT = {str(checkpoint)!r}\n{script.source}"
    end = time.monotonic() + script.seconds
    found = sandbox.run(source, lambda: end, limits=LIMITS)
    return _harm(script, sandbox, found), found


def _harm(script: Script, sandbox: Sandbox, found: ProgramOutcome) -> str:
    if b"ESCAPED" in found.stdout:
        return found.stdout[:300].decode("utf-8", "replace")
    ends = (script.ends,) if isinstance(script.ends, str) else script.ends
    if found.why not in ends:
        return f"ended by {found.why or found.code}: {found.stderr[-300:]!r}"
    if not found.why and found.code not in (script.code, -9):
        return f"exit status {found.code}: {found.stderr[-300:]!r}"
    if found.peak_bytes > 3 * LIMITS.memory_mb << 20:
        return f"peak of {found.peak_bytes >> 20} MB"
    end = time.monotonic() + _LONG_S
    left = sandbox.run("import os; print(os.listdir('.'))", lambda: end).stdout
    if left != b"[]\n":
        return f"left files: {left!r}"
    if (count := descendants(sandbox.pid)) > 2:  # bubblewrap's init and the interpreter that waits
        return f"left {count} processes"
    return ""


def descendants(root: int) -> int:
    """Count the living processes below this one."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(name)] = int(fields[1])
    family = {root}
    for _ in parents:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        if not more:
            break
        family |= more
    return len(family) - 1
