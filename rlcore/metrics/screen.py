"""Print the output of rank 0: a line per step and evaluation, a progress bar, a table at the end.
Lines go through the logger, so they are also in the rank's log file."""

import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.metrics.sinks import accuracies
from rlcore.utils.clock import Clock, RealClock
from rlcore.utils.log import log
from rlcore.utils.phases import BETWEEN, STEP

QUIET_S = 30.0
SMALL_PRINT = (
    ("skipped", "actor/skipped"),
    ("critic skipped", "critic/skipped"),
    ("reward errors", "reward/errors"),
)


class Screen:
    """Terminal output of a run. `phase` can be the listener of `Spans(listener=...)`. Without a
    terminal or with `progress` off, there is no bar; long phases print lines on their progress."""

    def __init__(self, total_steps: int, progress: bool = True, clock: Clock | None = None):
        self._total_steps = total_steps
        self._clock = clock or RealClock()
        self._step, self._phase = 0, ""
        self._spoke = self._clock.now()
        self._bar = _Bar(total_steps) if progress and sys.stdout.isatty() else None

    def phase(self, name: str) -> None:
        """Show the current phase of the run; `name` "" shows no phase."""
        self._phase = name
        if self._bar is not None:
            self._bar.phase(self._phase)

    def advance(self, done: int, total: int) -> None:
        """Show that `done` of `total` responses or rows of the current phase are done."""
        if self._bar is not None:
            self._bar.advance(done, total)
        elif self._clock.now() - self._spoke >= QUIET_S:
            self._say(f"step {self._step + 1}/{self._total_steps}  {self._phase} {done}/{total}")

    def step(self, step: int, metrics: Mapping[str, float], note: str = "") -> None:
        """Print the line of a finished step. `note`: text on problems of the step."""
        self._step = step
        line = step_line(step, self._total_steps, metrics)
        self._say(f"{line}  {note}" if note else line)
        if self._bar is not None:
            self._bar.step(step)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the lines of an evaluation after a step, one per data set."""
        self._step = step
        if self._bar is not None:
            self._bar.step(step)
        for line in evaluation_lines(step, self._total_steps, metrics):
            self._say(line)

    def end(self, summary: Mapping[str, Any], folder: Path, picture: Path | None) -> None:
        """Print the table of the run's summary, and the paths of its results."""
        self.close()
        curves = [f"plot: {picture}"] if picture is not None else []
        for line in ["", *final_table(summary), "", *curves, f"run folder: {folder}"]:
            self._say(line)

    def close(self) -> None:
        """Remove the progress bar from the terminal. Idempotent."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _say(self, line: str) -> None:
        log.info(line)
        self._spoke = self._clock.now()


def step_line(step: int, total_steps: int, metrics: Mapping[str, float]) -> str:
    """Format one step in at most 140 columns, without metrics that were not measured."""
    parts = [_position(step, total_steps)]
    shown = (
        ("reward", "critic/score/mean", ".3f"),
        ("loss", "actor/loss" if "actor/loss" in metrics else "actor/pg_loss", "+.4f"),
        ("kl", "actor/kl_loss" if "actor/kl_loss" in metrics else "actor/ppo_kl", ".1e"),
        ("len", "response_length/mean", ".0f"),
    )
    parts += [f"{label} {metrics[name]:{form}}" for label, name, form in shown if name in metrics]
    time_s = metrics.get("timing_s/step", 0.0)
    if time_s > 0:
        if "perf/total_num_tokens" in metrics:
            parts.append(f"{_rate(metrics['perf/total_num_tokens'] / time_s)} tok/s")
        parts.append(f"{_seconds(time_s)} s{_phases(metrics, time_s)}")
    for label, name in SMALL_PRINT:
        if metrics.get(name):
            parts.append(f"{label} {metrics[name]:.0f}")
    return "  ".join(parts)


def evaluation_lines(step: int, total_steps: int, metrics: Mapping[str, float]) -> list[str]:
    """Format an evaluation, one line per data set: mean score with its standard error and the other
    scores, or the mean negative log-likelihood of `rlcore sft` with the perplexity."""
    lines = [
        f"{_position(step, total_steps)}  {key.split('/')[1]} nll {value:.4f}  perplexity "
        f"{math.exp(min(value, 99)):.4g}"
        for key, value in metrics.items()
        if key.startswith("val-core/") and key.endswith("/nll/mean")
    ]
    for name, points in accuracies([{"step": step, **metrics}]).items():
        _, mean, error = points[-1]
        parts = [_position(step, total_steps), f"{name} accuracy {mean:.3f}{_plus_minus(error)}"]
        core = f"val-core/{name}/acc/"
        parts += [
            f"{key.removeprefix(core)} {value:.3f}"
            for key, value in metrics.items()
            if key.startswith(core) and "/mean@" not in key
        ]
        prompts = metrics.get(f"val-aux/{name}/num_prompts")
        lines.append("  ".join(parts) + (f"  ({prompts:.0f} prompts)" if prompts else ""))
    return lines


def evaluation_table(metrics: Mapping[str, float]) -> list[str]:
    """Format an evaluation as a table: per data set the mean score with its standard error over
    prompts, and a row for every other score."""
    rows = [("data set", "score", "value", "prompts"), *evaluation_rows(metrics)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]
    return [lines[0].rstrip(), "-" * len(lines[0]), *(line.rstrip() for line in lines[1:])]


def evaluation_rows(metrics: Mapping[str, float]) -> list[tuple[str, str, str, str]]:
    """Return the cells of `evaluation_table`: data set, score, value, number of prompts."""
    rows = []
    for name, points in accuracies([{"step": 0, **metrics}]).items():
        core = f"val-core/{name}/acc/"
        prompts = f"{metrics[f'val-aux/{name}/num_prompts']:.0f}"
        for key, value in metrics.items():
            if not key.startswith(core):
                continue
            error = points[-1][2] if "/mean@" in key else math.nan
            shown = f"{value:.4f}{_plus_minus(error)}"
            rows.append((name, key.removeprefix(core), shown, prompts))
        length = metrics[f"val-aux/{name}/response_length/mean"]
        rows.append((name, "tokens", f"{length:.1f}", prompts))
    return rows


def final_table(summary: Mapping[str, Any]) -> list[str]:
    """Format a finished run: accuracy before and after training by data set, time by phase, time
    before the first step, and speeds. `summary`: result of `sinks.summarise`."""
    lines = _accuracy_table(summary)
    if "timing_s/step" not in summary:
        return lines
    steps = summary["measured_steps"]
    seconds = {p: summary.get(f"timing_s/{p}", 0.0) for p in (*STEP, *BETWEEN)}
    step_s = summary["timing_s/step"]
    whole = step_s + sum(seconds[p] for p in BETWEEN)
    seconds["other"] = max(0.0, step_s - sum(seconds[p] for p in STEP))
    lines += ["", *_heading("time", "s per step", "share", "total s")]
    for phase, value in sorted(seconds.items(), key=lambda item: -item[1]):
        if value >= 0.0005 * whole:
            share = f"{100 * value / whole:.1f} %"
            lines.append(_columns(phase, f"{value:.3f}", share, f"{value * steps:.1f}"))
    lines.append(_columns("all", f"{whole:.3f}", "100 %", f"{whole * steps:.1f}"))
    key = "before_s/"
    before = [f"{k.removeprefix(key)} {v:.1f} s" for k, v in summary.items() if k.startswith(key)]
    if before:
        lines.append(f"before the first step: {', '.join(before)}")
    rates = (
        ("samples/s", "perf/samples_per_s"),
        ("tokens/s sampled", "perf/gen_tokens_per_s"),
        ("tokens/s trained", "perf/train_tokens_per_s"),
    )
    speeds = [f"{_rate(summary[name])} {label}" for label, name in rates if name in summary]
    if "perf/mfu/actor" in summary:
        speeds.append(
            f"training at {100 * summary['perf/mfu/actor']:.1f} % of the GPUs' peak FLOP/s"
        )
    return [*lines, "", f"{steps} steps: {', '.join(speeds)}" if speeds else f"{steps} steps"]


def changes(summary: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Return the accuracy before and after training, and the standard error of their difference
    (NaN if it is not known), by data set. `summary`: result of `sinks.summarise`."""
    prefix = "val/accuracy_start/"
    found = {}
    for name in (key.removeprefix(prefix) for key in summary if key.startswith(prefix)):
        before, after = (summary[f"val/accuracy_{which}/{name}"] for which in ("start", "end"))
        error = math.hypot(*(summary[f"val/std_err_{which}/{name}"] for which in ("start", "end")))
        found[name] = before, after, error
    return found


