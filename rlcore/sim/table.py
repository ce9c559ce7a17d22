"""Tables that compare published and simulated values, for all experiments."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = dict[str, object]

Kind = Literal["fitted", "predicted", "arithmetic", "not reproduced", "ours"]
KINDS: tuple[Kind, ...] = ("fitted", "predicted", "arithmetic", "not reproduced", "ours")
"""Kinds of table cells. `fitted`: a constant was fitted on the published value of this cell.
`predicted`: no constant was. `arithmetic`: the value follows from published numbers alone.
`not reproduced`: a cell, fitted or predicted, that is wrong by the rule of `row`. `ours`: no value
is published."""

WRONG = 0.15
"""Relative error above which a cell counts as not reproduced. Two versions of one paper
differ by up to 13 % in a cell (RollPacker's 14B: speed-ups of 1.76 and 1.99), so a larger error is
not one of measurement."""
TIMES = 2.0
"""Factor between a simulated and a published effect above which a cell counts as not reproduced. A
speed-up of 1.24 is 15 % above 1.08, but three times its effect."""


@dataclass(frozen=True, slots=True)
class TableResult:
    """A table with one row per cell of a published table, and notes."""

    title: str
    rows: list[Row]
    notes: list[str]


def row(
    cell: str,
    published: float | None,
    simulated: float,
    *,
    fitted: bool = False,
    kind: Literal["fitted", "predicted", "arithmetic"] = "predicted",
    even: float | None = None,
    **more: object,
) -> Row:
    """Return the row of a cell, with the error `simulated - published`.

    A fitted or predicted cell is labelled `not reproduced` if its relative error is above `WRONG`,
    or if its effect is reversed or differs from the published effect by more than `TIMES`.

    Args:
        published: published value; None if there is none.
        fitted: same as kind="fitted".
        even: value of a cell without an effect, such as 1 for a speed-up.
    """
    label: Kind = "fitted" if fitted else kind
    if published is None:
        label = "ours"
    elif label != "arithmetic" and _is_wrong(published, simulated, even):
        label = "not reproduced"
    made: Row = {
        "cell": cell,
        "published": None if published is None else round(published, 3),
        "simulated": round(simulated, 3),
        "error": None if published is None else round(simulated - published, 3),
        "kind": label,
        **more,
    }
    return made if even is None else made | {"even": even}


def _is_wrong(published: float, simulated: float, even: float | None) -> bool:
    if abs(simulated - published) > WRONG * abs(published):
        return True
    if even is None or round(published - even, 3) == 0:
        return False
    effect = round((simulated - even) / (published - even), 3)
    return not 1 / TIMES <= effect <= TIMES


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return the number of cells of each kind, and the median relative error of the predicted and
    the not reproduced cells. Without such cells, the error is None."""
    count = Counter(r["kind"] for r in rows)
    errors = [
        abs(r["error"] / r["published"])
        for r in rows
        if r["kind"] in ("predicted", "not reproduced") and r["published"]
    ]
    median = round(statistics.median(errors), 3) if errors else None
    return {"cells": {k: count[k] for k in KINDS if count[k]}, "median_error": median}


def over_seeds(tables: Sequence[TableResult]) -> TableResult:
    """Return one table with the means of tables of several seeds, which have the same cells. Each
    row gets `spread`: minimum, maximum and standard deviation over the seeds."""
    if len(tables) == 1:
        return tables[0]
    rows = []
    for same in zip(*(t.rows for t in tables), strict=True):
        names = {str(r["cell"]) for r in same}
        assert len(names) == 1, f"tables of several seeds have different cells: {sorted(names)}"
        rows.append(_mean(same))
    notes = [*tables[0].notes, f"Means over {len(tables)} seeds; other columns are of the first."]
    return TableResult(tables[0].title, rows, notes)


def _mean(same: Sequence[Mapping[str, Any]]) -> Row:
    first, found = same[0], [float(r["simulated"]) for r in same]
    spread = {
        "seeds": len(found),
        "min": min(found),
        "max": max(found),
        "sd": round(statistics.stdev(found), 4),
    }
    known = ("cell", "published", "simulated", "error", "kind")
    more = {k: v for k, v in first.items() if k not in known} | {"spread": spread}
    if "holds" in first:
        more["holds"] = all(r["holds"] for r in same)
    kinds = {r["kind"] for r in same}
    kind: Literal["fitted", "predicted", "arithmetic"] = "predicted"
    if "arithmetic" in kinds:
        kind = "arithmetic"
    elif "fitted" in kinds:
        kind = "fitted"
    return row(first["cell"], first["published"], statistics.fmean(found), kind=kind, **more)


def show(made: TableResult) -> list[str]:
    """Return the table as lines of text, with one line per cell and the number of cells of each
    kind."""
    width = max(30, *(len(str(r["cell"])) + 2 for r in made.rows))
    lines = [made.title, "", f"{'cell':{width}}{'published':>11}{'simulated':>11}{'error':>10}"]
    for r in made.rows:
        note = f"; {r['note']}" if r.get("note") else ""
        if isinstance(spread := r.get("spread"), dict):
            note = f"; {spread['min']:.4g} to {spread['max']:.4g}, sd {spread['sd']:.2g}{note}"
        if r["published"] is None:
            told = f"{'':>11}{r['simulated']:11.5g}{'':>10}"
        else:
            told = f"{r['published']:11.5g}{r['simulated']:11.5g}{r['error']:+10.3g}"
        lines.append(f"{r['cell']:{width}}{told}  {r['kind']}{note}")
    lines += ["", _sentence(summary(made.rows))]
    return [*lines, *(["", *made.notes] if made.notes else [])]


def _sentence(found: Mapping[str, Any]) -> str:
    said = "cells: " + ", ".join(f"{n} {kind}" for kind, n in found["cells"].items())
    if found["median_error"] is None:
        return said
    return f"{said}; median relative error of predictions {found['median_error']:.1%}"
