"""List the longest tests, which `tools/test.sh --fast` leaves out so that the others take a minute.

    PYTEST_ADDOPTS=--junitxml=junit.xml bash tools/test.sh
    python tools/heavy_tests.py junit.xml > tests/heavy.txt
    python tools/heavy_tests.py junit.xml --files 20    # the longest files, in minutes

A line is a test with all its parameters, and what it needs before it. Run it again when `--fast`
takes more than two minutes.
"""

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

SECONDS = 110.0
"""Of the tests that are left, on one core; two share them."""


def seconds_by_test(junit: Path) -> dict[str, float]:
    """Of every test that ran, all its parameters together: `tests/unit/test_x.py::test_y`."""
    found: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(junit).iter("testcase"):
        path = case.attrib["classname"].replace(".", "/") + ".py"
        found[f"{path}::{case.attrib['name'].partition('[')[0]}"] += float(case.attrib["time"])
    return found


def heavy(seconds: dict[str, float], limit_s: float = SECONDS) -> list[str]:
    """The longest tests, so many that the others take no longer than `limit_s`."""
    left, out = sum(seconds.values()), []
    for name, took in sorted(seconds.items(), key=lambda item: -item[1]):
        if left <= limit_s:
            break
        out.append(name)
        left -= took
    return sorted(out)


def longest_files(seconds: dict[str, float], count: int) -> list[str]:
    """Lines with the minutes of each of the longest files, and of all together."""
    files: dict[str, float] = defaultdict(float)
    for name, took in seconds.items():
        files[name.partition("::")[0]] += took
    longest = sorted(files.items(), key=lambda item: -item[1])[:count]
    rows = [*longest, (f"all {len(files)} files", sum(files.values()))]
    return [f"{took / 60:6.2f} min  {name}" for name, took in rows]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("junit", type=Path, help="file written by pytest --junitxml")
    p.add_argument(
        "--seconds", type=float, default=SECONDS, help="maximum seconds of the remaining tests"
    )
    p.add_argument("--files", type=int, metavar="N", help="print the N longest files instead")
    a = p.parse_args(argv)
    if a.files:
        print("\n".join(longest_files(seconds_by_test(a.junit), a.files)))
        return 0
    print("\n".join(heavy(seconds_by_test(a.junit), a.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
