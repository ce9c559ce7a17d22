"""Table and report of tools/gpu_check.sh: `python tools/gpu_table.py RESULTS REPORT NAME...`

RESULTS holds, for each name of a step or test file, `<name>.end` (exit code and seconds),
`<name>.log`, from pytest `<name>.xml`, and `<name>.skip` (the reason) if the step was skipped.
REPORT holds machine.txt. Every test goes to REPORT/table.txt, the logs of failures to
REPORT/log.txt. REPORT/report.txt, to be pasted, has machine, rows and the last lines of errors.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

OUTCOMES = ("passed", "failed", "error", "skipped")
NOTES = {
    0: "",
    1: "",
    4: "pytest does not find the tests",
    5: "no test collected",
    86: "compute-sanitizer found errors",
    124: "ended at LIMIT_S or TOTAL_S",
    134: "aborted",
    137: "killed",
    139: "segmentation fault",
}
BUILD = "native_build"
LAST_LINES = 8


@dataclass(frozen=True)
class Test:
    """One test of a step."""

    name: str
    outcome: str
    seconds: float
    why: str
    """First line of the failure, or the reason of a skip."""
    last: list[str]
    """Last lines of the error."""
    figures: list[str]
    """Figures that the test measured, such as `gen: 1.2 GB, planned 3.6 GB`."""


def tests_of(xml: Path) -> list[Test]:
    """Return every test of a file, or nothing where pytest did not get so far."""
    if not xml.is_file():
        return []
    found = []
    for case in ElementTree.parse(xml).iter("testcase"):
        outcome, why, said = "passed", "", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "failed" if child.tag == "failure" else child.tag
                why, said = " ".join((child.get("message") or "").split()), child.text or ""
        errors = [line for line in said.splitlines() if line.startswith("E ")]
        last = errors[-LAST_LINES:] if outcome in ("failed", "error") else []
        figures = [f"{p.get('name')}: {p.get('value')}" for p in case.iter("property")]
        seconds = float(case.get("time", 0))
        found.append(Test(case.get("name", ""), outcome, seconds, why, last, figures))
    return found


def verdict(code: int, tests: list[Test], skipped: bool) -> str:
    """PASS, FAIL, or SKIP for a step of which no test ran."""
    if code:
        return "FAIL"
    return "SKIP" if skipped or tests and all(t.outcome == "skipped" for t in tests) else "PASS"


def main(results: Path, report: Path, names: list[str]) -> None:
    """Print a row for each name and each test that did not pass; write the files of the report."""
    table, log, odd, rows, errors = [], [], [], [], []
    for name in names:
        end, skip = results / f"{name}.end", results / f"{name}.skip"
        if not end.is_file():
            rows.append(f"{'-':6} {name:20} not run, because TOTAL_S is over; run again")
            continue
        code, seconds = map(int, end.read_text().split())
        tests = tests_of(end.with_suffix(".xml"))
        counts = [sum(t.outcome == outcome for t in tests) for outcome in OUTCOMES]
        result = verdict(code, tests, skip.is_file())
        note = skip.read_text().strip() if skip.is_file() else NOTES.get(code, f"exit code {code}")
        if result == "SKIP" and not note:
            note = tests[0].why
        numbers = "".join(f"{n:9}" for n in counts) if tests or name != BUILD else " " * 36
        rows.append(f"{result:6} {name:20}{numbers}{seconds:7} s  {note}".rstrip()[:200])
        for t in tests:
            line = f"{t.outcome:8}{t.seconds:7.1f} s  {name}::{t.name}  {t.why[:300]}".rstrip()
            table.append(line)
            rows += [f"       | {figure}" for figure in t.figures]
            if t.outcome != "passed":
                odd.append(line[:240])
            if t.last:
                errors += [line[:240], *(f"       | {said[:240]}" for said in t.last)]
        if code:
            said = end.with_suffix(".log").read_text(errors="replace")
            log.append(f"==== {name}\n{said}")
            if not tests:  # nothing else tells why
                rows += [f"       | {line[:240]}" for line in said.splitlines()[-LAST_LINES:]]
    head = f"{'result':6} {'step':20}" + "".join(f"{name:>9}" for name in OUTCOMES) + "     time"
    machine = (report / "machine.txt").read_text().rstrip()
    (report / "table.txt").write_text("\n".join([head, *rows, "", *table]) + "\n")
    (report / "log.txt").write_text("\n".join(log) + "\n")
    (report / "report.txt").write_text("\n".join([machine, "", head, *rows, "", *errors]) + "\n")
    sys.stdout.write("\n".join([*odd, "", head, *rows]) + "\n")
    sys.stdout.write(f"gpu_check: the report to paste is {report / 'report.txt'}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