def _accuracy_table(summary: Mapping[str, Any]) -> list[str]:
    found = changes(summary)
    lines = _heading("accuracy", "before", "after", "change") if found else []
    for name, (before, after, error) in found.items():
        change = f"{after - before:+.3f}{_plus_minus(error)}"
        lines.append(_columns(name, f"{before:.3f}", f"{after:.3f}", change))
    return lines


def _phases(metrics: Mapping[str, float], time_s: float) -> str:
    """Format the longest phases that take at least 2 % of the step: up to four, in step order."""
    seconds = {phase: metrics.get(f"timing_s/{phase}", 0.0) for phase in STEP}
    longest = sorted(STEP, key=lambda phase: -seconds[phase])[:4]
    parts = [
        f"{phase} {_seconds(seconds[phase])}"
        for phase in STEP
        if phase in longest and seconds[phase] >= 0.02 * time_s
    ]
    return f" ({' '.join(parts)})" if parts else ""


def _position(step: int, total_steps: int) -> str:
    return f"step {step:>{len(str(total_steps))}}/{total_steps}"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _rate(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def _plus_minus(error: float) -> str:
    return "" if math.isnan(error) else f" +- {error:.3f}"


def _columns(first: str, *others: str) -> str:
    return (
        f"{first:<24}" + "".join(f"{text:>12}" for text in others[:2]) + "  " + others[2].rjust(16)
    )


def _heading(*texts: str) -> list[str]:
    line = _columns(*texts)
    return [line, "-" * len(line)]


class _Bar:
    """Progress bar of the package rich; the logger's lines are printed above the bar."""

    def __init__(self, total_steps: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        # The console that rich shares decides at its first use whether it draws.
        console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            TextColumn("{task.fields[count]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,
        )
        total = total_steps or None
        self._steps = self._progress.add_task("steps", total=total, count=f"0/{total_steps}")
        self._part = self._progress.add_task("", total=None, count="", visible=False)
        self._total_steps = total_steps
        terminal = sys.stdout
        self._progress.start()  # This replaces sys.stdout by a stream that prints above the bar.
        self._handlers = [
            (handler, handler.setStream(sys.stdout))
            for handler in log.handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is terminal
        ]

    def step(self, step: int) -> None:
        self._progress.update(self._steps, completed=step, count=f"{step}/{self._total_steps}")

    def phase(self, name: str) -> None:
        # Short phases would flicker, so only phases that report progress are shown.
        self._progress.reset(self._part, description=name, total=None, visible=False, count="")

    def advance(self, done: int, total: int) -> None:
        self._progress.update(
            self._part, completed=done, total=total, count=f"{done}/{total}", visible=True
        )

    def close(self) -> None:
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._progress.stop()
