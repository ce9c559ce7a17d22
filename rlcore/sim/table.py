"""Tables that compare published and simulated values, for all experiments."""

from dataclasses import dataclass

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class TableResult:
    """A table with one row per cell of a published table, and notes."""

    title: str
    rows: list[Row]
    notes: list[str]


def row(
    cell: str, published: float | None, simulated: float, *, fitted: bool = False, **more: object
) -> Row:
    """Return the row of a cell, with the error `simulated - published`. `published`: None if there
    is no published value."""
    return {
        "cell": cell,
        "published": None if published is None else round(published, 3),
        "simulated": round(simulated, 3),
        "error": None if published is None else round(simulated - published, 3),
        "fitted": fitted,
        **more,
    }


def show(made: TableResult) -> list[str]:
    """Return the table as lines of text, with one line per cell."""
    width = max(30, *(len(str(r["cell"])) + 2 for r in made.rows))
    lines = [made.title, "", f"{'cell':{width}}{'published':>11}{'simulated':>11}{'error':>10}"]
    for r in made.rows:
        kind = "fitted to it" if r["fitted"] else "predicted"
        note = f"; {r['note']}" if r.get("note") else ""
        if r["published"] is None:
            told, kind = f"{'':>11}{r['simulated']:11.5g}{'':>10}", "ours"
        else:
            told = f"{r['published']:11.5g}{r['simulated']:11.5g}{r['error']:+10.3g}"
        lines.append(f"{r['cell']:{width}}{told}  {kind}{note}")
    return [*lines, *(["", *made.notes] if made.notes else [])]
