"""The table of tools/gpu_check.sh: `python tools/gpu_table.py RESULTS REPORT`.

RESULTS holds, per test file, `<name>.xml` (pytest's), `<name>.log` and `<name>.end` (exit code and
seconds). Every test goes to REPORT/table.txt, the logs of files that failed to REPORT/log.txt, and
a row per file and per test that did not pass to the terminal.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree

OUTCOMES = ("passed", "failed", "error", "skipped")


def tests_of(xml: Path) -> list[tuple[str, str, float, str]]:
    """Name, outcome, seconds and why, of every test; nothing where pytest did not get so far."""
    if not xml.is_file():
        return []
    found = []
    for case in ElementTree.parse(xml).iter("testcase"):
        outcome, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "failed" if child.tag == "failure" else child.tag
                why = " ".join((child.get("message") or "").split())
        found.append((case.get("name", ""), outcome, float(case.get("time", 0)), why))
    return found


def main(results: Path, report: Path) -> int:
    """0 where every file was run to its end and nothing failed."""
    table, log, odd, rows, bad = [], [], [], [], 0
    for end in sorted(results.glob("*.end")):
        name = end.stem
        code, seconds = map(int, end.read_text().split())
        tests = tests_of(end.with_suffix(".xml"))
        counts = [sum(t[1] == outcome for t in tests) for outcome in OUTCOMES]
        note = {0: "", 1: "", 124: "ended at LIMIT_S", 137: "killed"}.get(code, f"exit code {code}")
        rows.append(f"{name:20}" + "".join(f"{n:9}" for n in counts) + f"{seconds:7} s  {note}")
        for test, outcome, took, why in tests:
            line = f"{outcome:8}{took:7.1f} s  {name}::{test}  {why[:300]}".rstrip()
            table.append(line)
            if outcome != "passed":
                odd.append(line[:240])
        if code:
            bad += 1
            log.append(f"==== {name}\n{end.with_suffix('.log').read_text(errors='replace')}")
    head = f"{'file':20}" + "".join(f"{outcome:>9}" for outcome in OUTCOMES) + "     time"
    (report / "table.txt").write_text("\n".join([head, *rows, "", *table]) + "\n")
    (report / "log.txt").write_text("\n".join(log) + "\n")
    sys.stdout.write("\n".join([*odd, "", head, *rows]) + "\n")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))
