"""tools/heavy_tests.py: what `tools/test.sh --fast` leaves out."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def heavy_tests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import heavy_tests

    yield heavy_tests
    del sys.modules["heavy_tests"]


def test_the_longest_are_left_out_until_the_rest_is_short(heavy_tests, tmp_path: Path, capsys):
    file = tmp_path / "junit.xml"
    cases = [("tests.unit.a", "x[1]", 3), ("tests.unit.a", "x[2]", 2), ("tests.b", "y", 4),
             ("tests.b", "z", 1)]  # fmt: skip
    lines = [f'<testcase classname="{c}" name="{n}" time="{t}"/>' for c, n, t in cases]
    file.write_text(f"<testsuites>{''.join(lines)}</testsuites>")
    x, y = "tests/unit/a.py::x", "tests/b.py::y"
    for limit, left_out in ((10, []), (5, [x]), (4, [y, x])):
        assert heavy_tests.main([str(file), "--seconds", str(limit)]) == 0
        assert capsys.readouterr().out.split() == left_out


def test_the_longest_files_are_printed_in_minutes(heavy_tests, tmp_path: Path, capsys):
    file = tmp_path / "junit.xml"
    cases = [("tests.unit.a", "x[1]", 60), ("tests.unit.a", "y", 30), ("tests.b", "y", 120)]
    lines = [f'<testcase classname="{c}" name="{n}" time="{t}"/>' for c, n, t in cases]
    file.write_text(f"<testsuites>{''.join(lines)}</testsuites>")
    assert heavy_tests.main([str(file), "--files", "1"]) == 0
    assert capsys.readouterr().out == "  2.00 min  tests/b.py\n  3.50 min  all 2 files\n"


def test_every_line_names_a_test():
    """A name that is gone leaves nothing out. Contracts are written elsewhere than they run."""
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for line in (ROOT / "tests" / "heavy.txt").read_text().split():
        path, _, name = line.partition("::")
        assert (ROOT / path).is_file() and f"def {name}(" in text, line
