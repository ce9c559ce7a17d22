"""The table of tools/gpu_check.sh: `python tools/gpu_table.py RESULTS REPORT`.

RESULTS holds, for each test file and for the native build, `<name>.end` (exit code and seconds),
`<name>.log` and, from pytest, `<name>.xml`. Every test goes to REPORT/table.txt, the logs of what
failed to REPORT/log.txt, and a row per file and per test that did not pass to the terminal.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree

OUTCOMES = ("passed", "failed", "error", "skipped")
NOTES = {
    0: "",
    1: "",
    5: "no test collected",
    124: "ended at LIMIT_S",
    134: "aborted",
    137: "killed",
    139: "segmentation fault",
}
BUILD = "native_build"
LAST_LINES = 8


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


def verdict(code: int, outcomes: list[str]) -> str:
    """PASS, FAIL, or SKIP for a file of which no test ran."""
    if code:
        return "FAIL"
    return "SKIP" if outcomes and set(outcomes) == {"skipped"} else "PASS"


def main(results: Path, report: Path) -> int:
    """0 where the build and every file came to their end and nothing failed."""
    table, log, odd, rows, bad, files = [], [], [], [], 0, 0
    for end in sorted(results.glob("*.end"), key=lambda end: (end.stem != BUILD, end.stem)):
        name = end.stem
        code, seconds = map(int, end.read_text().split())
        tests = tests_of(end.with_suffix(".xml"))
        counts = [sum(t[1] == outcome for t in tests) for outcome in OUTCOMES]
        result = verdict(code, [t[1] for t in tests])
        note = NOTES.get(code, f"exit code {code}")
        numbers = "".join(f"{n:9}" for n in counts) if name != BUILD else " " * 36
        rows.append(f"{result:6} {name:20}{numbers}{seconds:7} s  {note}".rstrip())
        for test, outcome, took, why in tests:
            line = f"{outcome:8}{took:7.1f} s  {name}::{test}  {why[:300]}".rstrip()
            table.append(line)
            if outcome != "passed":
                odd.append(line[:240])
        files += name != BUILD
        if code:
            bad += 1
            said = end.with_suffix(".log").read_text(errors="replace")
            log.append(f"==== {name}\n{said}")
            if not tests:  # nothing else tells why
                rows += [f"       | {line[:240]}" for line in said.splitlines()[-LAST_LINES:]]
    head = f"{'result':6} {'file':20}" + "".join(f"{name:>9}" for name in OUTCOMES) + "     time"
    (report / "table.txt").write_text("\n".join([head, *rows, "", *table]) + "\n")
    (report / "log.txt").write_text("\n".join(log) + "\n")
    sys.stdout.write("\n".join([*odd, "", head, *rows]) + "\n")
    return 1 if bad or not files else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))
