"""Draw figures: curve.png with the main curves of a run; detail.png with lengths, policy and
speeds; and comparisons of several runs.

matplotlib is imported only when a figure is drawn, and without pyplot: no display, no global state.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcore.metrics.jsonl import read_lines
from rlcore.metrics.sinks import ROLLOUTS, accuracies, read_metrics
from rlcore.utils.errors import ConfigError
from rlcore.utils.phases import STEP

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
Lengths = Mapping[int, Sequence[int]]
"""Length of each response in tokens, by step."""

ROUNDS = "rounds.jsonl"
"""Log of rollout rounds (`rollout/round_log.py`), with the length of every response."""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
"""Palette of Okabe and Ito, which people with colour blindness can tell apart."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of a figure: metrics by step."""

    title: str
    unit: str
    lines: Mapping[str, str]
    """Metric name of each line, by label."""
    log: bool = False
    average: Callable[[np.ndarray], Any] = np.mean


PANELS = (
    Panel(title="Entropy", unit="nats", lines={"": "actor/entropy"}),
    Panel(title="Gradient norm before clipping", unit="", lines={"": "actor/grad_norm"}, log=True),
    Panel(
        title="Mismatch of sampler and learner",
        unit="|p_sampler - p_learner|",
        lines={
            "largest": "training/rollout_probs_diff_max",
            "mean": "training/rollout_probs_diff_mean",
        },
        log=True,
    ),
    Panel(
        title="Load of experts",
        unit="tokens of the busiest expert / mean",
        lines={"": "actor/expert_load_max"},
    ),
    Panel(
        title="Age of trained tokens",
        unit="policy versions",
        lines={
            "largest": "training/off_policy/token_staleness/max",
            "mean": "training/off_policy/token_staleness/mean",
        },
    ),
    Panel(
        title="Drafts",
        unit="share of drafted tokens accepted",
        lines={"": "spec/acceptance_rate"},
    ),
    Panel(
        title="Speed (running median)",
        unit="tokens/s",
        lines={"sampled": "perf/gen_tokens_per_s", "trained": "perf/train_tokens_per_s"},
        average=np.median,
    ),
)
"""Panels that `detail` draws if their metrics were measured."""


def curve(run_dir: Path, out: Path | None = None) -> Path:
    """Draw `<run_dir>/curve.png`: reward, held-out accuracy, response length, time by phase; of
    `rlcore sft` loss, gradient norm, learning rate, time. Return the figure's path; raise
    ValueError if the run has no metrics."""
    rows = _rows(run_dir)
    figure, axes = _figure(f"{run_dir.name}: {_steps(rows)} steps")
    if any("actor/sft_nll" in row for row in rows):
        _losses(axes, rows)
        return _save(figure, axes, out or run_dir / "curve.png")
    _reward(axes[0], rows, COLORS[0], "")
    for i, (name, points) in enumerate(accuracies(rows).items()):
        _accuracy(axes[1], points, COLORS[i % len(COLORS)], name)
    _lengths(axes[2], rows)
    _times(axes[3], rows)
    for ax in axes:
        ax.set_xlabel("step")
    return _save(figure, axes, out or run_dir / "curve.png")


def detail(run_dir: Path, out: Path | None = None) -> Path:
    """Draw `<run_dir>/detail.png`: lengths and all measured `PANELS`. Return the figure's path;
    raise ValueError if the run has no metrics."""
    rows, lengths = _rows(run_dir), _lengths_by_step(run_dir)
    measured = {name for row in rows for name in row if row[name]}  # ages of sync runs are all 0
    panels = [p for p in PANELS if measured.intersection(p.lines.values())]
    ofs = [_histogram, lambda ax, found: _tails(ax, _parts(found)), _quantiles] if lengths else []
    if not panels and not ofs:
        raise ConfigError(
            f"{run_dir}: the run has evaluations but no step yet; plot it after step 1"
        )
    title = f"{run_dir.name}: {_steps(rows)} steps"
    figure, axes = _figure(title, len(ofs) + len(panels))
    for ax, draw in zip(axes, ofs, strict=False):
        draw(ax, lengths)
    for ax, panel in zip(axes[len(ofs) :], panels, strict=True):
        ax.set(title=panel.title, ylabel=panel.unit, xlabel="step")
        for i, (label, name) in enumerate(panel.lines.items()):
            _line(ax, rows, name, COLORS[i], label, average=panel.average)
        if panel.log and all((np.asarray(line.get_ydata()) > 0).all() for line in ax.lines):
            ax.set_yscale("log")
    return _save(figure, axes, out or run_dir / "detail.png")


