"""The learner under every layout, in one gang of four ranks, against one rank on the same rows."""

from typing import Any

import pytest

from tests import kit

pytestmark = pytest.mark.ranks(4)

DENSE: dict[str, dict[str, Any]] = {
    "dp4": {},
    "dp4 distributed optimizer": {"distributed_optimizer": True},
    "tp2": {"tp": 2, "sp": False},
    "tp2 sequence parallel": {"tp": 2},
    "tp2 sequence parallel distributed optimizer": {"tp": 2, "distributed_optimizer": True},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "cp2": {"cp": 2},
    "cp4": {"cp": 4},
    "cp2 tp2": {"cp": 2, "tp": 2},
    "cp2 pp2 distributed optimizer": {"cp": 2, "pp": 2, "distributed_optimizer": True},
    "full recompute": {"recompute": "full", "tp": 2},
    "selective recompute": {"recompute": "selective"},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ep2": {"ep": 2},
    "ep4 distributed optimizer": {"ep": 4, "distributed_optimizer": True},
    "tp2 ep2": {"tp": 2, "ep": 2},
    "pp2 ep2": {"pp": 2, "ep": 2},
    "cp2 ep2": {"cp": 2, "ep": 2},
}
CASES = {name: {"layout": layout} for name, layout in DENSE.items()} | {
    name: {"layout": layout, "arch": "qwen3_moe"} for name, layout in EXPERTS.items()
}
ALONE = {"qwen3": {"layout": {}}, "qwen3_moe": {"layout": {}, "arch": "qwen3_moe"}}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return kit.run_ranks(1, "tests.ranks.learner_ranks:parity", {"cases": ALONE})[0]


@pytest.fixture(scope="module")
def gang() -> list[dict[str, Any]]:
    target = "tests.ranks.learner_ranks:parity"
    return kit.run_ranks(4, target, {"cases": CASES}, timeout_s=240)


@pytest.mark.parametrize("case", CASES)
def test_three_updates_equal_those_of_one_rank(
    alone: dict[str, Any], gang: list[dict[str, Any]], case: str
) -> None:
    want = alone[CASES[case].get("arch", "qwen3")]
    figures = {k: v for k, v in want.items() if isinstance(v, float)}
    assert len(figures) == 3 * 9
    assert figures["actor/grad_norm 0"] > 0.5  # the clip is at work
    for found in gang:
        ours = {k: v for k, v in found[case].items() if isinstance(v, float)}
        kit.assert_close_named(ours, figures, rtol=1e-5, atol=1e-5)
        kit.assert_close_named(found[case]["weights"], want["weights"], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_log_probs_are_on_every_rank_and_equal(
    alone: dict[str, Any], gang: list[dict[str, Any]], case: str
) -> None:
    from tests.ranks.learner_ranks import LENGTHS

    rows = alone["qwen3"]["logp"].split(LENGTHS)
    if "arch" in CASES[case]:
        rows = alone["qwen3_moe"]["logp"].split(LENGTHS)
    for found in gang:
        ours = found[case]["logp"].split([LENGTHS[r] for r in found[case]["rows"]])
        theirs = [rows[r] for r in found[case]["rows"]]
        kit.assert_close_named(dict(enumerate(ours)), dict(enumerate(theirs)), atol=1e-5)
        assert all(row[0] == 0 and (row[1:] < 0).all() for row in ours)


def test_packed_equals_one_by_one_and_an_empty_batch_adds_nothing() -> None:
    found = kit.run_ranks(1, "tests.ranks.learner_ranks:one_by_one")[0]
    kit.assert_close_named({"l": found["packed logp"]}, {"l": found["single logp"]}, atol=2e-6)
    kit.assert_close_named(found["packed"], found["single"], atol=2e-6)
    kit.assert_close_named(found["packed weights"], found["single weights"], atol=1e-5)
    assert found["empty logp"].numel() == 0


def test_ranks_without_sequences_keep_step() -> None:
    found = kit.run_ranks(4, "tests.ranks.learner_ranks:empty_shards")
    assert {rank["pp2"]["actor/grad_norm"] for rank in found} == {
        found[0]["pp2"]["actor/grad_norm"]
    }
    assert [rank["pp2 logp"].numel() for rank in found] == [33, 0, 33, 0]
    assert [rank["ep2 logp"].numel() for rank in found] == [33, 0, 0, 0]
    assert found[0]["ep2"]["actor/grad_norm"] > 0
