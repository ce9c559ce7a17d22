"""Options and skips of the whole suite."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import forks

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # test_hub.py asks a stub

# The same examples in every run, so that a red run is red again; --long draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None)
settings.load_profile(os.environ.get("RLCORE_EXAMPLES", "same"))

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def silent_log() -> Iterator[None]:
    """What a test that runs a command sets up in the logger is not there in the next test."""
    yield
    log = logging.getLogger("rlcore")
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def forked_engines(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engine children on the CPU are forks, unless the module says `PROGRAMS = True`."""
    is_program = getattr(request.module, "PROGRAMS", False) or "gpu" in request.keywords
    if is_program or "rlcore.rollout.child" not in sys.modules:
        yield
        return
    with forks.forked_engines():
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real data sets; absent, the test is skipped and says so."""
    folder = Path(os.environ.get("RLCORE_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is missing, set RLCORE_DATA")
    return folder


def pytest_configure(config: pytest.Config) -> None:
    """pytest undoes the filters of `rlcore.mcore.shim`; these are what Megatron does to itself."""
    for line in (
        "ignore::DeprecationWarning:megatron.core.*",
        "ignore:The 'megatron.core:DeprecationWarning",
        "ignore:`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor):FutureWarning",
        "ignore:`load_state_dict` is deprecated:FutureWarning",
        "ignore:Please use DTensor instead:FutureWarning",
    ):
        config.addinivalue_line("filterwarnings", line)


FIRST = "test_sglang_train.py", "test_learner.py", "test_sglang.py"
"""Long files. Of two workers the first takes one and three: engines of SGLang start one by one."""


def _turn(item: pytest.Item) -> tuple[int, bool]:
    """Long files go first, so that the workers end together; ranks next."""
    name = item.path.name
    place = FIRST.index(name) if name in FIRST else len(FIRST)
    return place, item.get_closest_marker("ranks") is None and "test_train" not in name


HEAVY = Path(__file__).with_name("heavy.txt")
"""Tests that `tools/test.sh --fast` has no time for; tools/heavy_tests.py writes it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    items.sort(key=_turn)
    heavy = set(HEAVY.read_text().split())
    for item in items:
        name = item.name.partition("[")[0]
        if f"{item.path.relative_to(ROOT)}::{name}" in heavy:
            item.add_marker("heavy")
    if torch.cuda.is_available() or "RLCORE_GPU_TESTS_DEVICE" in os.environ:
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
