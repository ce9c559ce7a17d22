"""A test module that imports `build` runs every test on both builds of the ops: the torch reference
and the native library."""

from collections.abc import Iterator

import pytest

from rlcore.ops import native

BUILDS = [
    "torch",
    pytest.param(
        "native",
        marks=[
            pytest.mark.native,
            pytest.mark.skipif(
                bool(native._library()), reason="no native build (no compiler at set-up)"
            ),
        ],
    ),
]


@pytest.fixture(params=BUILDS, autouse=True)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Which build the test sees: "torch" or "native"."""
    monkeypatch.setenv("RLCORE_NATIVE", "1" if request.param == "native" else "0")
    native.torch_ops.cache_clear()
    yield request.param
    native.torch_ops.cache_clear()
