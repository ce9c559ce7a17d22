"""The contract of every engine for SGLang with drafts at every step."""

import importlib.util

import pytest

from tests.contracts.engine_contract import *  # noqa: F403
from tests.contracts.test_sglang import children, lab_of, patience  # noqa: F401

pytestmark = [
    pytest.mark.ranks(1),
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="needs SGLang: bash tools/setup.sh --sglang",
    ),
]
DRAFTS = {"draft": "ngram", "draft_width": 4, "draft_settings": {"adaptive": False}}
del test_counters_add_up_and_a_group_is_prefilled_once  # noqa: F821 - it wants a step a token


@pytest.fixture
def lab(children):  # noqa: F811
    return lab_of(children, **DRAFTS)
