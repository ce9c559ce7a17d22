"""A critic under every layout against one rank on the same rows; beside an actor; its checkpoints.

One gang of four ranks. tests/unit/test_mcore_critic.py has what one rank can show.
"""

from typing import Any

import pytest

from tests import kit
from tests.ranks.sizes import LENGTHS

pytestmark = pytest.mark.ranks(4)

DIST = {"distributed_optimizer": True}
ALL: dict[str, dict[str, Any]] = {
    "dp4 distributed optimizer": DIST,
    "tp2": {"tp": 2, "sp": False},
    "tp2 sequence parallel distributed optimizer": {"tp": 2} | DIST,
    "pp2": {"pp": 2},
    "tp2 pp2 full recompute": {"tp": 2, "pp": 2, "recompute": "full"},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "cp2 distributed optimizer": {"cp": 2} | DIST,
    "cp2 tp2": {"cp": 2, "tp": 2},
}
DENSE = kit.cases(ALL, "tp2", "pp2", "cp2 distributed optimizer", "tp2 pp2 full recompute")
# A mixture has an lm_head of its own, the others are tied: a critic has neither.
CASES = {name: {"layout": layout} for name, layout in DENSE.items()} | {
    "pp2 ep2": {"layout": {"pp": 2, "ep": 2}, "arch": "qwen3_moe"},
}
APART = {"share_prefix": "false"}  # all layouts share prefixes
ALONE = {"qwen3": {"layout": APART}, "qwen3_moe": {"layout": APART, "arch": "qwen3_moe"}}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return kit.run_ranks(1, "tests.ranks.critic_ranks:alone", {"cases": ALONE})[0]


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    args = {"folder": str(tmp_path_factory.mktemp("critics")), "cases": CASES}
    return kit.run_ranks(4, "tests.ranks.critic_ranks:gang", args, timeout_s=240)


def wanted(alone: dict[str, Any], case: str) -> dict[str, Any]:
    return alone[CASES[case].get("arch", "qwen3")]


def of_same_ranks(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """`theirs` without the head where it is on another pipeline stage."""
    return theirs if "head" in ours else {k: v for k, v in theirs.items() if k != "head"}


@pytest.mark.parametrize("case", CASES)
def test_three_updates_equal_those_of_one_rank(
    alone: dict[str, Any], gang: list[dict[str, Any]], case: str
) -> None:
    want = wanted(alone, case)
    figures = {k: v for k, v in want.items() if isinstance(v, float)}
    every = {"grad_norm", "lr", "loss", "skipped", "vf_clipfrac", "vpred_mean"}
    assert figures.keys() == {f"critic/{name} {n}" for name in every for n in range(3)}
    assert figures["critic/grad_norm 0"] > 0.5  # the clip is at work
    assert figures["critic/vf_clipfrac 1"] > 0.02
    assert any("head" in rank["parity"][case]["weights"] for rank in gang)
    for rank in gang:
        found = rank["parity"][case]
        assert 0.05 < found["critic/shared_tokens 0"] < 0.25
        ours = {k: found[k] for k in figures}
        kit.assert_close_named(ours, figures, rtol=1e-5, atol=1e-5)
        theirs = of_same_ranks(found["weights"], want["weights"])
        kit.assert_close_named(found["weights"], theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", ALONE)
def test_the_updates_move_trunk_and_head(alone: dict[str, Any], arch: str) -> None:
    found = alone[arch]
    for name, after in found["weights"].items():
        assert (after - found["start"][name]).abs().max() > 1e-3, name


@pytest.mark.parametrize("case", CASES)
def test_values_are_on_every_rank_and_equal(
    alone: dict[str, Any], gang: list[dict[str, Any]], case: str
) -> None:
    rows = wanted(alone, case)["values"].split(LENGTHS)
    for rank in gang:
        found = rank["parity"][case]
        assert not found["new"].any()
        ours = found["values"].split([LENGTHS[r] for r in found["rows"]])
        theirs = [rows[r] for r in found["rows"]]
        kit.assert_close_named(dict(enumerate(ours)), dict(enumerate(theirs)), atol=1e-5)
        assert all(row[0] == 0 and row[1:].all() for row in ours)


@pytest.mark.parametrize("case", CASES)
def test_what_the_loss_keeps_is_counted_once_over_all_ranks(
    gang: list[dict[str, Any]], case: str
) -> None:
    for rank in gang:
        found = rank["parity"][case]
        for number in range(3):
            tokens, sequences = found[f"to keep {number}"]
            assert 50 < tokens < 116 and 0 < sequences <= len(LENGTHS)
            assert found[f"kept {number}"] == [tokens, sequences]


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_actor_and_critic_in_one_process_train_as_they_do_alone(
    gang: list[dict[str, Any]], layout: str
) -> None:
    for rank in gang:
        found = rank[layout]
        assert found["alone"].keys() == {f"{m} {n}" for m in ("actor", "critic") for n in (0, 1)}
        assert found["alone"].keys() == found["together"].keys()
        for name, want in found["alone"].items():
            kit.assert_bitwise(found["together"][name], want)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_the_reference_comes_and_goes_without_a_trace(
    gang: list[dict[str, Any]], layout: str
) -> None:
    for rank in gang:
        once, twice = rank[layout]["reference moved"]
        assert once == twice > 1e-3
        assert rank[layout]["same after"]


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_two_learners_of_one_process_need_one_layout(
    gang: list[dict[str, Any]], layout: str
) -> None:
    key = f"--train.{layout[:2]} 1: another learner of this process has 2"
    assert all(rank[layout]["other layout"].startswith(key) for rank in gang)


def test_actor_and_critic_resume_bit_for_bit_from_folders_of_their_own(
    gang: list[dict[str, Any]],
) -> None:
    for rank in gang:
        found = rank["checkpoints"]
        assert found["versions"] == [2, 2]
        for what in ("", " actor"):
            straight, again = found[f"straight{what}"], found[f"again{what}"]
            assert again["metrics"] == straight["metrics"]
            kit.assert_bitwise(again["weights"], straight["weights"])


@pytest.mark.parametrize("layout", ["pp2 vpp2", "dp4"])
def test_a_critic_resumes_under_another_layout(gang: list[dict[str, Any]], layout: str) -> None:
    for rank in gang:
        straight, again = rank["checkpoints"]["straight"], rank["checkpoints"][layout]
        for found in (straight, again):  # which depends on the layout
            assert found["metrics"].pop("critic/shared_tokens 2", 1) > 0
            found["metrics"].pop("critic/shared_tokens 3", None)
        kit.assert_close_named(again["metrics"], straight["metrics"])
        theirs = of_same_ranks(again["weights"], straight["weights"])
        kit.assert_close_named(again["weights"], theirs)
