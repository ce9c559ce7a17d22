"""tools/bench_histospec.py: its figures from rows that were made up."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import bench_histospec as tool  # noqa: E402


def step(**more: float) -> dict[str, float]:
    row = {"timing_s/gen": 2.0, "timing_s/step": 4.0, "sched/decode_steps": 50.0}
    return row | {"sched/decode_tokens": 1000.0, "critic/score/mean": 0.5} | more


def test_a_mean_over_batches_weighs_requests_and_the_tail_is_of_small_ones() -> None:
    spec = {"spec/gate": 0.5, "spec/drafted_tokens": 300.0, "spec/speculated_tokens": 0.2}
    one = step(**spec, **{"spec/rows/4": 30.0, "spec/tokens_per_row/4": 2.0, "spec/gate/4": 1.0})
    two = step(
        **spec,
        **{"spec/rows/1": 10.0, "spec/tokens_per_row/1": 4.0, "spec/gate/1": 0.0},
        **{"spec/rows/64": 960.0, "spec/tokens_per_row/64": 1.0, "spec/gate/64": 0.0},
    )
    first, second = tool.figures([{"step": 0}, one, one, one, two], per_epoch=2)
    assert first["tokens_per_row_tail"] == first["tokens_per_row"] == 2.0
    assert second["tokens_per_row_tail"] == pytest.approx((30 * 2 + 10 * 4) / 40)
    assert second["tokens_per_row"] == pytest.approx((60 + 40 + 960) / 1000)
    assert second["gate_tail"] == pytest.approx(0.75)
    assert second["acceptance"] == pytest.approx(400 / 600)
    assert second["gen_tokens_per_s"] == 500 and second["forwards"] == 50


def test_without_drafts_a_request_gains_one_token_in_a_forward() -> None:
    (found,) = tool.figures([step(), step()], per_epoch=2)
    assert found["tokens_per_row"] == found["tokens_per_row_tail"] == 1.0
    assert found["acceptance"] is None and found["speculated"] == 0.0


def test_rows_compare_epochs_that_have_a_history_with_the_first_arm() -> None:
    slow, fast = (tool.figures([step()] * 3, 1) for _ in range(2))
    for epoch in fast[1:]:
        epoch["forwards"] = 20.0
    rows = tool.rows_of({("none", 0): slow, ("history", 0): fast})
    row = {r["name"]: r for r in rows}["history: forwards, epoch 2 on"]
    assert row["value"] == 20 and row["baseline"] == 50 and row["ratio"] == pytest.approx(0.4)
    assert len(rows) == len(tool.UNITS) * 2 * 4
