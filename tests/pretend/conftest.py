"""The pretend device is compiled by its first test; without a compiler its tests are skipped."""

import os
import shutil

import pytest


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
