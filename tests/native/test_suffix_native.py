"""The suffix forest in C++ alone: brute force, batched walks and the device's body."""

import pytest

from tests.native import host

pytestmark = pytest.mark.native


@pytest.mark.slow
def test_the_host_test_passes_under_address_and_undefined_sanitizers(tmp_path):
    """About 30 s, nearly all of it to compile."""
    sources = ["suffix/build.cpp", "suffix/forest.cpp", "tests/suffix_test.cpp"]
    host.run(host.build(tmp_path, sources))
