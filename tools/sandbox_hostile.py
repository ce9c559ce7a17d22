"""Run all hostile programs of the tests in each grade of isolation, as root and as a normal user.

    python tools/sandbox_hostile.py --json tools/results/sandbox_hostile.json

Prints a line for each program: what came of it in each grade. As root, the normal user is `nobody`,
with a cgroup that is given to this user; else only this user's programs run. Takes about 15 min.

Rows of the JSON: program, user, grade, outcome (held, ESCAPED or SKIP), how (refused, or why the
sandbox killed it; else what happened, or why it was skipped), seconds, peak_mb.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.sandbox import confine, isolation  # noqa: E402
from rlcore.sandbox.box import Sandbox  # noqa: E402
from rlcore.sandbox.cgroup import Cgroup  # noqa: E402
from tests.attack import SCRIPTS, attack, skipped  # noqa: E402

SYSTEM_PYTHON = "/usr/bin/python3"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--only", default="", help="part of the names of the programs to run")
    p.add_argument("--grades", nargs="*", default=isolation.GRADES, help="grades to run")
    p.add_argument("--json", type=Path, metavar="FILE", help="JSON file for the results")
    p.add_argument("--as-this-user", action="store_true", help="do not run them as nobody, too")
    a = p.parse_args()
    rows = [row for grade in a.grades for row in run(grade, a.only)]
    if os.geteuid() == 0 and not a.as_this_user:
        rows += as_nobody(a.only, a.grades)
    show(rows)
    if a.json:
        a.json.write_text(json.dumps(rows, indent=0) + "\n")
    if any(row["outcome"] == "ESCAPED" for row in rows):
        sys.exit(1)


def run(grade: Any, only: str) -> list[dict[str, Any]]:
    """Run the programs in one grade, each in a sandbox of its own."""
    user = "root" if os.geteuid() == 0 else "user"
    rows = []
    os.environ["HOSTILE_SECRET"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model.bin"
        checkpoint.write_text("weights")
        for script in (s for s in SCRIPTS if only in s.name):
            row = {"program": script.name, "user": user, "grade": grade}
            begin = time.monotonic()
            if why := skipped(script, grade):
                row |= {"outcome": "SKIP", "how": why}
            else:
                try:
                    with Sandbox(grade) as sandbox:
                        harm, found = attack(script, sandbox, checkpoint)
                    how = harm or found.why or "refused"
                    row |= {"outcome": "ESCAPED" if harm else "held", "how": how}
                    row["peak_mb"] = found.peak_bytes >> 20
                except (RuntimeError, TimeoutError) as error:
                    row |= {"outcome": "SKIP", "how": str(error)}
            row["seconds"] = round(time.monotonic() - begin, 1)
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
        assert checkpoint.read_text() == "weights"
    return rows


def as_nobody(only: str, grades: list[str]) -> list[dict[str, Any]]:
    """Run the programs as the user `nobody`, in a cgroup that belongs to this user."""
    command = [SYSTEM_PYTHON, "-B", __file__, "--only", only, "--grades", *grades]
    cgroup, ids = None, confine.NOBODY
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, ids, ids)
        try:
            cgroup = Cgroup(f"of-nobody-{uuid.uuid4().hex}")
            cgroup.give_to(ids)
        except (OSError, RuntimeError) as error:
            print(f"no cgroup for nobody: {error}", file=sys.stderr)

        def become() -> None:
            if cgroup is not None:
                for fd in cgroup.open()[0]:
                    os.write(fd, b"0")
            os.setgroups([])
            os.setresgid(ids, ids, ids)
            os.setresuid(ids, ids, ids)

        try:
            out = f"{folder}/rows.json"
            subprocess.run(
                [*command, "--json", out],
                cwd="/",
                env={"PATH": os.environ["PATH"], "TMPDIR": folder},
                preexec_fn=become,
                stdout=subprocess.DEVNULL,
            )
            return json.loads(Path(out).read_text())
        finally:
            if cgroup is not None:
                cgroup.close()


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table of outcomes and their counts."""
    columns = list(dict.fromkeys((row["user"], row["grade"]) for row in rows))
    cells: dict[str, dict[tuple[str, str], str]] = collections.defaultdict(dict)
    for row in rows:
        text = row["outcome"] if row["outcome"] != "held" else row["how"]
        cells[row["program"]][row["user"], row["grade"]] = text
    print("| program | " + " | ".join(f"{u}, {g}" for u, g in columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for name, found in cells.items():
        print(f"| {name} | " + " | ".join(found.get(c, "") for c in columns) + " |")
    for column in columns:
        here = collections.Counter(
            row["outcome"] for row in rows if (row["user"], row["grade"]) == column
        )
        print(f"{', '.join(column)}: " + ", ".join(f"{n} {what}" for what, n in here.items()))


if __name__ == "__main__":
    main()
