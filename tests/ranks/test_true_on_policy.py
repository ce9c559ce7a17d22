"""`--train.true_on_policy`: sampler and learner give every token the same log-prob, bit by bit.

The ranks are processes of their own, because the switch replaces torch's matrix product."""

from typing import Any

import pytest

from rlcore.ops import native
from tests import kit

COMPARE = "tests.ranks.on_policy_ranks:compare"

ALONE: dict[str, dict[str, Any]] = kit.cases(
    {
        "qwen3": {},
        "qwen2": {"arch": "qwen2", "train": {"tokens_per_micro_batch": 4096}},
        "llama": {"arch": "llama", "train": {"share_prefix": "false"}},
        "mistral": {"arch": "mistral", "train": {"recompute": "full"}},
        "no whole vectors": {"sizes": {"hidden_size": 36, "intermediate_size": 50, "head_dim": 6}},
        "drafts": {"engine": {"draft": "ngram", "draft_settings": {"adaptive": False}}},
        "preemptions": {"engine": {"cache_tokens": 200}},
        "one request, one row": {
            "engine": {"max_running": 1},
            "train": {"tokens_per_micro_batch": 1},
        },
    },
    "mistral",
    "one request, one row",
)
LAYOUTS: dict[str, dict[str, Any]] = kit.cases(
    {
        "dp2": {},
        "dp2 distributed optimizer": {"train": {"distributed_optimizer": True}},
        "pp2": {"train": {"pp": 2}},
        "cp2": {"train": {"cp": 2}},
    },
    "dp2 distributed optimizer",
)


@pytest.fixture(autouse=True, scope="module")
def _native() -> None:
    if native.torch_ops("batch-invariant operations") is None:
        pytest.skip("the mode needs rlcore's native code: bash tools/setup.sh")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return kit.run_ranks(1, COMPARE, {"cases": ALONE})[0]


@pytest.fixture(scope="module")
def gang() -> list[dict[str, Any]]:
    return kit.run_ranks(2, COMPARE, {"cases": LAYOUTS})


def must_be_equal(found: dict[str, Any]) -> None:
    assert found["tokens"] > 500
    assert found["largest"] == 0.0
    assert found["by row"]


@pytest.mark.parametrize("case", ALONE)
def test_all_tokens_have_equal_log_probs_before_and_after_an_update(
    alone: dict[str, Any], case: str
) -> None:
    must_be_equal(alone[case])
    assert (alone[case]["drafted"] > 0) == (case == "drafts")
    assert (alone[case]["preempted"] > 0) == (case == "preemptions")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", LAYOUTS)
def test_two_ranks_may_train_what_the_other_has_sampled(
    gang: list[dict[str, Any]], case: str
) -> None:
    for found in gang:
        must_be_equal(found[case])


def test_without_the_mode_log_probs_differ() -> None:
    """Otherwise the tests above could not fail."""
    [found] = kit.run_ranks(1, COMPARE, {"cases": {"qwen3": {}}, "on": False})
    assert found["qwen3"]["largest"] > 0


def test_filtered_and_greedy_requests_keep_the_log_probs_of_what_was_sampled() -> None:
    [found] = kit.run_ranks(1, "tests.ranks.on_policy_ranks:with_filters")
    (tokens, logps, by_row), (same, others, _) = found["True"], found["False"]
    assert tokens == same and by_row
    assert (logps - others).abs().max() < 1e-5