def compare(runs: Mapping[str, Path] | Sequence[Path], out: Path) -> Path:
    """Draw several runs in one figure: `{label: run_dir}`, or folders, whose names are the labels.
    Return `out`; raise ValueError if a run has no metrics or there is no run."""
    named = dict(runs) if isinstance(runs, Mapping) else {run.name: run for run in runs}
    if not named:
        raise ValueError("compare: no runs given; name at least one run folder")
    loaded = {label: _rows(path) for label, path in named.items()}
    title = " against ".join(named) if len(named) < 4 else f"{len(named)} runs"
    figure, axes = _figure(title, 6)
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
    for ax in axes[:4]:
        ax.set_xlabel("step")
    lengths = {label: _lengths_by_step(path) for label, path in named.items()}
    _tails(axes[4], {label: _all(found) for label, found in lengths.items() if found})
    _bars(axes[5], loaded)
    return _save(figure, axes, out)


def _rows(run_dir: Path) -> Rows:
    rows = read_metrics(run_dir)
    if not rows:
        raise ConfigError(f"{run_dir}: no metrics.jsonl with steps; give the folder of a run")
    return rows


def _steps(rows: Rows) -> int:
    return max(row["step"] for row in rows)


def _lengths_by_step(run_dir: Path) -> Lengths:
    """Return response lengths by step: of all counted responses in rounds.jsonl, or, if that file
    is missing, of the responses in rollouts.jsonl."""
    found: dict[int, list[int]] = {}
    for row in read_lines(run_dir / ROUNDS):
        if row["counted"]:
            found[row["step"]] = [counted[1] for counted in row["counted"]]
    if not found:
        for row in read_lines(run_dir / ROLLOUTS):
            found.setdefault(row["step"], []).append(row["num_tokens"])
    return found


