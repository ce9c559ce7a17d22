"""curve.png: a run at a glance, and several runs laid over each other.

matplotlib is imported only when a figure is drawn, and without pyplot: no display, no global state.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcore.metrics.names import PHASES
from rlcore.metrics.sinks import accuracies, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
"""Okabe and Ito's, which people with colour blindness can tell apart."""
PHASE_LABELS = {"old_log_prob": "old log-probs", "ref": "reference", "adv": "advantages",
                "update_actor": "update", "gen": "generate", "sync": "weight sync"}  # fmt: skip


def curve(run_dir: Path, out: Path | None = None) -> Path:
    """Draw `<run_dir>/curve.png`: reward, held-out accuracy, response length, time by phase.
    Returns its path; ValueError where the run has no metrics."""
    rows = _rows(run_dir)
    figure, axes = _figure(f"{run_dir.name}: {_steps(rows)} steps")
    _reward(axes[0], rows, COLORS[0], "")
    for i, (name, points) in enumerate(accuracies(rows).items()):
        _accuracy(axes[1], points, COLORS[i % len(COLORS)], name)
    _lengths(axes[2], rows)
    _times(axes[3], rows)
    return _save(figure, axes, out or run_dir / "curve.png")


def compare(runs: Mapping[str, Path] | Sequence[Path], out: Path) -> Path:
    """Lay runs over each other: `{label: run_dir}`, or folders, which are their own labels. Returns
    `out`; ValueError where a run has no metrics or there is none."""
    named = dict(runs) if isinstance(runs, Mapping) else {run.name: run for run in runs}
    if not named:
        raise ValueError("compare: no runs given; name at least one run folder")
    loaded = {label: _rows(path) for label, path in named.items()}
    figure, axes = _figure(" against ".join(named) if len(named) < 4 else f"{len(named)} runs")
    sets = {name for rows in loaded.values() for name in accuracies(rows)}
    for i, (label, rows) in enumerate(loaded.items()):
        color = COLORS[i % len(COLORS)]
        _reward(axes[0], rows, color, label)
        for j, (name, points) in enumerate(accuracies(rows).items()):
            label_of = label if len(sets) == 1 else f"{label}, {name}"
            _accuracy(axes[1], points, color, label_of, style=("-", "--", ":", "-.")[j % 4])
        _line(axes[2], rows, "response_length/mean", color, label)
        _line(axes[3], rows, "timing_s/step", color, label, average=np.median)
    axes[2].set(title="Mean response length", ylabel="tokens")
    axes[3].set(title="Time of a step (running median)", ylabel="seconds")
    return _save(figure, axes, out)


def _rows(run_dir: Path) -> Rows:
    rows = read_metrics(run_dir)
    if not rows:
        raise ValueError(f"{run_dir}: no metrics.jsonl with steps in it; is this a run's folder?")
    return rows


def _steps(rows: Rows) -> int:
    return max(row["step"] for row in rows)


def _figure(title: str) -> tuple[Any, list["Axes"]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=14)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    return figure, list(figure.subplots(2, 2).flat)


def _save(figure: Any, axes: Sequence["Axes"], out: Path) -> Path:
    for ax in axes:
        ax.set_xlabel("step")
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(x=0.02)
        ax.xaxis.get_major_locator().set_params(integer=True)
        if ax.get_legend() is None and ax.get_legend_handles_labels()[1]:
            ax.legend(fontsize=9, framealpha=0.8, edgecolor="none")
        if not ax.has_data():
            ax.text(0.5, 0.5, "not measured", ha="center", va="center", transform=ax.transAxes)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def _series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)


def _windows(values: np.ndarray) -> list[np.ndarray]:
    """For each step the values around it: about a twentieth of the run, fewer at its ends."""
    half = round(len(values) / 40)
    return [values[max(0, i - half) : i + half + 1] for i in range(len(values))]


def _line(
    ax: "Axes", rows: Rows, name: str, color: str, label: str, average: Any = np.mean
) -> None:
    """A measured line, faint, and its running average."""
    steps, values = _series(rows, name)
    if not len(values):
        return
    ax.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    smooth = [average(window) for window in _windows(values)]
    ax.plot(steps, smooth, color=color, linewidth=1.8, label=label)


def _reward(ax: "Axes", rows: Rows, color: str, label: str) -> None:
    ax.set(title="Training reward", ylabel="mean score of the step's samples")
    steps, values = _series(rows, "critic/score/mean")
    if not len(values):
        return
    longest = max(len(window) for window in _windows(values))
    _line(ax, rows, "critic/score/mean", color, label or f"mean of {longest} steps")
    error_steps, errors = _series(rows, "critic/score/std_err")
    if len(errors) == len(values) and (error_steps == steps).all():
        center = np.array([np.mean(window) for window in _windows(values)])
        # steps draw their prompts independently, so the errors of a window add in squares
        half = [math.sqrt(np.sum(w**2)) / len(w) for w in _windows(errors)]
        band = "" if label else "+- 1 standard error"
        low, high = center - half, center + half
        ax.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0, label=band)


def _accuracy(
    ax: "Axes", points: Sequence[tuple[int, float, float]], color: str, label: str, style: str = "-"
) -> None:
    ax.set(title="Held-out accuracy (+- 1 standard error)", ylabel="mean score, sampled")
    steps, means, errors = (
        np.array(column, dtype=np.float64) for column in zip(*points, strict=True)
    )
    ends = f"{label}: {means[0]:.3f} to {means[-1]:.3f}"
    ax.plot(steps, means, style, color=color, marker="o", markersize=4, linewidth=1.8, label=ends)
    if np.isfinite(errors).any():
        ax.fill_between(steps, means - errors, means + errors, color=color, alpha=0.2, linewidth=0)


def _lengths(ax: "Axes", rows: Rows) -> None:
    ax.set(title="Response length", ylabel="tokens")
    for part, color in (("max", COLORS[1]), ("mean", COLORS[0]), ("min", COLORS[2])):
        _line(ax, rows, f"response_length/{part}", color, part)
    if ax.has_data():
        ax.set_ylim(bottom=0)


def _times(ax: "Axes", rows: Rows) -> None:
    """Phases stacked, smallest on top, with what no phase accounts for."""
    ax.set(title="Time of a step by phase (running median)", ylabel="seconds")
    steps, total = _series(rows, "timing_s/step")
    if not len(steps):
        return
    measured = [row for row in rows if "timing_s/step" in row]
    parts = {
        p: np.array([row.get(f"timing_s/{p}", 0.0) for row in measured], dtype=np.float64)
        for p in PHASES
    }
    parts["other"] = np.maximum(0.0, total - sum(parts.values()))
    parts = dict(sorted(parts.items(), key=lambda item: -np.sum(item[1])))
    whole = np.sum(total)
    # medians: one slow step, such as the first, must not set the scale
    shown = {
        phase: np.array([np.median(window) for window in _windows(values)])
        for phase, values in parts.items()
        if np.sum(values) >= 0.01 * whole
    }
    labels = [f"{PHASE_LABELS.get(p, p)} ({100 * np.sum(parts[p]) / whole:.0f} %)" for p in shown]
    ax.stackplot(steps, *shown.values(), labels=labels, colors=COLORS, alpha=0.8, linewidth=0)
    ax.set_ylim(0, 1.4 * np.max(sum(shown.values())))  # room for the legend
    ax.legend(loc="upper center", ncols=3, frameon=False, fontsize=9)
