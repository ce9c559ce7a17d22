"""Labels of cells that compare published and simulated values."""

import pytest

from rlcore.sim.table import TableResult, over_seeds, row, show, summary


@pytest.mark.parametrize(
    ("published", "simulated", "more", "kind"),
    [
        (2.0, 2.29, {}, "predicted"),
        (2.0, 2.31, {}, "not reproduced"),
        (2.0, 1.69, {}, "not reproduced"),
        (2.0, 2.1, {"kind": "fitted"}, "fitted"),
        (2.0, 2.1, {"fitted": True}, "fitted"),
        (2.0, 4.0, {"fitted": True}, "not reproduced"),
        (2.0, 2.0, {"kind": "arithmetic"}, "arithmetic"),
        (None, 2.0, {}, "ours"),
        (1.06, 1.0, {}, "predicted"),
        (1.06, 1.0, {"even": 1}, "not reproduced"),  # the effect is absent
        (1.06, 0.98, {"even": 1}, "not reproduced"),  # the effect is reversed
        (1.06, 1.04, {"even": 1}, "predicted"),
        (1.06, 1.02, {"even": 1}, "not reproduced"),  # a third of the effect
        (1.08, 1.24, {"even": 1}, "not reproduced"),  # three times the effect
        (1.0, 0.98, {"even": 1}, "predicted"),  # no effect is published
        (0.0, 0.1, {}, "not reproduced"),
    ],
)
def test_the_kind_of_a_cell_follows_from_its_error(published, simulated, more, kind) -> None:
    assert row("a", published, simulated, **more)["kind"] == kind


def test_the_summary_counts_wrong_predictions_too() -> None:
    rows = [
        row("a", 1.0, 1.1),
        row("b", 1.0, 1.5),
        row("c", 1.0, 3.0),
        row("d", 1.0, 1, fitted=True),
    ]
    assert summary(rows) == {
        "cells": {"fitted": 1, "predicted": 1, "not reproduced": 2},
        "median_error": 0.5,
    }
    said = show(TableResult("t", rows, []))
    assert "cells: 1 fitted, 1 predicted, 2 not reproduced; median relative error" in said[-1]


def test_the_mean_of_seeds_has_the_kind_of_the_mean() -> None:
    """The published value is 1.25. The first seed is 20 % off, but the mean of both is 12 % off,
    so the cell counts as predicted."""
    seeds = [
        TableResult("t", [row("a", 1.25, x), row("b", None, x, holds=x < 1.1)], ["n"])
        for x in (1.0, 1.2)
    ]
    a, b = over_seeds(seeds).rows
    assert (a["simulated"], a["kind"], b["kind"], b["holds"]) == (1.1, "predicted", "ours", False)
    assert a["spread"] == {"seeds": 2, "min": 1.0, "max": 1.2, "sd": 0.1414}
    assert over_seeds(seeds[:1]) is seeds[0]
