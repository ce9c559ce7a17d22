"""The form of the markdown pages: width of a line, size of a table cell, length of the README."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {f"tools/results/exp_tis{kind}.md" for kind in ("", "_8bit", "_more")}
"""Written by tools/studies/exp_tis.py."""
PAGES = sorted(
    page
    for page in (p.relative_to(ROOT).as_posix() for p in ROOT.glob("**/*.md"))
    if page not in GENERATED and not re.search(r"(^|/)(\.|build/|runs/)", page)
)
COLUMNS, CELL, README_LINES = 100, 80, 150


def faults(text: str) -> list[str]:
    """Return the lines that are too wide and the table cells that are too long, outside of code. A
    link's target does not count in a cell, and a link alone may be as wide as it must be."""
    found = []
    for line in re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", re.sub(r"\]\([^)]*\)", "]", line))
            found += [cell for cell in cells if len(cell.strip()) > CELL]
        elif len(line) > COLUMNS and not re.fullmatch(r"\W*\[[^]]*\]\(\S*\)\W*", line):
            found.append(line)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_lines_and_cells_of_a_page_are_short(page: str) -> None:
    assert not faults((ROOT / page).read_text())


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_a_wide_line_and_a_long_cell_are_found() -> None:
    long = "word " * 21
    wide_link = f"[picture]({'x' * 100})"
    table = f"| a | [page]({'x' * 100}) |\n| {long[:79]} | b |"
    assert faults(f"short\n{long}\n| a | {long} |") == [long, f" {long} "]
    assert not faults(f"{table}\n```\n{long}\n```\n!{wide_link}")
