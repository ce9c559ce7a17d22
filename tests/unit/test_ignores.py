"""What mypy is told to ignore names its code and says why, on its line or in the one above."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "rlcore"
IGNORE = re.compile(r"# type: ignore(?P<code>\[[\w, -]+\])?(?P<reason>\s+# \w.*)?")


def unexplained(text: str) -> list[str]:
    lines = ["", *text.splitlines()]
    return [
        line.strip()
        for above, line in zip(lines, lines[1:], strict=False)
        if (found := IGNORE.search(line))
        and not (found["code"] and (found["reason"] or above.strip().startswith("#")))
    ]


def test_every_ignore_has_a_code_and_a_reason() -> None:
    found = {str(f.relative_to(ROOT)): unexplained(f.read_text()) for f in ROOT.rglob("*.py")}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("text", "is_fine"),
    [
        ("x = f()  # type: ignore", False),
        ("x = f()  # type: ignore[arg-type]", False),
        ("x = f()  # type: ignore  # the stubs lack it", False),
        ("x = f()  # type: ignore[arg-type]  # the stubs lack it", True),
        ("# the stubs lack it\nx = f()  # type: ignore[arg-type]", True),
        ("x = f()", True),
    ],
)
def test_one_without_is_found(text: str, is_fine: bool) -> None:
    assert (not unexplained(text)) == is_fine
