"""Tables and pictures of the rows of bench_drafts.py."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafts import equal
from rich import box
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]

COLUMNS: tuple[tuple[str, str, str], ...] = (  # title, key, format
    ("window", "window", ""),
    ("batch p50", "batch_p50_us", ",.0f"),
    ("p99", "batch_p99_us", ",.0f"),
    ("draft p50", "draft_p50_us", ",.0f"),
    ("p99", "draft_p99_us", ",.0f"),
    ("req p50", "req_p50_us", ".1f"),
    ("p99", "req_p99_us", ".1f"),
    ("Mtok/s", "build_mtok_s", ".2f"),
    ("B/tok", "bytes_per_token", ".0f"),
    ("tok/step", "tok_per_step", ".2f"),
    ("drafted", "drafted_per_step", ".2f"),
    ("prec", "precision", ".2f"),
)
NOTE = (
    "batch: append_batch + speculate_batch of all live requests (advance + draft), CPU us\n"
    "draft: speculate_batch alone; req: speculate of one request; Mtok/s: build, CPU time; "
    "B/tok: growth of resident memory per history token\n"
    "tok/step: accepted + the bonus token per verify step; drafted: per step (nodes, of a tree); "
    "prec: accepted / drafted"
)


def console() -> Console:
    """Wide enough for the tables, also where the output is a file; keeps what it prints."""
    return Console(width=180, highlight=False, record=True)


def table(rows: list[Row], title: str) -> Table:
    """One line per peer and window."""
    t = _table(title, NOTE, [name for name, _, _ in COLUMNS])
    for row in rows:
        t.add_row(row["peer"], *(_cell(row, key, how) for _, key, how in COLUMNS))
    return t


def _cell(row: Row, key: str, how: str) -> str:
    nothing_to_build = key == "build_mtok_s" and row["own_bytes_per_token"] in (None, 0)
    return "-" if nothing_to_build else format(row[key], how)


def _table(title: str, note: str, columns: list[str]) -> Table:
    left = {"title_justify": "left", "caption_justify": "left"}
    t = Table(title=title, caption=note, box=box.MARKDOWN, **left)
    t.add_column("peer", overflow="fold")
    for name in columns:
        t.add_column(name, justify="right", no_wrap=True)
    return t


def fronts(rows: list[Row]) -> dict[str, equal.Front]:
    """Each peer's front."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["drafted_per_step"] > 0:
            point = (row["drafted_per_step"], row["tok_per_step"])
            points.setdefault(row["peer"], []).append(point)
    return {peer: equal.front(found) for peer, found in points.items()}


def points_table(rows: list[Row], title: str) -> Table:
    """One line per setting of a scan."""
    t = _table(title, "", ["settings", "window", "tok/step", "drafted", "prec", "batch p50"])
    for row in rows:
        knobs = " ".join(f"{name}={value:g}" for name, value in row["knobs"].items())
        shown = (row["tok_per_step"], row["drafted_per_step"], row["precision"])
        numbers = [format(value, ".2f") for value in shown]
        t.add_row(row["peer"], knobs, row["window"], *numbers, f"{row['batch_p50_us']:,.0f}")
    return t


def text(recorded: Console) -> str:
    """What was printed, without the blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in recorded.export_text().splitlines()) + "\n"


def equal_table(rows: list[Row]) -> Table:
    """Tokens per step at equal drafted tokens."""
    title = "tokens per step at equal drafted tokens per step"
    note = "the best of each peer's own settings, interpolated; -: out of its range"
    t = _table(title, note, [f"{x:g}" for x in equal.AT])
    for peer, line in fronts(rows).items():
        values = [equal.at(line, x) for x in equal.AT]
        t.add_row(peer, *("-" if v is None else f"{v:.2f}" for v in values))
    return t


def margins(rows: list[Row]) -> list[str]:
    """For each of ours, its least lead over each arctic, as sentences."""
    lines = fronts(rows)
    said = []
    for ours in (p for p in lines if p.startswith("rlcore")):
        for theirs in (p for p in lines if p.startswith("arctic")):
            found = equal.margin(lines[ours], lines[theirs])
            if found is None:
                said.append(f"{ours} and {theirs}: no common range of drafted tokens")
            else:
                lead, x = found
                said.append(f"{ours} over {theirs}: at least {lead:+.2f} tok/step (at {x:.1f})")
    return said


def picture(rows: list[Row], path: Path, title: str) -> None:
    """Tokens per step against the time of a batch, one mark per peer and window."""
    fig, ax, style = _axes(rows, title)
    marks = dict(zip(dict.fromkeys(r["window"] for r in rows), "os^vDP", strict=False))
    for row in rows:
        if row["peer"] == "empty":
            continue
        peer, window = row["peer"], row["window"]
        first = window == next(iter(marks))
        ax.plot(
            row["batch_p50_us"],
            row["tok_per_step"],
            marks.get(window, "x"),
            color=style(peer),
            label=peer if first else None,
        )
    ax.set_xscale("log")
    windows = ", ".join(f"{mark} {name}" for name, mark in marks.items())
    ax.set_xlabel(f"advance + draft of the whole batch, CPU us p50 (marks: {windows})")
    _save(fig, ax, path)


def equal_picture(rows: list[Row], path: Path, title: str) -> None:
    """Tokens per step against drafted tokens per step, a line per peer."""
    fig, ax, style = _axes(rows, title)
    for peer, line in fronts(rows).items():
        x, y = zip(*line, strict=True)
        ax.plot(x, y, ".-", color=style(peer), label=peer)
    ax.set_xlabel("drafted tokens per step")
    _save(fig, ax, path)


def _axes(rows: list[Row], title: str) -> tuple[Any, Any, Callable[[str], Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(figsize=(8, 5))
    ax.set_title(textwrap.fill(title, 110), fontsize=9, loc="left")
    ax.set_ylabel("tokens per verify step")
    ax.grid(alpha=0.3)
    names = list(dict.fromkeys(row["peer"] for row in rows))
    colours = plt.get_cmap("tab10" if len(names) <= 10 else "tab20")
    return fig, ax, lambda peer: colours(names.index(peer) % colours.N)


def _save(fig: Any, ax: Any, path: Path) -> None:
    ax.legend(fontsize=7)
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=80)
