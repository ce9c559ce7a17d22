"""Rows of tools/freeze_matrix.py: parts of small runs are killed and starved, and all is explained.
Slow: the other rows, and ten random schedules; the table is in build/freeze_matrix.md."""

from pathlib import Path

import pytest

from tools import freeze_matrix

pytestmark = [pytest.mark.ranks(2), pytest.mark.timeout(900)]

FILE = Path(__file__).parents[2] / "build" / "freeze_matrix.json"
FAST = "sync rank1 kill", "sync reward kill"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> freeze_matrix.Bench:
    FILE.parent.mkdir(exist_ok=True)
    return freeze_matrix.Bench(tmp_path_factory.mktemp("freeze") / "runs")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in freeze_matrix.rows()
    ],
)
def test_a_run_that_is_hurt_ends_well_or_names_what_failed_and_leaves_nothing(
    bench: freeze_matrix.Bench, name: str
) -> None:
    row = bench.row(name, *freeze_matrix.rows()[name])
    freeze_matrix.keep(FILE, row)
    if row.outcome.startswith("SKIP"):
        pytest.skip(row.outcome)
    assert row.is_explained, f"{row.outcome}\n{row}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_random_schedule_is_explained(bench: freeze_matrix.Bench, seed: int) -> None:
    mode, todo = freeze_matrix.draw(seed)
    row = bench.row(f"seed {seed} {mode}", mode, todo, seed)
    freeze_matrix.keep(FILE, row)
    assert row.is_explained, f"{row.outcome}\n{row}"


def test_a_row_whose_process_left_something_is_not_explained(
    bench: freeze_matrix.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freeze_matrix.faults, "leftovers", lambda *_: ["a file"])
    assert not bench.row("sync reward kill", *freeze_matrix.rows()["sync reward kill"]).is_explained


def test_what_has_no_row_has_a_test_of_its_own() -> None:
    for test in freeze_matrix.ELSEWHERE.values():
        file, _, name = test.partition(" ")
        assert f"def {name}(" in (FILE.parents[1] / file).read_text()
    assert "test_mux_chaos.py` | `test_whoever" in freeze_matrix.page([])


def test_the_same_seed_draws_the_same_schedule() -> None:
    assert freeze_matrix.draw(7) == freeze_matrix.draw(7) != freeze_matrix.draw(8)
