"""One gradient whatever the split: whole objectives, with sequence-level ratios and rejection,
under data, tensor, context and pipeline parallelism and any cut into micro-batches."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import kit
from tests.ranks.objective_ranks import OBJECTIVES, rows
from tests.ranks.sizes import LENGTHS

pytestmark = pytest.mark.ranks(4)

BUDGETS = [64, 1, 1000]
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"cp2": {"cp": 2}},
    3: {"dp3": {}},
    4: kit.cases(
        {
            "dp4, one sequence at a time": {"tokens_per_micro_batch": 1},
            "tp2 sp dp2": {"tp": 2},
            "pp2 dp2": {"pp": 2},
            "cp2 dp2": {"cp": 2},
            "cp2 pp2": {"cp": 2, "pp": 2},
        },
        "pp2 dp2",
        "cp2 dp2",
    ),
}
CASES = [(n, name) for n, cases in LAYOUTS.items() for name in cases]


class Found:
    def __init__(self, folder: Path):
        target, file = "tests.ranks.objective_ranks", str(folder / "logp")
        args = {"logp_file": file, "budgets": BUDGETS}
        self.alone = kit.run_ranks(1, f"{target}:alone", args)[0]
        self.ranks = {
            n: kit.run_ranks(n, f"{target}:gang", {"logp_file": file, "cases": cases})
            for n, cases in LAYOUTS.items()
        }
        self.want = self.alone[str(BUDGETS[0])]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("objective"))


def check(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Every tensor's gradient within 1e-5 of the largest entry of that tensor."""
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        if name == "kept":
            assert ours[name].tolist() == want.tolist()
            continue
        scale = float(want.abs().max())
        worst = float((ours[name] - want).abs().max())
        assert worst <= 1e-5 * scale + 1e-9, (name, worst, scale)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("budget", BUDGETS[1:])
def test_the_cut_into_micro_batches_changes_nothing(found: Found, objective, budget) -> None:
    check(found.alone[str(budget)][objective], found.want[objective])


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("n", "layout"), CASES)
def test_the_layout_changes_nothing(found: Found, objective, n, layout) -> None:
    for rank in found.ranks[n]:
        check(rank[layout][objective], found.want[objective])


def test_the_objectives_do_what_they_are_here_for(found: Found) -> None:
    """Some tokens are rejected and some sequences, not all; no gradient is nothing."""
    tokens = int(rows().mask.sum())
    kept = {name: found.want[name]["kept"].tolist() for name in OBJECTIVES}
    assert kept["grpo, token TIS"] == [tokens, len(LENGTHS)]
    for name, (_, settings) in OBJECTIVES.items():
        if "rollout_rs" in settings:
            assert 0 < kept[name][0] < tokens, (name, kept[name])
    assert kept["topr of sequences, sequences rejected"][1] < len(LENGTHS)
    for name in OBJECTIVES:
        norm = torch.stack([g.norm() for k, g in found.want[name].items() if k != "kept"]).norm()
        assert float(norm) > 1e-3, name
