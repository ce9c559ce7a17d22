"""SGLang on the pretend device; sglang_checks.py has the tests."""

import importlib.util

import pytest

from tests.pretend.test_device import run_pytest

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="needs SGLang: bash tools/setup.sh --sglang",
    ),
]


@pytest.mark.parametrize(
    "case",
    ["plain", *(pytest.param(x, marks=pytest.mark.slow) for x in ("drafts", "matched"))]
    + ["overlapped"],
)
def test_sglang_takes_weights_and_samples_on_the_device(case: str) -> None:
    count = 3 if case in ("matched", "overlapped") else 2
    said = run_pytest("-k", f"[{case}]", "tests/pretend/sglang_checks.py")
    assert f"{count} passed" in said