def _figure(title: str, panels: int = 4) -> tuple[Any, list["Axes"]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(panels, 2 if panels <= 4 else 3)
    height = math.ceil(panels / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(6 * columns, 4 * height), dpi=100, layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=14)
    axes = list(figure.subplots(height, columns, squeeze=False).flat)
    for ax in axes[panels:]:
        ax.remove()
    return figure, axes[:panels]


def _save(figure: Any, axes: Sequence["Axes"], out: Path) -> Path:
    for ax in axes:
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(x=0.02)
        if ax.get_xlabel() == "step":
            locator = ax.xaxis.get_major_locator()
            locator.set_params(integer=True)  # type: ignore[call-arg]  # a linear axis has MaxNLocator
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
    """Return a window of values around each step: a twentieth of the run, less near its ends."""
    half = round(len(values) / 40)
    return [values[max(0, i - half) : i + half + 1] for i in range(len(values))]


def _line(
    ax: "Axes", rows: Rows, name: str, color: str, label: str, average: Any = np.mean
) -> None:
    """Draw the measured values as a faint line, and their running average as a strong line."""
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
        # Steps draw prompts independently, so the squared standard errors in a window add up.
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


def _losses(axes: Sequence["Axes"], rows: Rows) -> None:
    axes[0].set(title="Loss of learned tokens", ylabel="nats per token")
    _line(axes[0], rows, "actor/sft_nll", COLORS[0], "training")
    held_out = dict.fromkeys(name for row in rows for name in row if name.endswith("/nll/mean"))
    for i, name in enumerate(held_out):
        steps, values = _series(rows, name)
        ends = f"{name.split('/')[1]}: {values[0]:.3f} to {values[-1]:.3f}"
        axes[0].plot(steps, values, color=COLORS[(i + 1) % len(COLORS)], marker="o", label=ends)
    axes[1].set(title="Gradient norm before clipping", yscale="log")
    _line(axes[1], rows, "actor/grad_norm", COLORS[0], "", np.median)
    axes[2].set(title="Learning rate")
    axes[2].plot(*_series(rows, "actor/lr"), color=COLORS[0])
    _times(axes[3], rows)
    for ax in axes:
        ax.set_xlabel("step")


def _lengths(ax: "Axes", rows: Rows) -> None:
    ax.set(title="Response length", ylabel="tokens")
    for part, color in (("max", COLORS[1]), ("mean", COLORS[0]), ("min", COLORS[2])):
        _line(ax, rows, f"response_length/{part}", color, part)
    if ax.has_data():
        ax.set_ylim(bottom=0)


def _times(ax: "Axes", rows: Rows) -> None:
    """Draw the phases stacked, the largest at the bottom, and the time outside of all phases."""
    ax.set(title="Time of a step by phase (running median)", ylabel="seconds")
    steps, total = _series(rows, "timing_s/step")
    if not len(steps):
        return
    measured = [row for row in rows if "timing_s/step" in row]
    parts = {
        p: np.array([row.get(f"timing_s/{p}", 0.0) for row in measured], dtype=np.float64)
        for p in STEP
    }
    parts["other"] = np.maximum(0.0, total - sum(parts.values()))
    parts = dict(sorted(parts.items(), key=lambda item: -np.sum(item[1])))
    whole = np.sum(total)
    # Medians keep one slow step, such as the first, from setting the scale.
    shown = {
        phase: np.array([np.median(window) for window in _windows(values)])
        for phase, values in parts.items()
        if np.sum(values) >= 0.01 * whole
    }
    labels = [f"{p} ({100 * np.sum(parts[p]) / whole:.0f} %)" for p in shown]
    ax.stackplot(steps, *shown.values(), labels=labels, colors=COLORS, alpha=0.8, linewidth=0)
    ax.set_ylim(0, 1.5 * np.max(sum(shown.values())))  # This limit leaves room for the legend.
    ax.legend(loc="upper center", ncols=2, frameon=False, fontsize=9)


def _all(lengths: Lengths) -> np.ndarray:
    return np.concatenate([np.asarray(found) for found in lengths.values()])


def _parts(lengths: Lengths) -> dict[str, np.ndarray]:
    """Return the response lengths of the first and of the last third of the steps. With fewer than
    3 steps, return the lengths of all steps."""
    steps = sorted(lengths)
    third = len(steps) // 3
    if third < 1:
        return {_span(steps): _all(lengths)} if steps else {}
    halves = steps[:third], steps[-third:]
    return {_span(part): _all({s: lengths[s] for s in part}) for part in halves}


def _span(steps: Sequence[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def _histogram(ax: "Axes", lengths: Lengths) -> None:
    ax.set(title="Response lengths", xlabel="tokens", ylabel="share of responses")
    parts = _parts(lengths)
    edges = np.histogram_bin_edges(np.concatenate(list(parts.values())), bins=40)
    for color, (label, values) in zip(COLORS, parts.items(), strict=False):
        share = np.full(len(values), 1 / len(values))
        label = f"{label}: mean {values.mean():.0f}"
        ax.hist(values, edges.tolist(), weights=share, color=color, alpha=0.45, label=label)


def _tails(ax: "Axes", parts: Mapping[str, np.ndarray]) -> None:
    """Draw the share of responses longer than each length, with both axes logarithmic."""
    ax.set(
        title="Tail of response lengths",
        xlabel="tokens",
        ylabel="share of responses that are longer",
    )
    for i, (label, found) in enumerate(parts.items()):
        values = np.sort(found)
        share = 1 - np.arange(len(values)) / len(values)
        middle, most = np.median(values), values[-1]
        label = f"{label}: longest / median {most / max(middle, 1):.1f}"
        ax.step(values, share, where="pre", color=COLORS[i % len(COLORS)], label=label)
    if parts:
        ax.set_xscale("log")
        ax.set_yscale("log")


def _quantiles(ax: "Axes", lengths: Lengths) -> None:
    ax.set(title="Response lengths by step", ylabel="tokens", xlabel="step")
    steps = sorted(lengths)
    for i, (label, q) in enumerate(
        {"longest": 1.0, "99 %": 0.99, "90 %": 0.9, "median": 0.5}.items()
    ):
        values = np.array([np.quantile(lengths[s], q) for s in steps])
        smooth = [np.median(window) for window in _windows(values)]
        ax.plot(steps, values, color=COLORS[i], alpha=0.25, linewidth=0.8)
        ax.plot(steps, smooth, color=COLORS[i], linewidth=1.8, label=label)
    ax.set_ylim(bottom=0)


def _bars(ax: "Axes", loaded: Mapping[str, Rows]) -> None:
    """Draw the median seconds of a step by phase, one bar per run."""
    ax.set(title="Time of a step by phase", xlabel="seconds (median over steps)")
    names = list(loaded)[::-1]
    left = np.zeros(len(names))
    shares = {
        phase: np.array([_median(loaded[name], f"timing_s/{phase}") for name in names])
        for phase in STEP
    }
    whole = np.array([_median(loaded[name], "timing_s/step") for name in names])
    shares["other"] = np.maximum(0.0, whole - sum(shares.values()))
    seen = [phase for phase, values in shares.items() if np.any(values >= 0.01 * whole.max())]
    for i, phase in enumerate(seen if whole.max() > 0 else []):
        ax.barh(names, shares[phase], left=left, color=COLORS[i % len(COLORS)], label=phase)
        left = left + shares[phase]
    if seen:
        ax.set_ylim(-0.6, 1.4 * len(names) - 0.4)  # This limit leaves room for the legend.
        ax.legend(loc="upper center", ncols=3, frameon=False, fontsize=9)


def _median(rows: Rows, name: str) -> float:
    values = [row.get(name, 0.0) for row in rows if "timing_s/step" in row]
    return float(np.median(values)) if values else 0.0
