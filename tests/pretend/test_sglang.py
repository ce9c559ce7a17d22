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


@pytest.mark.parametrize("drafts", ["plain", pytest.param("drafts", marks=pytest.mark.slow)])
def test_sglang_takes_weights_and_samples_on_the_device(drafts: str) -> None:
    assert "2 passed" in run_pytest("-k", drafts, "tests/pretend/sglang_checks.py")
