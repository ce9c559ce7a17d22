"""Engines that take long to start: the wait is of no step and of no push."""

from pathlib import Path

import pytest

from rlcore.metrics.screen import final_table
from rlcore.metrics.sinks import read_metrics, summarise
from tests import runs
from tests.contracts.odd_engines import LATE_S

pytestmark = pytest.mark.ranks(2)

BARE = "--checkpoint.no_at_end", "--checkpoint.no_export_hf", "--eval.no_at_end", "--run.steps", 2
MODES = {
    "sync": ("--rollout.process", "child"),
    "stream": ("--mode", "stream"),
    "async": ("--mode", "async", "--cluster.rollout_ranks", 1, "--eval.no_at_start"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, runs.Gang]:
    folder = tmp_path_factory.mktemp("start")
    model = runs.tiny_model(folder / "model")
    jobs = [
        {
            "name": name,
            "argv": runs.arguments(model, folder / "runs", name, *BARE, *more),
            "engine": "tests.contracts.odd_engines:late",
            "ranks": 1 if name == "sync" else 2,
        }
        for name, more in MODES.items()
    ]
    return folder / "runs", runs.run(2, jobs, folder / "gang")


@pytest.mark.parametrize("mode", MODES)
def test_the_wait_for_a_slow_engine_is_start_up_and_in_no_share(
    found: tuple[Path, runs.Gang], mode: str
) -> None:
    folder, gang = found
    gang.check(mode, 1 if mode == "sync" else 2)
    rows = read_metrics(folder / mode)
    assert rows[0]["step"] == (1 if mode == "async" else 0)  # without an evaluation no row 0
    # The engine begins to be late a little before the run waits for it.
    assert rows[0]["timing_s/start"] >= 0.8 * LATE_S
    assert all("timing_s/start" not in row for row in rows[1:])
    table = [line.split() for line in final_table(summarise(rows))]
    shares = {line[0]: float(line[2]) for line in table if "%" in line}
    assert shares.pop("all") == 100 and "start" not in shares
    assert sum(shares.values()) == pytest.approx(100, abs=0.5)
