"""Fused loss and chunked output layer under every kind of layout, in one gang of four ranks: the
same gradient and the same figures as whole logits and the objective's text on one rank. And the ops
themselves on a vocabulary in 1, 2 and 4 parts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import kit
from tests.ranks import fused_ranks
from tests.ranks.sizes import LENGTHS

pytestmark = pytest.mark.ranks(4)

UNTIED = "tp2 without sp, cp2, untied"
CASES: dict[str, dict[str, Any]] = kit.cases(
    {
        "tp2 sp, pp2 vpp2, tied": {"layout": {"tp": 2, "pp": 2, "vpp": 2}},
        UNTIED: {"layout": {"tp": 2, "sp": False, "cp": 2}, "arch": "qwen2"},
    },
    UNTIED,
)
ALONE = kit.cases({"qwen3": {"layout": {}}, "qwen2": {"layout": {}, "arch": "qwen2"}}, "qwen2")
OBJECTIVES = ["grpo, mean of sequences", "dapo, all terms"]
WAYS = [(0, True), (7, False), (7, True)]


class Found:
    def __init__(self, folder: Path):
        self.ops = fused_ranks.ops_on(1)
        self.ways = {name: fused_ranks.four_ways(case, None) for name, case in ALONE.items()}
        logp = {name: ways["logp"] for name, ways in self.ways.items()}
        torch.save(logp, folder / "logp")
        args = {"logp_file": str(folder / "logp"), "cases": CASES}
        self.gang = kit.run_ranks(4, "tests.ranks.fused_ranks:gang", args, timeout_s=240)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("fused"))


def check(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Every tensor's gradient within 1e-5 of the largest entry of that tensor; figures alike."""
    assert ours["kept"] == theirs["kept"]
    kit.assert_close_named(ours["figures"], theirs["figures"], rtol=1e-5, atol=1e-6)
    assert ours["gradient"].keys() == theirs["gradient"].keys()
    for name, want in theirs["gradient"].items():
        scale = float(want.abs().max())
        worst = float((ours["gradient"][name] - want).abs().max())
        assert worst <= 1e-5 * scale + 1e-8, (name, worst, scale)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("arch", ALONE)
@pytest.mark.parametrize(("chunk", "fused"), WAYS)
def test_on_one_rank_every_way_gives_the_same_gradient(
    found: Found, objective: str, arch: str, chunk: int, fused: bool
) -> None:
    ways = found.ways[arch]
    check(
        ways[f"{objective}, chunk {chunk}, fused {fused}"],
        ways[f"{objective}, chunk 0, fused False"],
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("chunk", "fused"), WAYS)
def test_the_layout_changes_nothing(
    found: Found, objective: str, case: str, chunk: int, fused: bool
) -> None:
    want = found.ways[CASES[case].get("arch", "qwen3")]
    for rank in found.gang:
        check(
            rank["ways"][case][f"{objective}, chunk {chunk}, fused {fused}"],
            want[f"{objective}, chunk 0, fused False"],
        )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk", [0, 7])
def test_log_probs_without_a_gradient_are_the_same(found: Found, case: str, chunk: int) -> None:
    alone = found.ways[CASES[case].get("arch", "qwen3")]
    want, (_, of_one) = alone["logprobs, chunk 0"], alone["squares, chunk 0"]
    for rank in found.gang:
        assert torch.allclose(rank["ways"][case][f"logprobs, chunk {chunk}"], want, atol=1e-5)
        logp, squares = rank["ways"][case][f"squares, chunk {chunk}"]
        assert torch.equal(logp, rank["ways"][case][f"logprobs, chunk {chunk}"])
        assert torch.allclose(squares, of_one, atol=1e-5)


def test_the_objectives_do_what_they_are_here_for(found: Found) -> None:
    ways = found.ways["qwen3"]
    tokens = sum(max(n - 3, 1) for n in LENGTHS)
    all_terms = ways["dapo, all terms, chunk 7, fused True"]
    assert 0 < all_terms["kept"][0] < tokens
    assert all_terms["figures"]["actor/kl_loss"] > 0
    for objective in OBJECTIVES:
        grads = ways[f"{objective}, chunk 7, fused True"]["gradient"].values()
        assert all(g.abs().max() > 1e-4 for g in grads)
    clipped = all_terms["figures"]
    assert 0 < clipped["actor/pg_clipfrac"] < 1 and 0 < clipped["actor/pg_clipfrac_lower"] < 1


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_in_parts_gives_what_the_whole_one_does(found: Found, size: int) -> None:
    """The last of four ranks has nothing but padding, and some parts of a row are -inf."""
    want = found.ops
    ranks = [rank[f"ops {size}"] for rank in found.gang[:size]]
    for name, value in want.items():
        if name.endswith(("columns", "rows")):
            dim = 1 if name.endswith("columns") else 0
            ours = torch.cat([rank[name] for rank in ranks], dim)
            assert (ours.narrow(dim, 9, ours.size(dim) - 9) == 0).all(), name
            parts, value = [ours.narrow(dim, 0, 9)], value.narrow(dim, 0, 9)
        else:
            parts = [rank[name] for rank in ranks]
        assert value.isfinite().all() and value.abs().max() > 1e-3, name
        for ours in parts:
            assert torch.allclose(ours, value, rtol=1e-11, atol=1e-12), name


def test_a_group_that_does_not_fit_the_logits_is_refused(found: Found) -> None:
    for rank in found.gang[:2]:
        assert "vocab_size 9: the group's 2 parts of 4 columns hold 8" in rank["refused"]
